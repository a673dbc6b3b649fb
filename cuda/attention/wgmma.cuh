// Part of kernels for sm_90a: products of a warpgroup, four warps in a row from a multiple of four on.
// Operand B is in shared memory, and A and the sums in registers. A product runs beside its threads:
//   wgmma_fence before the first product, and after each wait, once the registers of the next products are written
//   wgmma_commit closes a group of products; wgmma_wait<n> waits for all groups but the n newest
//   until then no thread may touch the registers of a product, or write what it reads in shared memory
//   what threads store to shared memory, also by cp_async, is seen by products after fence_async_proxy of the thread
//   that stored it and then a barrier
// The tests' CPU emulator has its own versions of everything between #ifndef POLAR_EMULATOR and #endif.
//
// Registers of thread 32w + 4g + tg of a warpgroup:
//   d[i]  row 16w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2tg + i % 2
//   a[r]  row 16w + g + 8 (r % 2), columns 2tg + 8 (r / 2) + {0, 1} of 16, the low half first
// TARGET: sm_90a.

#ifndef POLAR_EMULATOR
// The compiler does not move what computes or uses registers over a point where they are named so.
template <int COUNT>
__device__ __forceinline__ void keep_here(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void keep_here(unsigned (&a)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int GROUPS_LEFT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS_LEFT) : "memory");
}

__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define SUMS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)

// d (64, 64) = a (64, 16) · B, or += if ADDS. b: the descriptor of B's columns.
template <bool ADDS>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[32], const unsigned (&a)[4], unsigned long long b) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
        "{%32,%33,%34,%35}, %36, adds, 1, 1, 0;\n}\n"
        : SUMS_16(0), SUMS_16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADDS)));
}

// The same for 128 columns.
template <bool ADDS>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[64], const unsigned (&a)[4], unsigned long long b) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
        "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
        "{%64,%65,%66,%67}, %68, adds, 1, 1, 0;\n}\n"
        : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADDS)));
}
#endif

// A tile of B: columns of 64 halves, which are multiplied by a row of A; each has 128 bytes, and eight of them
// are a pattern that begins at a multiple of 1,024 bytes. So that threads that access different columns at once meet
// different banks, the number of a column in its pattern is added, by exclusive or, to the number of each of its 16
// bytes: the 128-byte swizzle.
constexpr int COLUMN_BYTES = 128, PATTERN_BYTES = 1024;

// Where byte `byte` of column `column` lies in a tile.
__device__ __forceinline__ constexpr int swizzled(int column, int byte) {
    return column * COLUMN_BYTES + (byte ^ column % 8 * 16);
}

// The descriptor of the rows 16s … 16s + 15 of a tile: the address of their first, the distance of patterns, and the
// swizzle's number, 1. The distance along rows is not used with a swizzle, and 1 by convention.
__device__ __forceinline__ unsigned long long operand_of(const unsigned char *tile, int s) {
    const unsigned long long at = (shared_address(tile) + s * 32) / 16;
    return at | 1ull << 16 | (unsigned long long)(PATTERN_BYTES / 16) << 32 | 1ull << 62;
}

// Functions for all kernels. NVRTC compiles them, which has no standard headers. The tests' CPU emulator has its own
// versions of everything between #ifndef POLAR_EMULATOR and #endif.
//
// A block is a whole number of warps. WEIGHT is a weight format (plain_weights.cuh). All sums are float. T: rows
// (tokens); engine/backends/ops.py explains the other letters.

#ifndef POLAR_EMULATOR
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// `name` points to the dynamic shared memory of the launch, aligned to 128 bytes.
#define DYNAMIC_SHARED(type, name)                                          \
    extern __shared__ __align__(128) unsigned char dynamic_shared_bytes[];  \
    type *name = reinterpret_cast<type *>(dynamic_shared_bytes)

__device__ __forceinline__ unsigned shared_address(const void *p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// d (16, 8) += a (16, 16) · b (16, 8) of one warp; fragments as the PTX ISA lays them out for mma.m16n8k16.
#define DEFINE_MMA(name, type)                                                                                  \
    __device__ __forceinline__ void name(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {       \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "        \
            "{%8,%9}, {%0,%1,%2,%3};"                                                                           \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                \
    }
DEFINE_MMA(mma_m16n8k16_f16, "f16")
DEFINE_MMA(mma_m16n8k16_bf16, "bf16")

// threadIdx.x, read anew: what is computed from it is not kept in registers over a loop around the call.
__device__ __forceinline__ int thread_read_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// start + number · SIZE. The compiler does not see this sum, so it does not take it apart, to compute an address of its
// own for each of several accesses at constant distances.
template <unsigned SIZE>
__device__ __forceinline__ const unsigned char *at_record(const unsigned char *start, unsigned number) {
    const unsigned char *record;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(record) : "r"(number), "n"(SIZE), "l"(start));
    return record;
}

// Transposes an 8 × 8 tile of 16-bit values over the warp; a lane has two neighbours of a row.
__device__ __forceinline__ unsigned movmatrix_transposed(unsigned v) {
    unsigned r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

// `value` of the lane whose number has the caller's bits in SAME and the bits of `from` elsewhere; called by all lanes.
template <int SAME>
__device__ __forceinline__ unsigned shuffle_among(unsigned value, int from) {
    unsigned r;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, %3, 0xffffffff;"
                 : "=r"(r)
                 : "r"(value), "r"(from), "n"(SAME << 8 | 31));
    return r;
}

// Loads 8 × 8 tiles of 16-bit values from shared memory; lane 8 · i + r has the address of row r of tile i.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&tiles)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Copies 4, 8 or 16 bytes from global to shared memory asynchronously. A wait covers the thread's own copies only.
template <int BYTES>
__device__ __forceinline__ void cp_async(void *shared, const void *global) {
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(shared)), "l"(global), "n"(BYTES)
                     : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int GROUPS_LEFT>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS_LEFT) : "memory");
}

// Brings the 128 bytes around an address of global memory into the L2 cache.
__device__ __forceinline__ void prefetch_line(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// With OVERLAPS, a kernel that waits for the one before it on the stream is launched before that has ended. Until a
// thread has waited it may only read what no kernel of a step writes, such as weights and tables, and must write to no
// global memory. After let_next_begin of all its blocks the next kernel may begin, if it waits as well.
// The rule of chains: every thread of such a kernel waits before it can return and outside of any condition. A kernel
// waits for the one before it alone; but where each ends after the one before it, all earlier ones have ended, too. One
// kernel that is launched so and ends without waiting would break this for all after it.
__device__ __forceinline__ void let_next_begin() {
#ifdef OVERLAPS
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#ifdef OVERLAPS
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether this is the last of `sharing` calls with a count in global memory, which is 0 before and after them. So the
// blocks of a launch leave a result that they share to the last one, and none waits. A thread's accesses before the
// call, and those it knows of, are ordered before what a thread of any block does after its own call with this count,
// if that comes later: the atomic releases and acquires. A fence on each side would wait twice.
__device__ __forceinline__ bool arrives_last(int *count, int sharing) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(__cvta_generic_to_global(count)), "r"(sharing - 1)
                 : "memory");
    return before + 1 == sharing;
}

// (low, high) as halves, rounded to nearest; numbers beyond ±65504 become these, NaN stays NaN.
__device__ __forceinline__ unsigned halves_within(float low, float high) {
    unsigned r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// 2^x in one instruction: relative error 2^-22; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#endif

__device__ __forceinline__ __half2 as_half2(unsigned bits) {
    __half2 pair;
    memcpy(&pair, &bits, 4);
    return pair;
}
__device__ __forceinline__ unsigned as_bits(__half2 pair) {
    unsigned bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

// x · scale and y · scale as pairs of halves, whose sum they are to 22 bits.
__device__ __forceinline__ void split_halves(unsigned &high, unsigned &low, float x, float y, float scale) {
    const __half2 rounded = __floats2half2_rn(x * scale, y * scale);
    high = as_bits(rounded);
    low = as_bits(__floats2half2_rn(x * scale - __low2float(rounded), y * scale - __high2float(rounded)));
}

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// x clipped to the largest finite numbers of the type; NaN stays.
template <class T>
__device__ __forceinline__ float within(float x) { return x; }
template <>
__device__ __forceinline__ float within<__half>(float x) {
    return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

// The new rows of one sequence and the blocks of its KV cache: a row of the int32 array `spans`. SpanHeader in
// engine/backends/cuda/kv/cache.py has the same members.
struct Span {
    int first_row, rows, position;   // rows of q, k and v; the position of the first of them
    int sink;                        // full-precision slot of the first block, or −1
    int first_quantized, quantized;  // number of the first quantized block, and how many there are
    int current, current_block;      // the first full-precision block behind these: its record in a prompt's buffer,
                                     // which those of later blocks follow, or −1 in a step; and its number
    int sees;                        // position up to which all rows see, if that is later than theirs

    // The ids of the quantized blocks, in order.
    __device__ __forceinline__ const int *ids() const { return &sees + 1; }

    // In a step: the records of the full-precision blocks from current_block on.
    __device__ __forceinline__ const int *records() const { return ids() + quantized; }

    // The record of block number `block`, which is current_block or a later one.
    __device__ __forceinline__ int record(int block) const {
        return current < 0 ? records()[block - current_block] : current + block - current_block;
    }
};

__device__ __forceinline__ const Span &span_at(const int *spans, int span_stride, int index) {
    return *reinterpret_cast<const Span *>(spans + static_cast<long long>(index) * span_stride);
}

// The values of one 16-byte access.
template <class T>
struct __align__(16) Chunk {
    T at[16 / sizeof(T)];
};

// Loads N neighbours as floats, 16 bytes at a time. PRECOND: p aligned to 16 bytes, N a multiple of 16 / sizeof(T).
template <int N, class T>
__device__ __forceinline__ void load_floats(float (&out)[N], const T *p) {
    constexpr int size = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < N; i += size) {
        const Chunk<T> chunk = *reinterpret_cast<const Chunk<T> *>(p + i);
#pragma unroll
        for (int j = 0; j < size; ++j) out[i + j] = to_float(chunk.at[j]);
    }
}

template <int N, class T>
__device__ __forceinline__ void store_floats(T *p, const float (&values)[N]) {
    constexpr int size = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < N; i += size) {
        Chunk<T> chunk;
#pragma unroll
        for (int j = 0; j < size; ++j) chunk.at[j] = from_float<T>(values[i + j]);
        *reinterpret_cast<Chunk<T> *>(p + i) = chunk;
    }
}

// store_floats with numbers beyond the type clipped to its largest finite ones; NaN stays.
template <int N, class T>
__device__ __forceinline__ void store_within(T *p, const float (&values)[N]) {
    store_floats(p, values);
}
template <int N>
__device__ __forceinline__ void store_within(__half *p, const float (&values)[N]) {
    unsigned words[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) words[i] = halves_within(values[2 * i], values[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < N / 2; i += 4)
        *reinterpret_cast<uint4 *>(p + 2 * i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
}

// The largest of the 32 lanes, in all lanes.
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// The sum over the 32 lanes, in all lanes.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// The sum over the block, in all threads. partial: 32 floats of shared memory, which may be reused after the next
// barrier.
__device__ __forceinline__ float block_sum(float x, float *partial) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    x = warp_sum(x);
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < blockDim.x / 32 ? partial[lane] : 0.0f);
}

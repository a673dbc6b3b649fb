// Bodies of the prelude's wrappers around inline PTX. Fragments are laid out as in the PTX ISA, chapters "Matrix
// multiply-accumulate" and "ldmatrix": lane l holds row l / 4 and columns 2 · (l % 4), + 1 of an 8 × 8 tile of 16-bit
// values.
#pragma once

namespace emulator {

template <class Small>
inline float element(unsigned pair, int high) {
    return value(Small{uint16_t(high ? pair >> 16 : pair)});
}

struct MmaOperands {
    unsigned a[4], b[2];
};
struct MmaResult {
    float d[4];
};

// A (16, 16) · B (16, 8) of one warp, computed by the last lane for all.
template <class Small>
EMULATOR_UNCHECKED void multiply_tiles(Slots slots) {
    float a[16][16], b[16][8];
    for (int l = 0; l < kLanes; ++l) {
        MmaOperands own;
        __builtin_memcpy(&own, slots[l], sizeof own);
        const int row = l / 4, column = l % 4 * 2;
        for (int high = 0; high < 2; ++high) {
            for (int i = 0; i < 4; ++i)  // registers: upper left, lower left, upper right, lower right 8 × 8 tile
                a[row + i % 2 * 8][column + i / 2 * 8 + high] = element<Small>(own.a[i], high);
            for (int i = 0; i < 2; ++i) b[column + i * 8 + high][row] = element<Small>(own.b[i], high);
        }
    }
    for (int l = 0; l < kLanes; ++l) {
        MmaResult own;
        for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            own.d[i] = 0;
            for (int k = 0; k < 16; ++k) own.d[i] += a[row][k] * b[k][column];
        }
        __builtin_memcpy(slots[l], &own, sizeof own);
    }
}

template <class Small>
EMULATOR_PRIMITIVE void mma(const char *name, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    const MmaOperands own = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    MmaResult result;
    __builtin_memcpy(&result, meet(~0u, name, 0, &own, sizeof own, multiply_tiles<Small>)[lane()], sizeof result);
    for (int i = 0; i < 4; ++i) d[i] += result.d[i];
}

EMULATOR_UNCHECKED inline unsigned pair_of(Slots slots, int row, int pair) {
    unsigned v;
    __builtin_memcpy(&v, slots[row * 4 + pair], sizeof v);
    return v;
}

// The slots have addresses of rows of 16 bytes: lane 8 · i + r has row r of tile i.
EMULATOR_UNCHECKED inline void read_tiles(Slots slots) {
    uint16_t tiles[4][8][8];
    for (int i = 0; i < kLanes; ++i) {
        const void *row;
        __builtin_memcpy(&row, slots[i], sizeof row);
        __builtin_memcpy(tiles[i / 8][i % 8], row, 16);
    }
    for (int l = 0; l < kLanes; ++l)
        for (int i = 0; i < 4; ++i) __builtin_memcpy(slots[l] + 4 * i, &tiles[i][l / 4][l % 4 * 2], 4);
}

}  // namespace emulator

EMULATOR_PRIMITIVE static void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    EMULATOR_AT_CALLER();
    emulator::mma<__half>("mma_m16n8k16_f16", d, a, b);
}
EMULATOR_PRIMITIVE static void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    EMULATOR_AT_CALLER();
    emulator::mma<__nv_bfloat16>("mma_m16n8k16_bf16", d, a, b);
}

static inline int thread_read_anew() { return int(threadIdx.x); }

template <unsigned SIZE>
static inline const unsigned char *at_record(const unsigned char *start, unsigned number) {
    return start + size_t(number) * SIZE;
}

EMULATOR_PRIMITIVE static unsigned movmatrix_transposed(unsigned v) {
    EMULATOR_AT_CALLER();
    emulator::Slots slots = emulator::meet(~0u, "movmatrix_transposed", 0, &v, sizeof v);
    const int row = emulator::lane() / 4, column = emulator::lane() % 4 * 2, shift = row % 2 * 16;
    const unsigned low = emulator::pair_of(slots, column, row / 2) >> shift & 0xffff;
    const unsigned high = emulator::pair_of(slots, column + 1, row / 2) >> shift & 0xffff;
    return low | high << 16;
}

template <int SAME>
EMULATOR_PRIMITIVE unsigned shuffle_among(unsigned value, int from) {
    EMULATOR_AT_CALLER();
    emulator::Slots slots = emulator::meet(~0u, "shuffle_among", 0, &value, sizeof value);
    unsigned other;
    __builtin_memcpy(&other, slots[(emulator::lane() & SAME) | (from & 31 & ~SAME)], sizeof other);
    return other;
}

EMULATOR_PRIMITIVE static void ldmatrix_x4(unsigned (&tiles)[4], const void *row) {
    EMULATOR_AT_CALLER();
    emulator::access(row, 16, emulator::Access::kLoad, 16);
    emulator::Slots slots = emulator::meet(~0u, "ldmatrix_x4", 0, &row, sizeof row, emulator::read_tiles);
    __builtin_memcpy(tiles, slots[emulator::lane()], sizeof tiles);
}

// Asynchronous copies of 4, 8 or 16 bytes from global to shared memory.
template <int BYTES>
EMULATOR_PRIMITIVE void cp_async(void *shared, const void *global) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
    EMULATOR_AT_CALLER();
    emulator::start_copy(shared, global, BYTES);
}
EMULATOR_PRIMITIVE static void cp_async_commit() { emulator::commit_copies(); }
template <int GROUPS_LEFT>
EMULATOR_PRIMITIVE void cp_async_wait() {
    EMULATOR_AT_CALLER();
    emulator::wait_for_copies(GROUPS_LEFT);
}

EMULATOR_INLINE void prefetch_line(const void *) {}
EMULATOR_PRIMITIVE static void let_next_begin() {}
EMULATOR_PRIMITIVE static void wait_for_previous() { emulator::wait_for_previous(); }

EMULATOR_INLINE unsigned halves_within(float low, float high) {
    const __half2 most = __float2half2_rn(65504.0f);
    const __half2 pair = __hmax2_nan(__hmin2_nan(__floats2half2_rn(low, high), most), __hneg2(most));
    unsigned r;
    __builtin_memcpy(&r, &pair, sizeof r);
    return r;
}

EMULATOR_INLINE float exp2_fast(float x) {
    const double exact = std::exp2(double(x)), unit = std::ldexp(1.0, std::ilogb(exact) - 23);
    return emulator::off_by(exact, exact * 0x1p-22 - unit / 2, x);
}

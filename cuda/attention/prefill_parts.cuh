// How a CTA of prefill_attention.cu fetches parts of blocks into shared memory: full-precision parts are copied,
// quantized parts decoded. Part of that file, which explains letters and DEFINES.

constexpr int MT = WARP_ROWS / 16;  // tiles of rows of a warp

constexpr int KEYS = Tables::BYTES;  // the tables begin at 0
constexpr int VALUES = KEYS + PART_BYTES;
constexpr int QUERIES = VALUES + PART_BYTES;
constexpr bool QUERIES_SHARED = MT > 1 && DP > 64;  // registers are needed for sums
#ifdef TWO_KINDS
constexpr bool HAS_SHARED = !IS_HIGH_PRECISION;  // high-precision blocks take the place of the others' tables
#else
constexpr bool HAS_SHARED = true;
#endif
static_assert(!HAS_SHARED || SHARED == QUERIES + (QUERIES_SHARED ? WARPS * WARP_ROWS * DP * 2 : 0),
              "tables, a part, and queries");

// Starts the asynchronous copy of a full-precision part.
__device__ __forceinline__ void copy_part(unsigned char *to, const unsigned char *from) {
    const int own = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < PART_BYTES; i += WARPS * 512)
        if (i + WARPS * 512 <= PART_BYTES || i + own < PART_BYTES) cp_async<16>(to + own + i, from + own + i);
    cp_async_commit();
}

// Clears the values of tokens after `newest`, which have weight 0 but may be NaN; each thread clears what it copied.
__device__ __forceinline__ void clear_values(unsigned char *values, int start, int newest) {
    for (int i = threadIdx.x; i < PART_BYTES / 16; i += WARPS * 32) {
        unsigned *const a = reinterpret_cast<unsigned *>(values) + i * 4;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int token = start + i / 32 / STEPS * 16 + f16_order(r) / 2 * 8 + i % 4 * 2;
            if (token > newest) a[r] = 0;
            else if (token == newest) a[r] &= 0xffffu;
        }
    }
}

// Fetches one side of a part into shared memory: copies it, or calls decode(record) if it is quantized.
// IS_FULL: all records of this side are full-precision ones.
template <bool IS_FULL, class Layout, class Decode>
__device__ __forceinline__ void fetch(unsigned char *to, const Part &part, const SidePools &pools,
                                      const Decode &decode) {
    if constexpr (!IS_FULL) {
        if (part.region == Region::QUANTIZED) return decode(pools.record<Layout::STRIDE>(pools.quantized, part.block));
    }
    copy_part(to, part.full(pools));
}

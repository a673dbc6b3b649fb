// What `Rounder` works with: what errors cost, and its arrays in shared memory. Part of encode_blocks.cu.

// What errors of one KV head cost; mean: that of the queries for which norms are tilted.
struct Cost {
    const float *feedback, *matrix, *mean, *tokens;
};

// Where things are in shared memory while codes are chosen.
template <class L, class Codec>
struct Room {
    static constexpr int PAIRS = L::D / Codec::WIDTH;
    // A row for each channel, or pair: its tokens are in different banks, and so are cells of a diagonal.
    static constexpr int STRIDE = TOKENS + 4, CODE_STRIDE = TOKENS + 2;
    // Warps that have a token in every lane; all warps, and those that only feed, in so many shares.
    static constexpr int GROUPS = (TOKENS + 31) / 32, SHARES = WARPS / GROUPS, FEEDERS = SHARES - 1, SUMS = 7;
    static_assert(WARPS % GROUPS == 0 && FEEDERS > 0 && L::N % TOKENS == 0, "");

    static constexpr int PARTIAL = L::D * STRIDE * 4, ERRORS = PARTIAL + SHARES * SUMS * TOKENS * 4;
    static constexpr int POINTS = ERRORS + 2 * Codec::WIDTH * TOKENS * 4;
    static constexpr int MEAN = POINTS + Codec::POINTS * Codec::WIDTH * 4;
    static constexpr int SIZES = MEAN + (L::MEAN_BITS ? L::D * 4 : 0), NORMS = SIZES + L::N * 4;
    static constexpr int CODES = NORMS + L::N * 4, TURNED = CODES + L::N * PAIRS * 2;
    static constexpr int BYTES = TURNED + PAIRS * CODE_STRIDE * 2;
};

template <class T>
__device__ __forceinline__ T *area(unsigned char *shared, int offset) {
    return reinterpret_cast<T *>(shared + offset);
}

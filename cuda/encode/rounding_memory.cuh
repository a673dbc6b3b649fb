// The inputs of `Rounder`, and its arrays in shared memory. Part of encode_blocks.cu.

// The metric of one KV head. mean: mean_query; null where norms are not tilted.
struct Cost {
    const float *feedback, *matrix, *mean, *token_feedback;
};

// Offsets of the arrays that `Rounder` lists, in bytes of shared memory.
template <class L, class Codec>
struct RounderMemory {
    static constexpr int PAIRS = L::D / Codec::WIDTH;
    // Strides of a row of tokens: neither tokens of a row nor cells of a diagonal share a bank.
    static constexpr int STRIDE = TOKENS + 4, CODE_STRIDE = TOKENS + 2;
    // GROUPS warps have one token per lane. SHARES warps share the sums of a token, FEEDERS of them its feedback.
    static constexpr int GROUPS = (TOKENS + 31) / 32, SHARES = WARPS / GROUPS, FEEDERS = SHARES - 1, SUMS = 7;
    static_assert(WARPS % GROUPS == 0 && FEEDERS > 0 && L::N % TOKENS == 0, "");

    static constexpr int PARTIAL = L::D * STRIDE * 4, ERRORS = PARTIAL + SHARES * SUMS * TOKENS * 4;
    static constexpr int POINTS = ERRORS + 2 * Codec::WIDTH * TOKENS * 4;
    static constexpr int MEAN = POINTS + Codec::POINTS * Codec::WIDTH * 4;
    static constexpr int SIZES = MEAN + (L::MEAN_BITS ? L::D * 4 : 0), NORMS = SIZES + L::N * 4;
    static constexpr int LEAST = NORMS + L::N * 4, CODES = LEAST + TOKENS * 4, NEW_CODES = CODES + L::N * PAIRS * 2;
    static constexpr int BYTES = NEW_CODES + PAIRS * CODE_STRIDE * 2;
};

template <class T>
__device__ __forceinline__ T *area(unsigned char *shared, int offset) {
    return reinterpret_cast<T *>(shared + offset);
}

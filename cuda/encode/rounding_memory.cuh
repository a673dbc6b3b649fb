// The metric of `PathRounder`, and its arrays and the arrays of `Rounder`, in shared memory. Part of encode_blocks.cu.

// The metric of one KV head. mean: mean_query; null where norms are not tilted.
struct Cost {
    const float *matrix, *mean;
};

template <class L>
__device__ __forceinline__ Cost cost_of(const SideArrays &side) {
    return {at_head(side.matrix, L::D * L::D), at_head(side.mean_query, L::D)};
}

template <bool IS_BYTE>
struct CodeOf { using Type = unsigned short; };
template <>
struct CodeOf<true> { using Type = unsigned char; };

// Offsets of the arrays that both list, in bytes of shared memory.
template <class L, class Codec>
struct RounderMemory {
    static constexpr int PAIRS = L::D / Codec::WIDTH;
    using Code = typename CodeOf<Codec::WIDTH == 1 && Codec::POINTS <= 256>::Type;  // twice as many as of pairs
    // Strides of a row of tokens: neither tokens of a row nor pairs of a token share a bank.
    static constexpr int STRIDE = TOKENS + 4, CODE_STRIDE = TOKENS + 2;
    // For PATHS: GROUPS warps have one token per lane, SHARES warps share the SUMS of a token.
    static constexpr int GROUPS = (TOKENS + 31) / 32, SHARES = WARPS / GROUPS, SUMS = Codec::PATHS ? 7 : 0;
    static_assert(WARPS % GROUPS == 0 && L::N % TOKENS == 0, "");

    static constexpr int PARTIAL = L::D * STRIDE * 4, POINTS = PARTIAL + SHARES * SUMS * TOKENS * 4;
    static constexpr int MEAN = POINTS + Codec::POINTS * Codec::WIDTH * 4;
    static constexpr int SIZES = MEAN + (L::MEAN_BITS ? L::D * 4 : 0), NORMS = SIZES + L::N * 4;
    static constexpr int LEAST = NORMS + L::N * 4, CODES = LEAST + TOKENS * 4;
    static constexpr int NEW_CODES = CODES + L::N * PAIRS * int(sizeof(Code));
    static constexpr int LINKS = NEW_CODES + PAIRS * CODE_STRIDE * int(sizeof(Code));
    static constexpr int BYTES = LINKS + (Codec::PATHS ? PAIRS * TOKENS * 4 * 2 : 0);
};

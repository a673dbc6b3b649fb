// The arrays of `Rounder` in shared memory. Part of encode_blocks.cu.

template <bool IS_BYTE>
struct CodeOf { using Type = unsigned short; };
template <>
struct CodeOf<true> { using Type = unsigned char; };

// Offsets in bytes of shared memory.
template <class L, class Codec>
struct RounderMemory {
    static constexpr int PAIRS = L::D / Codec::WIDTH;
    using Code = typename CodeOf<Codec::WIDTH == 1 && Codec::POINTS <= 256>::Type;  // twice as many as of pairs
    // Strides of a row of tokens: neither tokens of a row nor pairs of a token share a bank.
    static constexpr int STRIDE = TOKENS + 4, CODE_STRIDE = TOKENS + 2;
    static_assert(L::N % TOKENS == 0, "");

    static constexpr int POINTS = L::D * STRIDE * 4, MEAN = POINTS + Codec::POINTS * Codec::WIDTH * 4;
    static constexpr int SIZES = MEAN + (L::MEAN_BITS ? L::D * 4 : 0), CODES = SIZES + L::N * 4;
    static constexpr int NEW_CODES = CODES + L::N * PAIRS * int(sizeof(Code));
    static constexpr int BYTES = NEW_CODES + PAIRS * CODE_STRIDE * int(sizeof(Code));
};

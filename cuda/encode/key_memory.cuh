// The arrays of `KeyRounder` in shared memory. Part of encode_keys.cu.

constexpr float ALL_FACTORS[] = {NORM_FACTORS};
constexpr int FACTORS = sizeof ALL_FACTORS / sizeof *ALL_FACTORS;

// The code of one row, in as few bytes as all codes fit.
template <bool SMALL>
struct RowCode {
    using Type = unsigned char;
};
template <>
struct RowCode<false> {
    using Type = unsigned short;
};

// Offsets of the arrays that `KeyRounder` lists, in bytes of shared memory.
template <class L, class Codec>
struct KeyMemory {
    static constexpr int GROUPS = L::D / 8, PAIRS = L::D / 2, ROWS = WARPS * 32;
    using Code = typename RowCode<Codec::POINTS <= 256>::Type;

    static constexpr int FEEDBACK = TOKENS * L::D * 4, POINTS = FEEDBACK + GROUPS * (GROUPS + 1) / 2 * 256;
    static constexpr int ROW_CODES = POINTS + Codec::POINTS * 8;
    static constexpr int MEAN = ROW_CODES + ROWS * PAIRS * int(sizeof(Code)), SIZES = MEAN + L::D * 4;
    static constexpr int FITTED = SIZES + (5 * L::N + (FACTORS + 1) / 2 * 2) * 4, CODES = TOKENS < L::N ? FITTED + ROWS * 8 : 0;
    static constexpr int BYTES = TOKENS < L::N ? CODES + L::N * PAIRS * 2 : FITTED + ROWS * 8;
};

// Blocks of 256 in groups of 32: w = d * (scale - 32) * TABLE[q], with the table of iq4_nl.
struct iq4_xs_blocks : BlocksOf32 {
    static constexpr int VALUES = 256, NBYTES = 136, BITS = 4, ZERO = 128;
    static constexpr bool SUBS = true, TABLED = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 8, i);
    }
    static __device__ __forceinline__ int sub_scale(const unsigned char *block, int group) {
        return (packed_code<1, 4>(block + 4, group) | packed_code<1, 2>(block + 2, group) << 4) - 32;
    }
    static __device__ __forceinline__ unsigned table(int i) {
        return i == 0 ? 0x3f2d1801u : i == 1 ? 0x766a5d4fu : i == 2 ? 0xa6998d81u : 0xf1d9c5b5u;
    }
};
struct iq4_xs : PackedWeights<iq4_xs_blocks> {};

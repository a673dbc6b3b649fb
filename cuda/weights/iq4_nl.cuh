// Blocks of 32: w = d * TABLE[q].
struct iq4_nl_blocks : BlocksOf32 {
    static constexpr int NBYTES = 18, BITS = 4, ZERO = 128;
    static constexpr bool TABLED = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 2, i);
    }
    static __device__ __forceinline__ unsigned table(int i) {
        return i == 0 ? 0x3f2d1801u : i == 1 ? 0x766a5d4fu : i == 2 ? 0xa6998d81u : 0xf1d9c5b5u;
    }
};
struct iq4_nl : PackedWeights<iq4_nl_blocks> {};

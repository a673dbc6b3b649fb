// Blocks of 32: w = d * (q - 16). The fifth bits are a word of their own.
struct q5_0_blocks : BlocksOf32 {
    static constexpr int NBYTES = 22, BITS = 5, ZERO = 16;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 6, i) | packed_code<1, 1>(block + 2, i) << 4;
    }
};
struct q5_0 : PackedWeights<q5_0_blocks> {};

// Blocks of 32: w = d * q + m. The fifth bits are a word of their own.
struct q5_1_blocks : BlocksOf32 {
    static constexpr int NBYTES = 24, BITS = 5;
    static constexpr bool OFFSETS = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 8, i) | packed_code<1, 1>(block + 4, i) << 4;
    }
};
struct q5_1 : PackedWeights<q5_1_blocks> {};

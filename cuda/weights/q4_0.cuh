// Blocks of 32: w = d * (q - 8).
struct q4_0_blocks : BlocksOf32 {
    static constexpr int NBYTES = 18, BITS = 4, ZERO = 8;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 2, i);
    }
};
struct q4_0 : PackedWeights<q4_0_blocks> {};

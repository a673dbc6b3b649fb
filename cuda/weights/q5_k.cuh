// Blocks of 256 in groups of 32: w = d * scale * q - dmin * min. The fifth bits are bytes of their own.
struct q5_k_blocks : BlocksOf256 {
    static constexpr int NBYTES = 176, BITS = 5;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<32, 4>(block + 48, i) | packed_code<32, 1>(block + 16, i) << 4;
    }
};
struct q5_k : PackedWeights<q5_k_blocks> {};

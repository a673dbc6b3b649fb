// Blocks of 256 in groups of 32: w = d * scale * q - dmin * min.
struct q4_k_blocks : BlocksOf256 {
    static constexpr int NBYTES = 144, BITS = 4;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<32, 4>(block + 16, i);
    }
};
struct q4_k : PackedWeights<q4_k_blocks> {};

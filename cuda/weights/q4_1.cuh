// Blocks of 32: w = d * q + m.
struct q4_1_blocks : BlocksOf32 {
    static constexpr int NBYTES = 20, BITS = 4;
    static constexpr bool OFFSETS = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 4, i);
    }
};
struct q4_1 : PackedWeights<q4_1_blocks> {};

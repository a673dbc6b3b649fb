// Blocks of 32: w = d * q. q are bytes with a sign, which are codes after adding 128.
struct q8_0_blocks : BlocksOf32 {
    static constexpr int NBYTES = 34, BITS = 8, ZERO = 128;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) { return block[2 + i] ^ 128; }
};
struct q8_0 : PackedWeights<q8_0_blocks> {};

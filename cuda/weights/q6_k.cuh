// Blocks of 256 in groups of 16: w = d * scale * (q - 32). The upper two bits are bytes of their own.
struct q6_k_blocks : BlocksOf32 {
    static constexpr int VALUES = 256, NBYTES = 210, BITS = 6, GROUP = 16, ZERO = 32;
    static constexpr bool SUBS = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<64, 4>(block, i) | packed_code<32, 2>(block + 128, i) << 4;
    }
    static __device__ __forceinline__ unsigned short scale(const unsigned char *block) {
        return two_bytes(block + 208);
    }
    static __device__ __forceinline__ int sub_scale(const unsigned char *block, int group) {
        return block[192 + group];
    }
};
struct q6_k : PackedWeights<q6_k_blocks> {};

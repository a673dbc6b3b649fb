// Blocks of 256 in groups of 16: w = d * (scale - 32) * (q - 4). The third bits are bytes of their own.
struct q3_k_blocks : BlocksOf32 {
    static constexpr int VALUES = 256, NBYTES = 110, BITS = 3, GROUP = 16, ZERO = 4;
    static constexpr bool SUBS = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<32, 2>(block + 32, i) | packed_code<32, 1>(block, i) << 2;
    }
    static __device__ __forceinline__ unsigned short scale(const unsigned char *block) {
        return two_bytes(block + 108);
    }
    static __device__ __forceinline__ int sub_scale(const unsigned char *block, int group) {
        return (packed_code<8, 4>(block + 96, group) | packed_code<4, 2>(block + 104, group) << 4) - 32;
    }
};
struct q3_k : PackedWeights<q3_k_blocks> {};

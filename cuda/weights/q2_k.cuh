// Blocks of 256 in groups of 16: w = d * scale * q - dmin * min; a byte holds scale and min of a group.
struct q2_k_blocks : BlocksOf32 {
    static constexpr int VALUES = 256, NBYTES = 84, BITS = 2, GROUP = 16;
    static constexpr bool SUBS = true, OFFSETS = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<32, 2>(block + 16, i);
    }
    static __device__ __forceinline__ unsigned short scale(const unsigned char *block) {
        return two_bytes(block + 80);
    }
    static __device__ __forceinline__ unsigned short offset(const unsigned char *block) {
        return two_bytes(block + 82) ^ 0x8000;
    }
    static __device__ __forceinline__ int sub_scale(const unsigned char *block, int group) {
        return block[group] & 15;
    }
    static __device__ __forceinline__ int sub_offset(const unsigned char *block, int group) {
        return block[group] >> 4;
    }
};
struct q2_k : PackedWeights<q2_k_blocks> {};

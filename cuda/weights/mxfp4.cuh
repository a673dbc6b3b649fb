// Blocks of 32: w = scale * TABLE[q]. The scale is a power of two, stored as its exponent; the table is doubled, so
// that its numbers are integers, and the scale is halved.
struct mxfp4_blocks : BlocksOf32 {
    static constexpr int NBYTES = 17, BITS = 4, ZERO = 128;
    static constexpr bool POWERS = true, TABLED = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 1, i);
    }
    // 2^(exponent - 128). Powers below 2^-126 are stored without an exponent.
    static __device__ __forceinline__ unsigned short scale(const unsigned char *block) {
        return *block < 2 ? 32 << *block : (*block - 1) << 7;
    }
    static __device__ __forceinline__ unsigned table(int i) {
        return i == 0 ? 0x83828180u : i == 1 ? 0x8c888684u : i == 2 ? 0x7d7e7f80u : 0x74787a7cu;
    }
};
struct mxfp4 : PackedWeights<mxfp4_blocks> {};

// Blocks of 32: w = d * TABLE[q].
struct nf4_blocks : BlocksOf32 {
    static constexpr int NBYTES = 18, BITS = 4, ZERO = 128;
    static constexpr bool TABLED = true;
    static __device__ __forceinline__ int code(const unsigned char *block, int i) {
        return packed_code<16, 4>(block + 2, i);
    }
    static __device__ __forceinline__ unsigned table(int i) {
        return i == 0 ? 0x4f3f2a05u : i == 1 ? 0x8075695du : i == 2 ? 0xaa9e948au : 0xfbd9c5b6u;
    }
};
struct nf4 : PackedWeights<nf4_blocks> {};

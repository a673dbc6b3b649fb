// Half precision: a tile is stored as the registers of an A operand, in another order. Twin of engine/codecs/f16.py.

template <class L>
struct f16 : NormsInCodes<L> {
    static constexpr int ROWS = 0;
    static constexpr bool QUANTIZED = false, RANDOM_ACCESS = true, BY_GROUPS = false;

    static __device__ __forceinline__ uint4 piece(const unsigned char *, int, int, int) { return uint4(); }

    // A part would take up to 128 registers, so `load` loads nothing: next(t) loads tile t.
    struct Codes {
        const unsigned char *first;

        __device__ __forceinline__ void load(const unsigned char *record, int part, int lane) {
            first = record + (part * L::TILES * 32 + lane) * 16;
        }
    };

    struct Decoder {
        const unsigned char *first;

        __device__ __forceinline__ Decoder(const Codes &codes, const unsigned char *, int) : first(codes.first) {}
        __device__ __forceinline__ void next(int t, unsigned (&a)[4]) { load_f16_tile(a, first + t * 512); }
        __device__ __forceinline__ void pass(int) {}
    };
};

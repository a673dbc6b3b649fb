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

    // x [N][D] in shared memory; values are clipped to ±65504.
    static __device__ void encode(unsigned char *record, const float *x, const unsigned char *, int thread,
                                  int threads) {
        for (int at = thread; at < L::PARTS * L::TILES * 128; at += threads) {
            const int r = f16_order(at % 4), lane = at / 4 % 32, tile = at / 128 % L::TILES, part = at / 128 / L::TILES;
            const int g = lane / 4, tg = lane % 4;
            float pair[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                int token, channel;
                if (L::VALUES) {
                    token = 16 * (tile / L::STEPS) + 8 * (r / 2) + 2 * tg + h;
                    channel = 16 * (tile % L::STEPS) + 2 * g + r % 2;
                } else {
                    token = 16 * (tile % L::PT) + g + 8 * (r % 2);
                    channel = 16 * (tile / L::PT) + 8 * (r / 2) + 2 * tg + h;
                }
                const float value = channel < L::D ? x[(part * L::PART + token) * L::D + channel] : 0.0f;
                pair[h] = fminf(fmaxf(value, -65504.0f), 65504.0f);
            }
            reinterpret_cast<unsigned *>(record)[at] = as_bits(__floats2half2_rn(pair[0], pair[1]));
        }
    }
};

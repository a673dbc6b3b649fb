// A byte for each value, in evenly spaced levels; decoding looks nothing up. Twin of engine/codecs/linear.py.
//
// Word t of a record has the first values of tile t's pairs, word TILES + t the second ones.

template <class L>
struct linear : PairTable<L> {
    static constexpr bool BY_GROUPS = L::TILES % 4 == 0, COVERED = true;

    // The least norm that can be stored and leaves no value beyond the levels. largest: of a vector's values.
    static __device__ __forceinline__ float cover(float largest, const unsigned char *tables) {
        const float *norms = reinterpret_cast<const float *>(tables + L::NORM_TABLE);
        const float least = __fmul_rn(largest, 32.0f / 127.0f);
        unsigned code = 0;
        for (unsigned step = 128; step; step /= 2)
            if (norms[code + step - 1] < least) code += step;
        return norms[code];
    }

    struct Codes : PairTable<L>::Codes {
        // Two chunks have the words of four tiles.
        __device__ __forceinline__ void load_group(const unsigned char *record, int part, int lane, int group) {
            const unsigned char *const own = record + part * L::WORDS * 128 + lane * 16;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = half * L::TILES + 4 * group;
                unsigned chunk[4];
                load_words<16, 4, true>(chunk, own + first * 128);
#pragma unroll
                for (int i = 0; i < 4; ++i) this->words[first + i] = chunk[i];
            }
        }
    };

    struct Decoder {
        static constexpr float STEPS = 32.0f, MIDDLE = 128.0f;

        const Codes &codes;

        __device__ __forceinline__ Decoder(const Codes &codes, const unsigned char *, int)
            : codes(codes) {}

        // The bytes of a half are 0x64 and a code: 1024 + code.
        __device__ __forceinline__ void next(int t, unsigned (&a)[4]) const {
            const unsigned first = codes.words[t], second = codes.words[L::TILES + t];
            unsigned c[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const unsigned pair = __byte_perm(first, second, 0x4400 | r * 0x1111) & 0x00ff00ffu | 0x64006400u;
                c[r] = as_bits(__hfma2(as_half2(pair), __float2half2_rn(1 / STEPS),
                                       __float2half2_rn(-(1024 + MIDDLE) / STEPS)));
            }
            PairTable<L>::Decoder::arrange(c, a);
        }

        __device__ __forceinline__ void pass(int) const {}
    };
};

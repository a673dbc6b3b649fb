// Each RoPE pair as a radius and one of sixteen angles; for keys only. Twin of engine/codecs/polarpair.py.
//
// The code of a pair is radius << 4 | angle, with BITS 8, or 6 where the radius has two bits. With RANGED 0, radius =
// code · step; with 1, radius = (code + ½) · step + low; with 2, the angle is (code + ½) · step + low, too.
// Behind the codes are SCALES sections of halves: step and low of radii, step and low of angles, as RANGED needs them.
// Each is [group][tg][s][h]: pair 8s + 4h + tg of a group of SCALED tokens, with s < STEPS rounded up to 4.
// tables: half2 [2^BITS], the point of a code at step 1, or with RANGED 1 its direction; two floats at TANGENTS.
template <class L>
struct polarpair : NormsInCodes<L> {
    static constexpr int ROWS = L::ROWS;
    static constexpr bool QUANTIZED = true, RANDOM_ACCESS = false, BY_GROUPS = false;

    static constexpr int SCALES = L::RANGED == 2 ? 4 : L::RANGED + 1;
    static constexpr int WIDTH = (L::STEPS + 3) / 4 * 4;                         // scale words of a lane and group
    static constexpr int GROUPS = L::SCALED < L::PART ? L::PART / L::SCALED : 1;  // groups of a part
    static constexpr int SECTION = L::N / L::SCALED * 4 * WIDTH * 4;             // bytes of a section of scales
    static_assert(!L::VALUES, "values have no RoPE pairs");

    // Codes are read as a pair table's; no points are chosen from it.
    struct PairLayout : L {
        static constexpr int WORDS = L::PAIR_WORDS, WIDTH = 2, POINTS = 0, POINTS_F32 = 0;
    };
    using Pairs = PairTable<PairLayout>;

    static __device__ __forceinline__ uint4 piece(const unsigned char *tables, int row, int, int) {
        const unsigned point = reinterpret_cast<const unsigned *>(tables)[row >> (8 - L::BITS)];
        return make_uint4(point, point, point, point);
    }

    // Scales of one kind and group are loaded with the codes. More would take too many registers: each is loaded when
    // it is used, and `volatile` keeps the compiler from loading them all at once.
    static constexpr bool PRELOADED = SCALES * GROUPS == 1;
    struct Codes {
        typename Pairs::Codes pairs;
        unsigned preloaded[PRELOADED ? WIDTH : 1];
        const unsigned char *scales;  // the lane's first one

        __device__ __forceinline__ void load(const unsigned char *record, int part, int lane) {
            pairs.load(record, part, lane);
            scales = record + L::SCALES_AT + (part * L::PART / L::SCALED * 4 + lane % 4) * WIDTH * 4;
            if constexpr (PRELOADED) load_words<16>(preloaded, scales);
        }

        // The scales of kind k for tile t: two halves, for its pairs tg and tg + 4.
        __device__ __forceinline__ unsigned scale(int k, int t) const {
            const int s = t / L::PT, group = t % L::PT * 16 / L::SCALED;
            if constexpr (PRELOADED) return preloaded[s];
            return *reinterpret_cast<const volatile unsigned *>(scales + k * SECTION + (group * 4 * WIDTH + s) * 4);
        }
    };

    struct Decoder {
        typename Pairs::Decoder pairs;
        const Codes &codes;

        __device__ __forceinline__ Decoder(const Codes &codes, const unsigned char *shared, int lane)
            : pairs(codes.pairs, shared, lane), codes(codes) {}

        __device__ __forceinline__ void next(int t, unsigned (&a)[4]) {
            unsigned scales[SCALES];
#pragma unroll
            for (int k = 0; k < SCALES; ++k) scales[k] = codes.scale(k, t);
            if constexpr (L::RANGED == 0) {
                pairs.next(t, a);
#pragma unroll
                for (int r = 0; r < 4; ++r) a[r] = as_bits(__hmul2(as_half2(a[r]), both(scales[0], r)));
            } else if constexpr (L::RANGED == 1) {
                const unsigned word = pairs.word(t), radii = word >> RADIUS_SHIFT & RADIUS_MASK * 0x01010101u;
                pairs.bytes(word, a);
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    // 0x6400 | code is the half 1024 + code, 0x63ff is 1023.5.
                    const __half2 code = as_half2(__byte_perm(radii, 0x64646464u, 0x4040 | r | r << 8));
                    const __half2 cells = __hsub2(code, as_half2(0x63ff63ffu));
                    const __half2 radius = __hfma2(cells, both(scales[0], r), both(scales[1], r));
                    a[r] = as_bits(__hmul2(as_half2(a[r]), radius));
                }
            } else {
                const unsigned word = pairs.word(t);
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const unsigned code = word >> 8 * r + 8 - L::BITS;
                    const float radius = ranged(code >> 4 & RADIUS_MASK, both(scales[0], r), both(scales[1], r));
                    const float angle = ranged(code & 15, both(scales[2], r), both(scales[3], r));
                    a[r] = as_bits(__floats2half2_rn(radius * __cosf(angle), radius * __sinf(angle)));
                }
            }
        }

        __device__ __forceinline__ void pass(int t) {
            unsigned a[4];
            next(t, a);
        }

        // The scale for register r, in both halves.
        __device__ __forceinline__ __half2 both(unsigned scale, int r) const {
            return r < 2 ? __low2half2(as_half2(scale)) : __high2half2(as_half2(scale));
        }
        __device__ __forceinline__ float ranged(unsigned code, __half2 step, __half2 low) const {
            return fmaf(float(code) + 0.5f, __low2float(step), __low2float(low));
        }
    };

    // x [N][D] in shared memory. Called by all threads of the block: it has a barrier.
    static __device__ void encode(unsigned char *record, const float *x, const unsigned char *tables, int thread,
                                  int threads) {
        __half *scales = reinterpret_cast<__half *>(record + L::SCALES_AT);
        for (int at = thread; at < SECTION / 2; at += threads) {
            const int pair = at / 2 % WIDTH * 8 + at % 2 * 4 + at / 2 / WIDTH % 4, group = at / 2 / WIDTH / 4;
            Bounds radii = {}, angles = {};
            for (int i = 0; i < L::SCALED && 2 * pair < L::D; ++i) {
                const float *own = x + (group * L::SCALED + i) * L::D + 2 * pair;
                radii.include(radius_of(own), i == 0);
                if (L::RANGED == 2) angles.include(angle_of(own), i == 0);
            }
            if constexpr (L::RANGED == 0) {
                scales[at] = __float2half_rn(radii.largest / RADIUS_MASK);
            } else {
                radii.store(scales + at, RADIUS_MASK + 1);
                if (L::RANGED == 2) angles.store(scales + SECTION + at, 16);
            }
        }
        __syncthreads();
        for (int at = thread; at < L::PARTS * L::PAIR_WORDS * 32; at += threads) {
            const int part = at / (L::PAIR_WORDS * 32), in_part = at % (L::PAIR_WORDS * 32), first = in_part / 128 * 4;
            const int size = L::PAIR_WORDS - first < 4 ? L::PAIR_WORDS - first : 4;
            const int word = first + in_part % 128 % size;
            const int lane = in_part % 128 / size;
            unsigned packed = 0;
            for (int r = 0; r < 4; ++r) packed |= byte_of(x, scales, tables, part, word, lane, r) << 8 * r;
            reinterpret_cast<unsigned *>(record)[at] = packed;
        }
    }

private:
    static constexpr unsigned RADIUS_MASK = (1u << (L::BITS - 4)) - 1;  // the largest code of a radius
    static constexpr int RADIUS_SHIFT = 12 - L::BITS;                   // its lowest bit in a byte

    struct Bounds {
        float smallest, largest;

        __device__ __forceinline__ void include(float value, bool first) {
            smallest = first ? value : fminf(smallest, value), largest = first ? value : fmaxf(largest, value);
        }
        // Stores the step of `count` equal cells and, one section further, the smallest value.
        __device__ __forceinline__ void store(__half *step, int count) const {
            step[0] = __float2half_rn((largest - smallest) / count);
            step[SECTION / 2] = __float2half_rn(smallest);
        }
    };

    // Squares are exact in double: the radius is rounded twice, as in C libraries.
    static __device__ __forceinline__ float radius_of(const float *pair) {
        const double a = pair[0], b = pair[1];
        return fminf(static_cast<float>(sqrt(a * a + b * b)), L::SATURATION);
    }
    static __device__ __forceinline__ float angle_of(const float *pair) {
        const float angle = atan2f(pair[1], pair[0]);
        return angle < 0 ? __fadd_rn(angle, 6.2831855f) : angle;
    }

    // The nearest of the sixteen directions, which begin at −π.
    static __device__ __forceinline__ unsigned direction_of(const float *pair, const float *tangents) {
        const float x = fabsf(pair[0]), y = fabsf(pair[1]), first = tangents[0], second = tangents[1];
        unsigned code = (y > __fmul_rn(first, x)) + (y > __fmul_rn(second, x)) + (__fmul_rn(second, y) > x) +
                        (__fmul_rn(first, y) > x);
        if (pair[0] < 0) code = 8 - code;
        if (pair[1] < 0) code = 16 - code;
        return (code + 8) & 15;
    }

    // The cell of `count` that a value lies in.
    static __device__ __forceinline__ unsigned cell_of(float value, const __half *step, int count) {
        const float divisor = __half2float(*step), low = __half2float(step[SECTION / 2]);
        const float cell = floorf((value - low) / (divisor == 0 ? 1.0f : divisor));
        return static_cast<unsigned>(fminf(fmaxf(cell, 0.0f), count - 1.0f));
    }

    // The code of c[r] of a lane and tile.
    static __device__ __forceinline__ unsigned code_of(const float *x, const __half *scales,
                                                       const unsigned char *tables, int part, int t, int lane, int r) {
        const int s = t / L::PT, tg = lane % 4, token = part * L::PART + t % L::PT * 16 + lane / 4 + r % 2 * 8;
        const int channel = 16 * s + r / 2 * 8 + 2 * tg;
        if (channel >= L::D) return 0;
        const float *pair = x + token * L::D + channel;
        const __half *step = scales + ((token / L::SCALED * 4 + tg) * WIDTH + s) * 2 + r / 2;
        unsigned radius, angle;
        if constexpr (L::RANGED == 0) {
            const float divisor = __half2float(*step);
            const float steps = rintf(radius_of(pair) / (divisor == 0 ? 1.0f : divisor));
            radius = static_cast<unsigned>(fminf(steps, RADIUS_MASK));
        } else {
            radius = cell_of(radius_of(pair), step, RADIUS_MASK + 1);
        }
        if constexpr (L::RANGED == 2)
            angle = cell_of(angle_of(pair), step + SECTION, 16);
        else
            angle = direction_of(pair, reinterpret_cast<const float *>(tables + L::TANGENTS));
        return radius << 4 | angle;
    }

    // Byte r of a word: a code in the upper bits, below it a digit of a code that has no word of its own.
    static __device__ __forceinline__ unsigned byte_of(const float *x, const __half *scales,
                                                       const unsigned char *tables, int part, int word, int lane,
                                                       int r) {
        constexpr int spare = 8 - L::BITS, span = spare ? L::BITS / spare : 1;
        unsigned byte = code_of(x, scales, tables, part, word, lane, r) << spare;
        const int tile = L::PAIR_WORDS + word / span;
        if (spare && tile < L::TILES)
            byte |= code_of(x, scales, tables, part, tile, lane, r) >> word % span * spare & ((1 << spare) - 1);
        return byte;
    }
};

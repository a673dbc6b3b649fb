// 16 values as a radius and angles of four levels; 8 values and three levels if the head dim is no multiple of 16.
// Twin of engine/codecs/polarquant.py; engine/records/polarquant.py makes its words.
//
//     value = unit(code of level 1) · factor(row of 8 values, pair) · radius
//
// The angles above level 1 are one byte for every 8 values, the *row*: level 2 of pairs 0, 1 << 6 | level 4 << 4 |
// level 3 << 2 | level 2 of pairs 2, 3. For the second half of 16 values level 4 is complemented. So the upper or the
// lower six bits of a row, and the number of a pair, select its factor. Bits per value: 2 of level 1, 1 of the row, and
// 1 of the radius.
//
// A part of a record is WORDS words for every lane, in chunks of four:
//   ANGLES  byte r of word w: level 1 codes of c[r] in tile 2w (low four bits) and in tile 2w + 1.
//   UPPERS  byte r of word t is the row that c[r] of tile t belongs to. Lanes with equal g (keys), or with equal tg and
//           g >> 2 (values), need the same words and store a quarter each: word t is word t / 4 of the (t % 4)th lane.
//   RADII   halves, RADIUS_WORDS words per tile. Keys: tokens g and g + 8; with three levels, one word for each half.
//           Values: word h has tokens 8h + 2tg + {0, 1}. Lanes share them likewise; with four levels, the eight lanes
//           of equal tg share those of values: word n is word n / 8 of the (n % 8)th lane.
// tables: half [64][4] factors by six bits and pair; half2 [16] units; float [4] tan² of each level's first threshold.
// Rows in shared memory: 64 of factors, twice in a word, in each lane's column that of its own pair; 16 of units.
template <class L>
struct polarquant {
    static constexpr int ROWS = 80;
    static constexpr bool NORMED = false;
    static constexpr int ROUNDED = 0;
    static constexpr bool QUANTIZED = true, RANDOM_ACCESS = true;

    static constexpr int SHARERS = L::VALUES && L::LEVELS == 4 ? 8 : 4;  // lanes that share radii
    static constexpr int RADIUS_WORDS = L::VALUES || L::LEVELS == 3 ? 2 : 1;
    static constexpr int ANGLES = (L::TILES + 1) / 2;
    static constexpr int UPPERS = (L::TILES + 3) / 4;
    static constexpr int RADII = (RADIUS_WORDS * L::TILES + SHARERS - 1) / SHARERS;
    static constexpr int WORDS = ANGLES + UPPERS + RADII;
    static_assert(WORDS == L::WORDS && ROWS == L::ROWS, "the record is laid out in another way");

    static __device__ void fill(unsigned char *shared, const unsigned char *tables) {
        for (int at = threadIdx.x; at < ROWS * 8; at += blockDim.x) {
            const int row = at / 8, piece = at % 8;
            uint4 four;
            if (row < 64) {
                const uint2 factors = __ldg(reinterpret_cast<const uint2 *>(tables) + row);
                const unsigned twice[4] = {__byte_perm(factors.x, 0, 0x1010), __byte_perm(factors.x, 0, 0x3232),
                                           __byte_perm(factors.y, 0, 0x1010), __byte_perm(factors.y, 0, 0x3232)};
                // Four lanes have tg = 0 … 3, the pairs of keys, and one g, which says the pair of values.
                const unsigned own = piece % 2 ? piece % 4 == 3 ? twice[3] : twice[1] : piece % 4 ? twice[2] : twice[0];
                four = L::VALUES ? make_uint4(own, own, own, own) : make_uint4(twice[0], twice[1], twice[2], twice[3]);
            } else {
                const unsigned unit = __ldg(reinterpret_cast<const unsigned *>(tables + L::UNITS) + row - 64);
                four = make_uint4(unit, unit, unit, unit);
            }
            *reinterpret_cast<uint4 *>(shared + row * ROW_BYTES + piece * 16) = four;
        }
    }

    struct Codes {
        unsigned words[WORDS];

        __device__ __forceinline__ void load(const unsigned char *record, int part, int lane) {
            load_chunks(words, record + part * WORDS * 128, lane);
        }
    };

    // The whole warp decodes a tile together: lanes exchange the words that they share by shuffles.
    struct Decoder {
        const Codes &codes;
        const unsigned char *table;
        int lane;
        unsigned column, shift;  // address within a row; the lowest of the six bits of the lane's pair

        __device__ __forceinline__ Decoder(const Codes &codes, const unsigned char *shared, int lane)
            : codes(codes), table(shared), lane(lane), column(lane * 4u), shift(lane & (L::VALUES ? 8 : 2) ? 0 : 2) {}

        __device__ __forceinline__ void next(int t, unsigned (&a)[4]) {
            const unsigned angles = (t % 2 ? codes.words[t / 2] >> 4 : codes.words[t / 2]) & 0x0f0f0f0fu;
            const unsigned six = shared_word<4>(ANGLES, t) >> shift & 0x3f3f3f3fu;
            unsigned radii[2];
            radii[0] = shared_word<SHARERS>(ANGLES + UPPERS, RADIUS_WORDS * t);
            radii[1] = RADIUS_WORDS == 2 ? shared_word<SHARERS>(ANGLES + UPPERS, RADIUS_WORDS * t + 1) : radii[0];
#pragma unroll
            for (int h = 0; h < 4; h += 2) {
                const __half2 radius = as_half2(radii[h / 2]);
                const unsigned unit[2] = {entry(64, angles, h), entry(64, angles, h + 1)};
                const unsigned factor[2] = {entry(0, six, h), entry(0, six, h + 1)};
                if constexpr (L::VALUES) {
                    const __half2 scale = __hmul2(as_half2(__byte_perm(factor[0], factor[1], 0x5410)), radius);
                    a[h] = as_bits(__hmul2(as_half2(__byte_perm(unit[0], unit[1], 0x5410)), scale));
                    a[h + 1] = as_bits(__hmul2(as_half2(__byte_perm(unit[0], unit[1], 0x7632)), scale));
                } else {
                    const __half2 first = __hmul2(as_half2(factor[0]), __low2half2(radius));
                    const __half2 second = __hmul2(as_half2(factor[1]), __high2half2(radius));
                    a[h] = as_bits(__hmul2(as_half2(unit[0]), first));
                    a[h + 1] = as_bits(__hmul2(as_half2(unit[1]), second));
                }
            }
        }

        // Word n of those that COUNT lanes share from word `first` on.
        template <int COUNT>
        __device__ __forceinline__ unsigned shared_word(int first, int n) const {
            const int others = L::VALUES ? lane & (COUNT == 4 ? 19 : 3) : lane & 28;
            const int source = others | n % COUNT << (L::VALUES ? 2 : 0);
            return __shfl_sync(0xffffffffu, codes.words[first + n / COUNT], source);
        }

        // The lane's entry of the table that begins at `row`; its number is byte r of `numbers`.
        __device__ __forceinline__ unsigned entry(int row, unsigned numbers, int r) const {
            const unsigned address = __byte_perm(numbers, column, 0x5504 | r << 4);
            return *reinterpret_cast<const unsigned *>(table + row * ROW_BYTES + address);
        }
    };

    static __device__ __forceinline__ void norms(float (&norm)[2 * L::PT], const unsigned char *, int, int,
                                                 const unsigned char *) {
#pragma unroll
        for (int i = 0; i < 2 * L::PT; ++i) norm[i] = 1.0f;
    }

    // x [N][D] in shared memory. Codes equal those of the Python twin: no operations are fused.
    static __device__ void encode(unsigned char *record, const float *x, unsigned char *, const unsigned char *tables,
                                  int thread, int threads) {
        Angles angles;
#pragma unroll
        for (int level = 0; level < 4; ++level)
            angles.tan_squared[level] = reinterpret_cast<const float *>(tables + L::TAN_SQUARED)[level];
        for (int at = thread; at < L::PARTS * WORDS * 32; at += threads) {
            const int part = at / (WORDS * 32), in_part = at % (WORDS * 32), first = in_part / 128 * 4;
            const int size = WORDS - first < 4 ? WORDS - first : 4, word = first + in_part % 128 % size;
            const int lane = in_part % 128 / size;
            const float *tokens = x + part * L::PART * L::D;
            unsigned packed;
            if (word < ANGLES)
                packed = angles.directions(tokens, 2 * word, lane) | angles.directions(tokens, 2 * word + 1, lane) << 4;
            else if (word < ANGLES + UPPERS)
                packed = angles.rows(tokens, 4 * (word - ANGLES) + member(lane, 4), lane);
            else
                packed = angles.radii(tokens, SHARERS * (word - ANGLES - UPPERS) + member(lane, SHARERS), lane);
            reinterpret_cast<unsigned *>(record)[at] = packed;
        }
    }

private:
    // A lane's number among those that share its words.
    static __device__ __forceinline__ int member(int lane, int count) { return (L::VALUES ? lane >> 2 : lane) % count; }

    // Chooses codes. x: the tokens of a part.
    struct Angles {
        float tan_squared[4];

        // The code of √b over √a within a quadrant; sum = a + b. a, b: squares.
        __device__ __forceinline__ unsigned quarter(float a, float b, int level, float &sum) const {
            const float tan = tan_squared[level - 1];
            sum = __fadd_rn(a, b);
            return (b > __fmul_rn(tan, a)) + (b > a) + (__fmul_rn(tan, b) > a);
        }
        __device__ __forceinline__ unsigned direction(const float *pair, float &squares) const {
            const unsigned code = quarter(__fmul_rn(pair[0], pair[0]), __fmul_rn(pair[1], pair[1]), 1, squares);
            return code ^ (pair[0] < 0 ? 7 : 0) ^ (pair[1] < 0 ? 15 : 0);
        }
        // The row of 8 values without level 4, and their squared norm.
        __device__ __forceinline__ unsigned half_row(const float *values, float &squares) const {
            float pairs[4], quads[2];
#pragma unroll
            for (int i = 0; i < 4; ++i) direction(values + 2 * i, pairs[i]);
            const unsigned first = quarter(pairs[0], pairs[1], 2, quads[0]);
            const unsigned second = quarter(pairs[2], pairs[3], 2, quads[1]);
            return first << 6 | quarter(quads[0], quads[1], 3, squares) << 2 | second;
        }
        // The two rows of the 16 values of step s, and the radius of each half, equal with four levels; 0 from D on.
        __device__ __forceinline__ void group(const float *token, int s, unsigned (&rows)[2],
                                              float (&radius)[2]) const {
            float squares[2] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half)
                rows[half] = 16 * s + 8 * half < L::D ? half_row(token + 16 * s + 8 * half, squares[half]) : 0;
            if constexpr (L::LEVELS == 4) {
                const unsigned code = quarter(squares[0], squares[1], 4, squares[0]);
                rows[0] |= code << 4, rows[1] |= (3 - code) << 4;
                squares[1] = squares[0];
            }
            radius[0] = fminf(__fsqrt_rn(squares[0]), 65504.0f), radius[1] = fminf(__fsqrt_rn(squares[1]), 65504.0f);
        }

        // The level 1 codes of a tile, a byte each; 0 behind the last tile.
        __device__ unsigned directions(const float *x, int tile, int lane) const {
            unsigned packed = 0;
            for (int r = 0; r < 4 && tile < L::TILES; ++r) {
                const int pair = 8 * step_of(tile) + (L::VALUES ? lane / 4 : 4 * (r / 2) + lane % 4);
                if (2 * pair >= L::D) continue;
                float squares;
                packed |= direction(x + token_of(tile, r, lane) * L::D + 2 * pair, squares) << 8 * r;
            }
            return packed;
        }
        __device__ unsigned rows(const float *x, int tile, int lane) const {
            unsigned packed = 0;
            for (int r = 0; r < 4 && tile < L::TILES; ++r) {
                unsigned both[2];
                float radius[2];
                group(x + token_of(tile, r, lane) * L::D, step_of(tile), both, radius);
                packed |= ((L::VALUES ? lane / 16 : r / 2) ? both[1] : both[0]) << 8 * r;
            }
            return packed;
        }
        // Word n of the radii.
        __device__ unsigned radii(const float *x, int n, int lane) const {
            const int tile = n / RADIUS_WORDS, h = n % RADIUS_WORDS;
            float two[2] = {};
            for (int i = 0; i < 2 && tile < L::TILES; ++i) {
                unsigned both[2];
                float radius[2];
                group(x + token_of(tile, 2 * h + i, lane) * L::D, step_of(tile), both, radius);
                two[i] = (L::VALUES ? lane / 16 : h) ? radius[1] : radius[0];
            }
            return as_bits(__floats2half2_rn(two[0], two[1]));
        }

        static __device__ __forceinline__ int step_of(int tile) { return L::VALUES ? tile % L::STEPS : tile / L::PT; }
        // The token of the part that c[r] belongs to.
        static __device__ __forceinline__ int token_of(int tile, int r, int lane) {
            if (L::VALUES) return 16 * (tile / L::STEPS) + 8 * (r / 2) + lane % 4 * 2 + r % 2;
            return 16 * (tile % L::PT) + lane / 4 + 8 * (r % 2);
        }
    };
};

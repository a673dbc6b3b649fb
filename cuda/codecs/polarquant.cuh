// 16 values as a radius and angles of four levels; 8 values and three levels if the head dim is no multiple of 16.
// Twin of engine/codecs/polarquant.py; engine/records/polarquant.py makes its words.
//
//     value = point(codes of levels 1, 2 and 3) · radius of 8 values,   radius of 8 values = factor(level 4) · radius
//
// The angles above level 1 are one byte for every 8 values, the *row*: level 2 of pairs 0, 1 << 6 | level 4 << 4 |
// level 3 << 2 | level 2 of pairs 2, 3. For the second half of 16 values level 4 is complemented. Bits per value: 2 of
// level 1, 1 of the row, and 1 of the radius.
//
// A part of a record is WORDS words for every lane, in chunks of four:
//   ANGLES  byte r of word w: level 1 codes of c[r] in tile 2w (low four bits) and in tile 2w + 1.
//   UPPERS  byte r of word t is the row that c[r] of tile t belongs to. Lanes with equal g (keys), or with equal tg and
//           g >> 2 (values), need the same words and store a quarter each: word t is word t / 4 of the (t % 4)th lane.
//   RADII   halves, RADIUS_WORDS words per tile. Keys: tokens g and g + 8; with three levels, one word for each half.
//           Values: word h has tokens 8h + 2tg + {0, 1}. Lanes share them likewise; with four levels, the eight lanes
//           of equal tg share a value tile's: word n is word n / 8 of the (n % 8)th lane.
// tables: half2 [4][256], for each pair of a row the point of radius 1 by level 1 << 4 | four bits, which are level 2
// << 2 | level 3 for pairs 0, 1 and level 3 << 2 | level 2 for pairs 2, 3; float [4] tan² of each level's first
// threshold. Rows in shared memory: 256 of points, in each lane's column its own pair's. A lane's pair in a row
// is the same in all tiles: tg for keys, g % 4 for values.
template <class L>
struct polarquant : NormsInCodes<L> {
    static constexpr int ROWS = 256;
    static constexpr bool QUANTIZED = true, RANDOM_ACCESS = true, BY_GROUPS = false;

    static constexpr int SHARERS = L::VALUES && L::LEVELS == 4 ? 8 : 4;  // lanes that share radii
    static constexpr int RADIUS_WORDS = L::VALUES || L::LEVELS == 3 ? 2 : 1;
    static constexpr int ANGLES = (L::TILES + 1) / 2;
    static constexpr int UPPERS = (L::TILES + 3) / 4;
    static constexpr int RADII = (RADIUS_WORDS * L::TILES + SHARERS - 1) / SHARERS;
    static constexpr int WORDS = ANGLES + UPPERS + RADII;
    static_assert(WORDS == L::WORDS && ROWS == L::ROWS, "the record is laid out in another way");

    // For four lanes: tg = 0 … 3 of g = number.
    static __device__ __forceinline__ uint4 piece(const unsigned char *tables, int row, int number, int) {
        const unsigned *const points = reinterpret_cast<const unsigned *>(tables);
        unsigned own[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = points[(L::VALUES ? number % 4 : i) * 256 + row];
        return make_uint4(own[0], own[1], own[2], own[3]);
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
        unsigned column, shift;      // address within a row; where the four bits of the lane's pair begin in `uppers`
        unsigned uppers, radii[2];   // of tiles 4 · group …: this lane's levels 2 and 3; radii of 8 values
        int group;

        __device__ __forceinline__ Decoder(const Codes &codes, const unsigned char *shared, int lane)
            : codes(codes), table(shared), lane(lane), column(lane * 4u), shift(lane & (L::VALUES ? 8 : 2) ? 0 : 2),
              group(-1) {}

        __device__ __forceinline__ void next(int t, unsigned (&a)[4]) {
            if (t / 4 != group) prepare(group = t / 4);
            // The upper four bits are of level 1, the lower of levels 2 and 3.
            const unsigned angles = t % 2 ? codes.words[t / 2] : codes.words[t / 2] << 4;
            const unsigned numbers = (angles & 0xf0f0f0f0u) | (from<4>(uppers, t) >> shift & 0x0f0f0f0fu);
#pragma unroll
            for (int h = 0; h < 4; h += 2) {
                const __half2 radius = as_half2(radius_word(t, h / 2));
                const unsigned point[2] = {entry(numbers, h), entry(numbers, h + 1)};
                if constexpr (L::VALUES) {
                    a[h] = as_bits(__hmul2(as_half2(__byte_perm(point[0], point[1], 0x5410)), radius));
                    a[h + 1] = as_bits(__hmul2(as_half2(__byte_perm(point[0], point[1], 0x7632)), radius));
                } else {
                    a[h] = as_bits(__hmul2(as_half2(point[0]), __low2half2(radius)));
                    a[h + 1] = as_bits(__hmul2(as_half2(point[1]), __high2half2(radius)));
                }
            }
        }

        __device__ __forceinline__ void pass(int t) {
            unsigned a[4];
            next(t, a);
        }

        // Computes what the lane's sharers need of the tiles that it stores of four.
        __device__ __forceinline__ void prepare(int i) {
            const unsigned rows = codes.words[ANGLES + i];
            uppers = (rows >> 2 & 0x30303030u) | (rows & 0x0f0f0f0fu);
            if constexpr (L::LEVELS == 4) {
                // Level 4 of byte r selects two bytes of the four factors.
                const unsigned select = (rows >> 4 & 0x03030303u) * 0x22u + 0x10101010u;
                const int first = ANGLES + UPPERS;
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const unsigned radius =
                        L::VALUES ? from<8>(codes.words[first + i], lane / 4 % 4 * 2 + h) : codes.words[first + i];
                    const unsigned factors = __byte_perm(L::LEVEL4_LOW, L::LEVEL4_HIGH, select >> 16 * h);
                    radii[h] = as_bits(__hmul2(as_half2(factors), as_half2(radius)));
                }
            }
        }

        // The radii of 8 values for c[2h] and c[2h + 1].
        __device__ __forceinline__ unsigned radius_word(int t, int h) const {
            if constexpr (L::LEVELS == 4) return from<4>(radii[h], t);
            const int n = 2 * t + h;
            return from<4>(codes.words[ANGLES + UPPERS + n / 4], n);
        }

        // `word` of the (n % COUNT)th of the COUNT lanes that share its kind.
        template <int COUNT>
        __device__ __forceinline__ unsigned from(unsigned word, int n) const {
            constexpr int same = !L::VALUES ? 28 : COUNT == 4 ? 19 : 3;  // tg is the lowest two bits of a lane
            return shuffle_among<same>(word, n % COUNT << (L::VALUES ? 2 : 0));
        }

        // The lane's entry; its number is byte r of `numbers`.
        __device__ __forceinline__ unsigned entry(unsigned numbers, int r) const {
            return *reinterpret_cast<const unsigned *>(table + __byte_perm(numbers, column, 0x5504 | r << 4));
        }
    };

    // x [N][D] in shared memory. Codes equal the Python twin's: no operations are fused.
    static __device__ void encode(unsigned char *record, const float *x, const unsigned char *tables, int thread,
                                  int threads) {
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

        // The level 1 codes of a tile, a byte each; 0 after the last tile.
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

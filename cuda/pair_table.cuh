// Codecs whose codes are indices into one table of pairs of values, with a norm for each token: ring and turbo,
// and the base of linear, with 16 bits and without a table. Twin of engine/records/pair_table.py.
//
// L has, besides the geometry: BITS of a pair's code, WORDS of a lane and part; NORMS (an offset), NORM_BYTES (1 or 2),
// LARGEST_NORM (the bits of a float); WIDTH, CODE_BITS and POINTS of the codes that are chosen, of one value or a pair;
// offsets into the tables: PAIRS half2 [2^BITS, at most 256], POINTS_F32 float [POINTS][WIDTH] and, for norms of one
// byte, NORM_TABLE float [256] and NORM_THRESHOLDS float [256], ascending (else 0).

template <class L>
struct PairTable {
    static constexpr int ROWS = L::ROWS, PAIR_ROWS = L::BITS == 16 ? 0 : 256;
    static constexpr bool NORMED = true, QUANTIZED = true, RANDOM_ACCESS = false, BY_GROUPS = false;
    static constexpr bool COVERED = false;  // whether norms cover a vector's largest value, in place of the rms
    static constexpr int WIDTH = L::WIDTH, POINTS = L::POINTS, POINTS_F32 = L::POINTS_F32;

    // Row `byte` has, in every lane's column, the point whose code is the upper BITS bits of that byte; with ten bits,
    // the positive one whose code has that low byte. The 256 norms follow, 32 per row.
    static __device__ __forceinline__ uint4 piece(const unsigned char *tables, int row, int number,
                                                   int last) {
        const unsigned *words = reinterpret_cast<const unsigned *>(tables);
        const int point = L::PAIRS / 4 + (row >> Decoder::SPARE);
        const int norms = L::NORM_TABLE / 4 + (row - PAIR_ROWS) * 32 + number * 4;
        unsigned own[4];  // loads without a branch, so that no thread waits for one before the next
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = words[last < PAIR_ROWS || row < PAIR_ROWS ? point : norms + i];
        return make_uint4(own[0], own[1], own[2], own[3]);
    }

    struct Codes {
        unsigned words[L::WORDS];

        __device__ __forceinline__ void load(const unsigned char *record, int part, int lane) {
            load_chunks(words, record + part * L::WORDS * 128, lane);
        }
    };

    struct Decoder {
        static constexpr int SPARE = L::BITS < 8 ? 8 - L::BITS : 0;
        static constexpr int EXTRA = L::WORDS < L::TILES ? L::TILES - L::WORDS : 0;

        const Codes &codes;
        const unsigned char *table;
        unsigned column;                    // the lane's offset in a row
        unsigned extra[EXTRA ? EXTRA : 1];  // words collected from the digits decoded so far

        __device__ __forceinline__ Decoder(const Codes &codes, const unsigned char *shared, int lane)
            : codes(codes), table(shared), column(lane * 4u) {}

        __device__ __forceinline__ void next(int t, unsigned (&a)[4]) {
            unsigned c[4];
            bytes(word(t), c);
            if constexpr (L::BITS == 10) negate(c, codes.words[L::TILES + t / 4], t % 4 * 2);
            arrange(c, a);
        }

        __device__ __forceinline__ void pass(int t) { word(t); }

        // Points of a tile's codes as its registers.
        static __device__ __forceinline__ void arrange(const unsigned (&c)[4], unsigned (&a)[4]) {
            if constexpr (L::VALUES) {
                a[0] = __byte_perm(c[0], c[1], 0x5410), a[1] = __byte_perm(c[0], c[1], 0x7632);
                a[2] = __byte_perm(c[2], c[3], 0x5410), a[3] = __byte_perm(c[2], c[3], 0x7632);
            } else {
                a[0] = c[0], a[1] = c[1], a[2] = c[2], a[3] = c[3];
            }
        }

        // The bits below a code are not masked: rows that differ only in these bits are equal.
        __device__ __forceinline__ unsigned word(int t) {
            if (t >= L::WORDS) return extra[t < L::WORDS ? 0 : t - L::WORDS];
            const unsigned v = codes.words[t < L::WORDS ? t : 0];
            const int at = t * SPARE / L::BITS, place = t * SPARE % L::BITS, left = L::BITS - place;
            collect(at, place, v, left < SPARE ? left : SPARE);
            if (left < SPARE) collect(at + 1, 0, v >> left, SPARE - left);
            return v;
        }
        // Adds the lowest `count` bits of each byte to the codes of a word, from bit `place` on.
        __device__ __forceinline__ void collect(int at, int place, unsigned v, int count) {
            if (at >= EXTRA) return;
            const unsigned spare = (v & ((1u << count) - 1) * 0x01010101u) << SPARE + place;
            unsigned &sum = extra[at < EXTRA ? at : 0];
            sum = place ? sum + spare : spare;  // shift and sum are one instruction
        }

        __device__ __forceinline__ unsigned point(unsigned address) const {
            return *reinterpret_cast<const unsigned *>(table + address);
        }
        __device__ __forceinline__ void bytes(unsigned v, unsigned (&c)[4]) const {
#pragma unroll
            for (int r = 0; r < 4; ++r) c[r] = point(__byte_perm(v, column, 0x5504 | r << 4));
        }
        // Negates the first value of c[r] if bit `place` of byte r of `bits` is set, the second if the next bit is. A
        // product brings both bits of a code to the signs of both halves.
        static __device__ __forceinline__ void negate(unsigned (&c)[4], unsigned bits, int place) {
            const unsigned signs = 0x0303u << place, halves[2] = {bits & signs, bits >> 16 & signs};
#pragma unroll
            for (int r = 0; r < 4; ++r)
                c[r] ^= halves[r / 2] * (0x40008000u >> place + r % 2 * 8) & 0x80008000u;
        }
    };

    static __device__ __forceinline__ void norms(float (&norm)[2 * L::PT], const unsigned char *record, int part,
                                                 int lane, const unsigned char *shared) {
        constexpr int bytes = 2 * L::PT * L::NORM_BYTES;  // bytes of a lane
        const unsigned char *from = record + L::NORMS + (part * 8 + lane / 4) * bytes;
        unsigned words[bytes < 4 ? 1 : bytes / 4];
        if constexpr (bytes < 4)
            words[0] = __ldg(reinterpret_cast<const unsigned short *>(from));
        else
            load_words<bytes < 16 ? bytes : 16>(words, from);
#pragma unroll
        for (int i = 0; i < 2 * L::PT; ++i) {
            if constexpr (L::NORM_BYTES == 1) {
                const unsigned code = words[i / 4] >> i % 4 * 8 & 255;
                const unsigned at = PAIR_ROWS * ROW_BYTES + code / 32 * ROW_BYTES + code % 32 * 4;
                norm[i] = *reinterpret_cast<const float *>(shared + at);
            } else {
                const __half2 pair = as_half2(words[i / 2]);
                norm[i] = __half2float(i % 2 ? __high2half(pair) : __low2half(pair));
            }
        }
    }

    // The stored form of a norm ≥ 0: a byte, or the bits of a half.
    static __device__ __forceinline__ unsigned norm_code(float norm, const unsigned char *tables) {
        norm = fminf(norm, __int_as_float(L::LARGEST_NORM));
        if constexpr (L::NORM_BYTES == 2) {
            const __half stored = __float2half_rn(norm);
            unsigned short bits;
            memcpy(&bits, &stored, 2);
            return bits;
        } else {
            const float *thresholds = reinterpret_cast<const float *>(tables + L::NORM_THRESHOLDS);
            unsigned code = 0;
            for (unsigned step = 128; step; step /= 2)
                if (norm >= thresholds[code + step - 1]) code += step;
            return code;
        }
    }

    // Stores codes [N][D / WIDTH] and norms [N] from shared memory in a record.
    template <class Code>
    static __device__ void pack(unsigned char *record, const Code *codes, const float *norms,
                                const unsigned char *tables, int thread, int threads) {
        unsigned *words = reinterpret_cast<unsigned *>(record);
        for (int at = thread; at < L::PARTS * L::WORDS * 32; at += threads) {
            const int part = at / (L::WORDS * 32), in_part = at % (L::WORDS * 32), chunk = in_part / 128;
            const int size = L::WORDS - 4 * chunk < 4 ? L::WORDS - 4 * chunk : 4, in_chunk = in_part % 128;
            words[at] = packed_word(codes, part, 4 * chunk + in_chunk % size, in_chunk / size);
        }
        for (int token = thread; token < L::N; token += threads) {
            const int in_part = token % L::PART, g = in_part % 8, half_row = in_part / 8;
            const int at = ((token / L::PART * 8 + g) * 2 * L::PT + half_row) * L::NORM_BYTES;
            const unsigned code = norm_code(norms[token], tables);
            if constexpr (L::NORM_BYTES == 2)
                *reinterpret_cast<unsigned short *>(record + L::NORMS + at) = static_cast<unsigned short>(code);
            else
                record[L::NORMS + at] = static_cast<unsigned char>(code);
        }
    }

private:
    // The code of c[r] of a lane and tile.
    template <class Code>
    static __device__ __forceinline__ unsigned code_at(const Code *codes, int part, int t, int lane, int r) {
        const int g = lane / 4, tg = lane % 4;
        const int token =
            L::VALUES ? 16 * (t / L::STEPS) + 8 * (r / 2) + 2 * tg + r % 2 : 16 * (t % L::PT) + g + 8 * (r % 2);
        const int pair = L::VALUES ? 8 * (t % L::STEPS) + g : 8 * (t / L::PT) + 4 * (r / 2) + tg;
        if (pair >= L::D / 2) return 0;
        const Code *own = codes + ((part * L::PART + token) * L::D + 2 * pair) / WIDTH;
        return WIDTH == 2 ? own[0] : own[0] | own[1] << L::CODE_BITS;
    }

    template <class Code>
    static __device__ __forceinline__ unsigned packed_word(const Code *codes, int part, int word, int lane) {
        constexpr int spare = Decoder::SPARE;
        unsigned packed = 0;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            unsigned byte = 0;
            if (L::BITS == 10 && word >= L::TILES) {
                const int first = 4 * (word - L::TILES);
                for (int k = 0; k < 4 && first + k < L::TILES; ++k)
                    byte |= code_at(codes, part, first + k, lane, r) >> 8 << 2 * k;
            } else if (L::BITS >= 10) {
                byte = code_at(codes, part, word % L::TILES, lane, r) >> (word < L::TILES ? 0 : 8) & 255;
            } else {
                byte = code_at(codes, part, word, lane, r) << spare;
                const int tile = L::WORDS + word * spare / L::BITS, place = word * spare % L::BITS;
                const int left = L::BITS - place;
                if (spare && tile < L::TILES)
                    byte |= code_at(codes, part, tile, lane, r) >> place & ((1 << spare) - 1);
                if (left < spare && tile + 1 < L::TILES)
                    byte |= (code_at(codes, part, tile + 1, lane, r) << left) & ((1 << spare) - 1);
            }
            packed |= byte << 8 * r;
        }
        return packed;
    }
};

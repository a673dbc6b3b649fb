// Records. A record is one block of one KV head, its keys or its values, in the order in which warps load them.
// `engine/records/__init__.py` makes and reads the same bytes; a layout struct L has the constants of one side.
//
// Letters: N tokens of a block, D channels of a vector, DP = D rounded up to 16, STEPS = DP / 16. lane = 4g + tg, where
// g < 8 and tg < 4. A *tile* is an A operand of mma.m16n8k16: registers a[0] … a[3] of two halves, the low one first.
//
// Keys. Tile (s, i): rows are tokens 16i …, columns are channels 16s …
//   a[r] = token 16i + g + 8 (r & 1), channels 16s + 8 (r >> 1) + 2tg + {0, 1}: pair 8s + 4 (r >> 1) + tg of the token
// Values, transposed. Tile (u, j): row g is channel 16j + 2g, row g + 8 channel 16j + 2g + 1; columns are tokens 16u …
//   a[r] = channel 16j + 2g + (r & 1), tokens 16u + 8 (r >> 1) + 2tg + {0, 1}
//   codes of pairs: c[r] = pair 8j + g of token 16u + 8 (r >> 1) + 2tg + (r & 1); a[0], a[1] = x and y of c[0], c[1]
// A *part* is what a warp holds at once: PART tokens, the block or at most 64 (32 for DP > 128); PT = PART / 16. There
// are PARTS in a block. A part has TILES = PT · STEPS tiles: number t = s · PT + i for keys, u · STEPS + j for values.
//
// The sections of a record are codes, norms, mean and scale of the mean, each at a multiple of 16 bytes; then zeros up
// to NBYTES, a multiple of 128.
//   codes       part after part, each at a multiple of 128 bytes
//     f16       16 bytes for every tile and lane, at (tile · 32 + lane) · 16: a[0], a[2], a[1], a[3]. So the first and
//               the last two are B operands of mma.m16n8k16 for 8 rows each, in neighbouring registers.
//     pairs     WORDS words for every lane, in chunks of four: chunk c at c · 512 + lane · 16; a last chunk of n < 4
//               words at c · 512 + lane · 4n. Byte r of a word belongs to c[r]. With m = 4 to 8 bits per pair,
//               word t has the code of tile t in the upper m bits of its bytes. Codes of the remaining tiles are cut
//               into digits of 8 − m bits, which fill the lower bits, lowest digit first, word after word from word 0.
//               With m = 10, word t has the lower 8 bits of tile t, word TILES + w the upper 2 of tile 4w + k in bits
//               2k, 2k + 1. With m = 16, word TILES + t the upper 8 bits of tile t.
//   norms       a byte or a half per token, [part][g][2i + h]: token 16i + 8h + g of the part
//   mean        keys only: DP values, int8 or half, [tg][s][4]: channels 16s + 2tg + {0, 1, 8, 9}
//   mean scale  one half, for a mean of int8
// Channels from D to DP have codes, values and means of zero.
//
// Tables in shared memory. A row has 256 bytes: 128 for the keys' codec, then 128 for the values'. So the address of a
// lookup is a row number in one byte and 4 · lane in the byte below: one byte permute makes it, and no banks conflict.
// A codec has ROWS rows of 128 bytes; both codecs together take SharedTables<KeyCodec, ValueCodec>::BYTES.
//
// Members of template <class L> struct <codec>, in cuda/codecs/<codec>.cuh, or of PairTable:
//   ROWS            rows of its tables; 0 for a codec without tables
//   QUANTIZED       false for full precision, which needs no decoding
//   NORMED          whether decoded values are still to be multiplied by the token's norm. Then encode_blocks.cu
//                   chooses codes among POINTS points of WIDTH values, at tables + POINTS_F32, and stores them by
//                   `pack`; else `encode` chooses and stores them
//   RANDOM_ACCESS   whether Decoder::next takes tiles in any order
//   piece(tables, row, number, last)            bytes 16 · number … + 15 of a row of its tables in shared memory; no
//                                               thread has a row after `last`, a constant after unrolling. Not
//                                               by __ldg, which the compiler moves behind wait_for_previous
//   Codes, .load(record, part, lane)            loads the codes of a part into registers
//   BY_GROUPS       whether codes can be loaded four tiles at a time, by Codes::load_group(record, part, lane, group)
//   Decoder(codes, shared, lane), .next(t, a)   decodes tile t into registers; t is a constant after unrolling, and
//                                               ascends from 0 unless RANDOM_ACCESS
//   Decoder.pass(t)                             in place of next(t, a) for a tile that is not wanted
//   norms(norm, record, part, lane, shared)     norm[2i + h] = norm of token 16i + 8h + g, if NORMED
//   pack(record, codes, norms, tables, thread, threads)   codes [N][D / WIDTH] and norms [N] ≥ 0, in shared memory
//   encode(record, x, tables, thread, threads)            x [N][D] in shared memory
// PRECOND of all: records aligned to 128 bytes, tables to 16.

constexpr int ROW_BYTES = 256;

// Rows of the tables of one side on their way to shared memory, in the registers of a block of THREADS threads. All
// loads are in flight together: each that waited for the one before it would cost the whole way to the L2 cache.
template <class Codec, int THREADS, int COUNT = Codec::ROWS>
struct LoadedRows {
    static constexpr int PIECES = COUNT * 8, OWN = (PIECES + THREADS - 1) / THREADS;
    uint4 own[OWN > 0 ? OWN : 1];

    // last: no row after it is among these.
    __device__ __forceinline__ explicit LoadedRows(const unsigned char *tables, int first = 0, int last = COUNT - 1) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int last_own = min(last, first + (i * THREADS + THREADS - 1) / 8);
            if (has(i)) own[i] = Codec::piece(tables, first + row(i), threadIdx.x % 8, last_own);
        }
    }
    // Whether the thread has piece i of its own, and that piece's row, counted from the first one. Only a part of it
    // depends on the thread, so that all rows have one address and constant distances.
    static __device__ __forceinline__ bool has(int i) {
        return (i + 1) * THREADS <= PIECES || i * THREADS + threadIdx.x < PIECES;
    }
    static __device__ __forceinline__ int row(int i) { return i * (THREADS / 8) + threadIdx.x / 8; }
    // shared: the side's first row.
    __device__ __forceinline__ void store(unsigned char *shared, int first = 0) const {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (has(i))
                *reinterpret_cast<uint4 *>(shared + (first + row(i)) * ROW_BYTES + threadIdx.x % 8 * 16) = own[i];
    }
};

// Copies the tables of one side with few registers; called by all threads, before a barrier. A codec has few rows, or
// 256 of one kind, and maybe some of another.
template <class Codec, int THREADS>
__device__ __forceinline__ void copy_tables(unsigned char *shared, const unsigned char *tables) {
    constexpr int batch = THREADS < 512 ? THREADS / 2 : 256;
    if constexpr (Codec::ROWS < 256) {
        LoadedRows<Codec, THREADS>(tables).store(shared);
    } else {
        static_assert(256 % batch == 0, "a batch is four loads");
#pragma unroll 1
        for (int first = 0; first < 256; first += batch)
            LoadedRows<Codec, THREADS, batch>(tables, first, 255).store(shared, first);
    }
    if constexpr (Codec::ROWS > 256)
        LoadedRows<Codec, THREADS, Codec::ROWS - 256>(tables, 256, Codec::ROWS - 1).store(shared, 256);
}

// Tables of both sides in shared memory. base: BYTES bytes, aligned to 128.
template <class Keys, class Values>
struct SharedTables {
    static constexpr int BYTES = ROW_BYTES * (Keys::ROWS > Values::ROWS ? Keys::ROWS : Values::ROWS);

    static __device__ __forceinline__ unsigned char *keys(unsigned char *base) { return base; }
    static __device__ __forceinline__ unsigned char *values(unsigned char *base) { return base + ROW_BYTES / 2; }
    // Called by all threads of the block; a barrier must follow.
    template <int THREADS>
    static __device__ __forceinline__ void fill(unsigned char *base, const unsigned char *key_tables,
                                                const unsigned char *value_tables) {
        copy_tables<Keys, THREADS>(keys(base), key_tables);
        copy_tables<Values, THREADS>(values(base), value_tables);
    }

    // The same in two steps, with all loads in flight in between.
    template <int THREADS>
    struct Loaded {
        LoadedRows<Keys, THREADS> key_rows;
        LoadedRows<Values, THREADS> value_rows;

        __device__ __forceinline__ Loaded(const unsigned char *key_tables, const unsigned char *value_tables)
            : key_rows(key_tables), value_rows(value_tables) {}
        __device__ __forceinline__ void store(unsigned char *base) const {
            key_rows.store(keys(base));
            value_rows.store(values(base));
        }
    };
};

// Loads COUNT words in the widest accesses for p aligned to ALIGN bytes. ONCE: cache lines are evicted first.
template <int ALIGN, int COUNT, bool ONCE = false>
__device__ __forceinline__ void load_words(unsigned (&words)[COUNT], const unsigned char *p) {
    constexpr int width = ALIGN < 16 ? ALIGN / 4 : 4;
    static_assert(width == 1 || width == 2 || width == 4, "words are aligned");
#pragma unroll
    for (int i = 0; i < COUNT; i += width) {
        if (width == 4 && i + 4 <= COUNT) {
            const uint4 *from = reinterpret_cast<const uint4 *>(p + 4 * i);
            const uint4 v = ONCE ? __ldcs(from) : __ldg(from);
            words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
        } else if (width == 2 && i + 2 <= COUNT) {
            const uint2 *from = reinterpret_cast<const uint2 *>(p + 4 * i);
            const uint2 v = ONCE ? __ldcs(from) : __ldg(from);
            words[i] = v.x, words[i + 1] = v.y;
        } else {
#pragma unroll
            for (int j = i; j < COUNT && j < i + width; ++j) {
                const unsigned *from = reinterpret_cast<const unsigned *>(p + 4 * j);
                words[j] = ONCE ? __ldcs(from) : __ldg(from);
            }
        }
    }
}

// Which register of a tile word `i` of the lane's 16 bytes is, in a record of f16; and the word of register i.
__device__ __forceinline__ constexpr int f16_order(int i) { return i % 2 * 2 + i / 2; }

// A lane's 16 bytes of a tile.
__device__ __forceinline__ uint4 f16_words(const unsigned (&a)[4]) { return make_uint4(a[0], a[2], a[1], a[3]); }

// The number of the half of a full-precision record that has a token's channel.
template <class L>
__device__ __forceinline__ int full_index(int token, int channel) {
    const int t = token % L::PART, tokens = t / 16, step = channel / 16, c = channel % 16;
    const int tile = L::VALUES ? tokens * L::STEPS + step : step * L::PT + tokens;
    const int g = L::VALUES ? c / 2 : t % 8, tg = L::VALUES ? t % 8 / 2 : c % 8 / 2;
    const int r = L::VALUES ? c % 2 + t % 16 / 8 * 2 : t % 16 / 8 + c / 8 * 2, half = (L::VALUES ? t : c) % 2;
    return ((token / L::PART * L::TILES + tile) * 32 + 4 * g + tg) * 8 + f16_order(r) * 2 + half;
}

// Loads a tile of f16, which is read once. p: the lane's 16 bytes.
__device__ __forceinline__ void load_f16_tile(unsigned (&a)[4], const unsigned char *p) {
    unsigned words[4];
    load_words<16, 4, true>(words, p);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[f16_order(i)] = words[i];
}

// Loads a lane's words of a part, which are read once.
template <int COUNT>
__device__ __forceinline__ void load_chunks(unsigned (&words)[COUNT], const unsigned char *part, int lane) {
    constexpr int whole = COUNT / 4 * 4, rest = COUNT - whole;
#pragma unroll
    for (int at = 0; at < whole; at += 4) {
        unsigned chunk[4];
        load_words<16, 4, true>(chunk, part + at * 128 + lane * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[at + i] = chunk[i];
    }
    if constexpr (rest > 0) {
        unsigned chunk[rest];
        load_words<rest == 2 ? 8 : 4, rest, true>(chunk, part + whole * 128 + lane * rest * 4);
#pragma unroll
        for (int i = 0; i < rest; ++i) words[whole + i] = chunk[i];
    }
}

// The mean of a block of keys, divided by mean_scale, for channels 16s + 2tg + {0, 1} and + {8, 9}. Exact in half.
template <class L>
__device__ __forceinline__ void mean_tile(unsigned (&mean)[2], const unsigned char *record, int s, int tg) {
    const int at = tg * L::STEPS + s;
    if constexpr (L::MEAN_BITS == 16) {
        load_words<8>(mean, record + L::MEAN + at * 8);
    } else if constexpr (L::MEAN_BITS == 8) {
        unsigned bytes[1];
        load_words<4>(bytes, record + L::MEAN + at * 4);
        // 0x6400 | b + 128 is the half 1024 + 128 + b.
        const unsigned biased = bytes[0] ^ 0x80808080u;
        const __half2 origin = as_half2(0x64806480u);
        mean[0] = as_bits(__hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4140)), origin));
        mean[1] = as_bits(__hsub2(as_half2(__byte_perm(biased, 0x64646464u, 0x4342)), origin));
    } else {
        mean[0] = mean[1] = 0;
    }
}

// The factor by which the result of mean_tile is to be multiplied.
template <class L>
__device__ __forceinline__ float mean_scale(const unsigned char *record) {
    if constexpr (L::MEAN_BITS == 8) return __half2float(*reinterpret_cast<const __half *>(record + L::MEAN_SCALE));
    return 1.0f;
}

// The base of codecs without norms of tokens, which choose their codes by `encode`.
template <class L>
struct NormsInCodes {
    static constexpr bool NORMED = false;
    static __device__ void norms(float (&)[2 * L::PT], const unsigned char *, int, int, const unsigned char *) {}
};

// The parts of blocks that a CTA of prefill_attention.cu walks over, and how they come into shared memory:
// full-precision ones are copied, quantized ones decoded. Part of that file, which says what the letters and DEFINES
// are.

constexpr int D = FullKeyLayout::D, DP = FullKeyLayout::DP, N = FullKeyLayout::N, STEPS = FullKeyLayout::STEPS;
constexpr int PART = FullKeyLayout::PART, PARTS = FullKeyLayout::PARTS, PT = FullKeyLayout::PT;
constexpr int TILES = FullKeyLayout::TILES, PART_BYTES = TILES * 512, EXACT_BYTES = FullKeyLayout::NBYTES;
constexpr int MT = WARP_ROWS / 16;  // tiles of rows of a warp

// Sides whose quantized blocks are full-precision records.
constexpr bool RAW_KEYS = !KeyCodec::QUANTIZED && KeyLayout::MEAN_BITS == 0, RAW_VALUES = !ValueCodec::QUANTIZED;

using Tables = SharedTables<KeyCodec, ValueCodec>;
constexpr int KEYS = Tables::BYTES;  // the tables begin at 0
constexpr int VALUES = KEYS + PART_BYTES;
constexpr int QUERIES = VALUES + PART_BYTES;
constexpr bool QUERIES_SHARED = MT > 1 && DP > 64;  // the registers are needed for sums
constexpr int SHARED_BYTES = QUERIES + (QUERIES_SHARED ? WARPS * WARP_ROWS * DP * 2 : 0);

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float NOTHING = -1e30f;  // the maximum before the first score: finite, for −inf − −inf is NaN

// Where one side's records are: quantized ones, the sink's, those of new rows.
struct Pools {
    const unsigned char *quantized, *sink, *current;
};

enum Region { SINK, CODED, CURRENT };

// One part of a block of one KV head.
struct Part {
    Region region;
    long long record;  // in its pool
    int number;        // within the record
    int start;         // position of the first token

    __device__ const unsigned char *full(const Pools &pools) const {
        const unsigned char *const pool =
            region == SINK ? pools.sink : region == CODED ? pools.quantized : pools.current;
        return pool + record * EXACT_BYTES + number * PART_BYTES;
    }
};

// The parts that rows at positions `first` … `last` see, in order.
struct Walk {
    const Span &span;
    int kv_heads, head;
    // Parts before the window, and parts seen.
    int sink_hidden, sink, quantized_hidden, quantized, current_hidden, current;

    __device__ Walk(const Span &span, int kv_heads, int head, int first, int last, int window)
        : span(span), kv_heads(kv_heads), head(head) {
        const int oldest = window > 0 ? max(0, first - window + 1) / PART : 0;  // part of the sequence
        sink = span.sink >= 0 ? PARTS : 0;
        quantized = span.quantized * PARTS;
        current = last / PART + 1 - span.current_block * PARTS;
        sink -= sink_hidden = min(oldest, sink);
        quantized -= quantized_hidden = min(max(0, oldest - span.first_quantized * PARTS), quantized);
        current -= current_hidden = min(max(0, oldest - span.current_block * PARTS), current);
    }

    __device__ int parts() const { return sink + quantized + current; }

    __device__ Part at(int n) const {
        if (n < sink) return part(SINK, span.sink, 0, sink_hidden + n);
        n += quantized_hidden - sink;
        if (n < quantized_hidden + quantized) return part(CODED, span.ids()[n / PARTS], span.first_quantized, n);
        n += current_hidden - quantized_hidden - quantized;
        return part(CURRENT, span.current + n / PARTS, span.current_block, n);
    }

    // Part n of a region whose first block is block `block` of the sequence.
    __device__ Part part(Region region, int record, int block, int n) const {
        return {region, (long long)record * kv_heads + head, n % PARTS, block * N + n * PART};
    }
};

// Starts the copy of an exact part.
__device__ __forceinline__ void copy_part(unsigned char *to, const unsigned char *from) {
    const int own = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < PART_BYTES; i += WARPS * 512)
        if (i + WARPS * 512 <= PART_BYTES || i + own < PART_BYTES) cp_async<16>(to + own + i, from + own + i);
    cp_async_commit();
}

// What tokens behind `newest` have becomes zero, in what this thread has copied: 0 times it is added.
__device__ __forceinline__ void clear_values(unsigned char *values, int start, int newest) {
    for (int i = threadIdx.x; i < PART_BYTES / 16; i += WARPS * 32) {
        unsigned *const a = reinterpret_cast<unsigned *>(values) + i * 4;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int token = start + i / 32 / STEPS * 16 + r / 2 * 8 + i % 4 * 2;
            if (token > newest) a[r] = 0;
            else if (token == newest) a[r] &= 0xffffu;
        }
    }
}

// A register of a tile of keys: two neighbouring channels of a token of this norm, of which `mean` has been taken out.
__device__ __forceinline__ unsigned whole_key(unsigned point, float norm, __half2 mean) {
    const __half2 x = as_half2(point);
    constexpr bool centred = KeyLayout::MEAN_BITS > 0;
    if constexpr (KeyCodec::NORMED && centred) return as_bits(__hfma2(x, __float2half2_rn(norm), mean));
    if constexpr (KeyCodec::NORMED) return as_bits(__hmul2(x, __float2half2_rn(norm)));
    if constexpr (centred) return as_bits(__hadd2(x, mean));
    return point;
}

// Decodes keys: warp W does the tiles from TILES · W / WARPS on. They are known when this is compiled, so that it loads
// and looks up nothing else.
template <int W = 0>
__device__ __forceinline__ void decode_keys(unsigned char *to, const unsigned char *record, int part,
                                            const unsigned char *tables, int warp, int lane) {
    if (warp == W) {
        typename KeyCodec::Codes codes;
        codes.load(record, part, lane);
        float norm[2 * PT] = {};
        if constexpr (KeyCodec::NORMED) KeyCodec::norms(norm, record, part, lane, tables);
        const __half2 scale = __float2half2_rn(mean_scale<KeyLayout>(record));
        typename KeyCodec::Decoder decoder(codes, tables, lane);
        constexpr int first = TILES * W / WARPS;
#pragma unroll
        for (int t = KeyCodec::RANDOM_ACCESS ? first : 0; t < TILES * (W + 1) / WARPS; ++t) {
            unsigned a[4], mean[2];
            decoder.next(t, a);
            if (t < first) continue;
            mean_tile<KeyLayout>(mean, record, t / PT, lane % 4);
#pragma unroll
            for (int r = 0; r < 4; ++r)
                a[r] = whole_key(a[r], norm[t % PT * 2 + r % 2], __hmul2(as_half2(mean[r / 2]), scale));
            reinterpret_cast<uint4 *>(to)[t * 32 + lane] = make_uint4(a[0], a[1], a[2], a[3]);
        }
    } else if constexpr (W + 1 < WARPS) {
        decode_keys<W + 1>(to, record, part, tables, warp, lane);
    }
}

// The same for values, whose norms belong to columns: a lane gets those of tokens 2tg and 2tg + 1 from lanes of rows.
template <int W = 0>
__device__ __forceinline__ void decode_values(unsigned char *to, const unsigned char *record, int part,
                                              const unsigned char *tables, int warp, int lane) {
    if (warp == W) {
        typename ValueCodec::Codes codes;
        codes.load(record, part, lane);
        float norm[2 * PT] = {};
        if constexpr (ValueCodec::NORMED) ValueCodec::norms(norm, record, part, lane, tables);
        typename ValueCodec::Decoder decoder(codes, tables, lane);
        __half2 pair[2];  // norms of tokens 16u + 2tg + {0, 1}, and + 8
        constexpr int first = TILES * W / WARPS;
#pragma unroll
        for (int t = ValueCodec::RANDOM_ACCESS ? first : 0; t < TILES * (W + 1) / WARPS; ++t) {
            unsigned a[4];
            decoder.next(t, a);
            if (t < first) continue;
            if constexpr (ValueCodec::NORMED) {
                if (t == first || t % STEPS == 0) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float low = __shfl_sync(ALL_LANES, norm[t / STEPS * 2 + h], lane % 4 * 8);
                        const float high = __shfl_sync(ALL_LANES, norm[t / STEPS * 2 + h], lane % 4 * 8 + 4);
                        pair[h] = __floats2half2_rn(low, high);
                    }
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) a[r] = as_bits(__hmul2(as_half2(a[r]), pair[r / 2]));
            }
            reinterpret_cast<uint4 *>(to)[t * 32 + lane] = make_uint4(a[0], a[1], a[2], a[3]);
        }
    } else if constexpr (W + 1 < WARPS) {
        decode_values<W + 1>(to, record, part, tables, warp, lane);
    }
}

// One side of a part into shared memory. RAW: quantized blocks are full-precision records, too; decode(record) does it
// for others.
template <bool RAW, class Layout, class Decode>
__device__ __forceinline__ void bring(unsigned char *to, const Part &part, const Pools &pools, const Decode &decode) {
    if constexpr (!RAW) {
        if (part.region == CODED) return decode(pools.quantized + part.record * Layout::NBYTES);
    }
    copy_part(to, part.full(pools));
}

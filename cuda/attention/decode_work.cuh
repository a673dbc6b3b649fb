// Shapes of decode_attention.cu, and what a query token sees and a warp has to do. Part of that file.

constexpr int D = KeyLayout::D, DP = KeyLayout::DP, N = KeyLayout::N, PART = KeyLayout::PART, PARTS = KeyLayout::PARTS;
constexpr int PT = KeyLayout::PT, STEPS = KeyLayout::STEPS, TILES = KeyLayout::TILES;
constexpr int CHUNKS = (GROUP + 7) / 8, HEADS = (GROUP + CHUNKS - 1) / CHUNKS;  // of a CTA; the last may have less
constexpr int SLICES = N / 16;                                                  // of a record

// Coded blocks that need no decoding are slices like the exact records.
constexpr bool ALL_EXACT = !KeyCodec::QUANTIZED && !ValueCodec::QUANTIZED && KeyLayout::MEAN_BITS == 0;

using Tables = SharedTables<KeyCodec, ValueCodec>;
// For the sum over warps, in the place of the tables: acc [WARPS][HEADS][MERGE_ROW], max and sum [WARPS][HEADS][2].
constexpr int MERGE_ROW = DP + 4;  // lanes that store two neighbours of a row in one access are in different banks
constexpr int MERGE_BYTES = WARPS * HEADS * (MERGE_ROW + 2) * 4;
// Behind the tables: q · mean of 16 blocks, [WARPS][16][8 heads].
constexpr int MEAN_BYTES = KeyLayout::MEAN_BITS ? WARPS * 16 * 8 * 4 : 0;
constexpr int LOOP_BYTES = Tables::BYTES + MEAN_BYTES;
constexpr int SHARED_BYTES = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float NOTHING = -1e30f;  // the maximum before the first score: finite, for −inf − (−inf) is NaN

// Positions that the query token sees: none where newest < oldest.
struct Seen {
    int oldest, newest;
};

__device__ __forceinline__ Seen seen_by(const Span &span, int window) {
    const int newest = span.position + span.rows - 1;
    return {window > 0 ? max(0, newest - window + 1) : 0, newest};
}

// The coded blocks with tokens that it sees: `count` from block `number` of the sequence on. Only the first can have
// tokens that it does not see.
struct Coded {
    int count, number;
    const int *ids;
};

__device__ __forceinline__ Coded coded_of(const Span &span, const Seen &seen) {
    const int hidden = min(max(0, seen.oldest / N - span.first_coded), span.coded);
    return {seen.newest < seen.oldest ? 0 : span.coded - hidden, span.first_coded + hidden, span.ids() + hidden};
}

// The exact records that it sees, in slices of 16 tokens: the sink's, then those of `now` from position `start` on.
struct Exact {
    int sink, sink_slices;
    int now, start, now_slices;

    __device__ __forceinline__ Exact(const Span &span, const Seen &seen) {
        sink = span.sink;
        sink_slices = sink >= 0 && seen.oldest < min(N, seen.newest + 1) ? SLICES : 0;
        start = max(span.now_block * N, seen.oldest / 16 * 16);
        now = span.now;
        now_slices = seen.newest < seen.oldest ? 0 : (seen.newest - start) / 16 + 1;
    }
};

// What a warp has to do: units first, first + stride, …, of which `count` are coded blocks.
struct Work {
    int sequence, kv_head, in_group, heads;  // query heads in_group … of the KV head's
    int first, stride, count;
    const Span *span;
    Seen seen;
    Coded coded;

    // Indices go through shuffles: what comes of them is then computed anew where it is wanted a second time, and takes
    // no registers in between.
    static __device__ __forceinline__ Work find(const int *spans, int span_stride, int window) {
        Work work;
        const int chunk = __shfl_sync(ALL_LANES, blockIdx.y, 0);
        work.sequence = __shfl_sync(ALL_LANES, blockIdx.z, 0);
        work.kv_head = chunk / CHUNKS, work.in_group = chunk % CHUNKS * HEADS;
        work.heads = min(HEADS, GROUP - work.in_group);
        work.span = &span_at(spans, span_stride, work.sequence);
        work.seen = seen_by(*work.span, window);
        work.coded = coded_of(*work.span, work.seen);
        work.stride = gridDim.x * WARPS;
        work.first = blockIdx.x + gridDim.x * __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
        const int beyond = (ALL_EXACT ? 0 : work.coded.count) - work.first;
        work.count = beyond > 0 ? (beyond - 1) / work.stride + 1 : 0;
        return work;
    }

    // Of the CTA's first head, counted over all sequences.
    __device__ __forceinline__ long long head(int kv_heads) const {
        return (static_cast<long long>(sequence) * kv_heads + kv_head) * GROUP + in_group;
    }
};

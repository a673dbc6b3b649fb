// Shapes of decode_attention.cu, and what a query token sees and a warp has to do. Part of that file.

constexpr int D = KeyLayout::D, DP = KeyLayout::DP, N = KeyLayout::N, PART = KeyLayout::PART, PARTS = KeyLayout::PARTS;
constexpr int PT = KeyLayout::PT, STEPS = KeyLayout::STEPS, TILES = KeyLayout::TILES;
// Columns of a CTA, of which the last may have less. Of several rows there are as many CTAs as the launch wants.
constexpr int CHUNKS = (GROUP + 7) / 8, HEADS = STEP_ROWS > 1 ? 8 : (GROUP + CHUNKS - 1) / CHUNKS;
constexpr int SLICES = N / 16;                                                  // of a record

// QuantizedBlocks blocks that need no decoding are slices like the full-precision records.
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

// Positions that the query tokens of a CTA see, whichever of them does: none where newest < oldest.
struct Seen {
    int oldest, newest;
};

#if STEP_ROWS > 1
// Positions of a CTA's first and last query token, and of those of the lane's columns, 2tg and 2tg + 1.
struct Sight {
    int first, last, own[2], window;

    __device__ __forceinline__ bool all(int start, int end) const {
        return end <= first && (window == 0 || start > last - window);
    }
    __device__ __forceinline__ bool sees(int column, int token) const {
        return token <= own[column] && (window == 0 || token > own[column] - window);
    }
};
#else
using Sight = Seen;  // there is one query token
#endif

// The quantized blocks with tokens that they see: `count` from block `number` of the sequence on. Of one query token
// only the first can have tokens that it does not see.
struct QuantizedBlocks {
    int count, number;
    const int *ids;
};

__device__ __forceinline__ QuantizedBlocks quantized_of(const Span &span, const Seen &seen) {
    const int hidden = min(max(0, seen.oldest / N - span.first_quantized), span.quantized);
    const int count = seen.newest < seen.oldest ? 0 : span.quantized - hidden;
    return {count, span.first_quantized + hidden, span.ids() + hidden};
}

// The full-precision records that they see, in slices of 16 tokens: the sink's, then those of `current` from position
// `start` on.
struct FullBlocks {
    int sink, sink_slices;
    int current, start, current_slices;
    int next, next_start;  // of several rows: the record behind `current`, and the position of its first token

    __device__ __forceinline__ FullBlocks(const Span &span, const Seen &seen) {
        sink = span.sink;
        sink_slices = sink >= 0 && seen.oldest < min(N, seen.newest + 1) ? SLICES : 0;
        start = max(span.current_block * N, seen.oldest / 16 * 16);
        current = span.current, next = span.next, next_start = (span.current_block + 1) * N;
        current_slices = seen.newest < seen.oldest ? 0 : (seen.newest - start) / 16 + 1;
    }
};

// What a warp has to do: units first, first + stride, …, of which `count` are quantized blocks.
struct Work {
    int sequence, kv_head, column, columns;  // column c of a KV head is head c % GROUP of its group, of row c / GROUP
    int first, stride, count;
    const Span *span;
    Seen seen;
    QuantizedBlocks quantized;

    // Indices go through shuffles: what comes of them is then computed anew where it is wanted a second time, and takes
    // no registers in between.
    static __device__ __forceinline__ Work find(const int *spans, int span_stride, int kv_heads, int window) {
        Work work;
        const int chunk = __shfl_sync(ALL_LANES, blockIdx.y, 0), chunks = STEP_ROWS > 1 ? gridDim.y / kv_heads : CHUNKS;
        work.sequence = __shfl_sync(ALL_LANES, blockIdx.z, 0);
        work.kv_head = chunk / chunks, work.column = chunk % chunks * HEADS;
        work.span = &span_at(spans, span_stride, work.sequence);
        work.columns = min(HEADS, (STEP_ROWS > 1 ? work.span->rows : 1) * GROUP - work.column);
        const int oldest = work.position(0) - window + 1;
        const int newest = work.position(STEP_ROWS > 1 ? work.columns - 1 : 0);
        work.seen = {window > 0 ? max(0, oldest) : 0, newest};
        work.quantized = quantized_of(*work.span, work.seen);
        work.stride = gridDim.x * WARPS;
        work.first = blockIdx.x + gridDim.x * __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
        const int beyond = (ALL_EXACT ? 0 : work.quantized.count) - work.first;
        work.count = beyond > 0 ? (beyond - 1) / work.stride + 1 : 0;
        return work;
    }

    // Of the query token of column `c` of the CTA. A sequence without rows has −1.
    __device__ __forceinline__ int position(int c) const {
        return span->position + (STEP_ROWS > 1 ? (column + c) / GROUP : span->rows - 1);
    }

    // The vector of column `c` of the CTA, counted over all rows and query heads.
    __device__ __forceinline__ long long vector(int c, int kv_heads) const {
        if constexpr (STEP_ROWS > 1) {
            const long long row = span->first_row + (column + c) / GROUP;
            return (row * kv_heads + kv_head) * GROUP + (column + c) % GROUP;
        }
        return (static_cast<long long>(sequence) * kv_heads + kv_head) * GROUP + column + c;
    }

    __device__ __forceinline__ Sight sight(int window, int lane) const {
#if STEP_ROWS > 1
        const int own = 2 * (lane & 3);
        return {position(0), seen.newest, {position(own), position(own + 1)}, window};
#else
        return seen;
#endif
    }
};

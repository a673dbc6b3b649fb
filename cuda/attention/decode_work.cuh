// Shapes of decode_attention.cu, the tokens that a query sees, and the work of a warp. Part of that file.

// HEADS: columns of a CTA; the last one of a KV head may have fewer. For several rows the launch chooses the CTAs.
constexpr int CHUNKS = (GROUP + 7) / 8, HEADS = STEP_ROWS > 1 ? 8 : (GROUP + CHUNKS - 1) / CHUNKS;
constexpr int SLICES = N / 16;  // of a record

// Then all blocks are read in slices, as no block needs decoding.
constexpr bool ALL_FULL = KEYS_ARE_FULL && VALUES_ARE_FULL;

// The sum over warps takes the place of the tables: acc [WARPS][HEADS][MERGE_ROW], max and sum [WARPS][HEADS][2].
constexpr int MERGE_ROW = DP + 4;  // padded, so that the lanes of a store of two channels hit different banks
constexpr int MERGE_BYTES = WARPS * HEADS * (MERGE_ROW + 2) * 4;
// Behind the tables: q · mean of 16 blocks, [WARPS][16][8 heads].
constexpr int MEAN_BYTES = KeyLayout::MEAN_BITS ? WARPS * 16 * 8 * 4 : 0;
constexpr int LOOP_BYTES = Tables::BYTES + MEAN_BYTES;
constexpr int SHARED_BYTES = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;

// Positions that any query token of a CTA sees; none where newest < oldest.
struct Visible {
    int oldest, newest;
};

#if STEP_ROWS > 1
// Positions of a CTA's first and last query token, and of the query tokens of the lane's columns, 2tg and 2tg + 1.
struct Mask {
    int first, last, own[2], window;

    __device__ __forceinline__ bool sees_all(int start, int end) const {
        return end <= first && (window == 0 || start > last - window);
    }
    __device__ __forceinline__ bool sees(int column, int token) const {
        return token <= own[column] && (window == 0 || token > own[column] - window);
    }
};
#else
using Mask = Visible;  // one query token
#endif

// The quantized blocks with visible tokens: `count` from block `number` of the sequence on. For one query token, only
// the first of them can have tokens outside the window.
struct QuantizedBlocks {
    int count, number;
    const int *ids;
};

__device__ __forceinline__ QuantizedBlocks visible_quantized(const Span &span, const Visible &visible) {
    const int skipped = min(max(0, visible.oldest / N - span.first_quantized), span.quantized);
    const int count = visible.newest < visible.oldest ? 0 : span.quantized - skipped;
    return {count, span.first_quantized + skipped, span.ids() + skipped};
}

// The full-precision records with visible tokens, in slices of 16 tokens: the sink's, then those of `current` from
// position `start` on.
struct FullBlocks {
    int sink, sink_slices;
    int current, start, current_slices;
    int next, next_start;  // for several rows: the record behind `current`, and the position of its first token

    __device__ __forceinline__ FullBlocks(const Span &span, const Visible &visible) {
        sink = span.sink;
        sink_slices = sink >= 0 && visible.oldest < min(N, visible.newest + 1) ? SLICES : 0;
        start = max(span.current_block * N, visible.oldest / 16 * 16);
        current = span.current, next = span.next, next_start = (span.current_block + 1) * N;
        current_slices = visible.newest < visible.oldest ? 0 : (visible.newest - start) / 16 + 1;
    }
};

// The work of a warp: units first, first + stride, …, of which `count` are quantized blocks.
struct Work {
    int sequence, kv_head, column, columns;  // column c of a KV head is head c % GROUP of its group, of row c / GROUP
    int first, stride, count;
    const Span *span;
    Visible visible;
    QuantizedBlocks quantized;

    // Indices go through shuffles, so that the compiler cannot merge the two calls of this function: the second one
    // computes everything again, and no registers hold it in between.
    static __device__ __forceinline__ Work find(const int *spans, int span_stride, int kv_heads, int window) {
        Work work;
        const int chunk = __shfl_sync(ALL_LANES, blockIdx.y, 0), chunks = STEP_ROWS > 1 ? gridDim.y / kv_heads : CHUNKS;
        work.sequence = __shfl_sync(ALL_LANES, blockIdx.z, 0);
        work.kv_head = chunk / chunks, work.column = chunk % chunks * HEADS;
        work.span = &span_at(spans, span_stride, work.sequence);
        work.columns = min(HEADS, (STEP_ROWS > 1 ? work.span->rows : 1) * GROUP - work.column);
        const int oldest = work.position(0) - window + 1;
        const int newest = work.position(STEP_ROWS > 1 ? work.columns - 1 : 0);
        work.visible = {window > 0 ? max(0, oldest) : 0, newest};
        work.quantized = visible_quantized(*work.span, work.visible);
        work.stride = gridDim.x * WARPS;
        work.first = blockIdx.x + gridDim.x * __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
        const int beyond = (ALL_FULL ? 0 : work.quantized.count) - work.first;
        work.count = beyond > 0 ? (beyond - 1) / work.stride + 1 : 0;
        return work;
    }

    // Position of the query token of column `c` of the CTA; −1 for a sequence without rows.
    __device__ __forceinline__ int position(int c) const {
        return span->position + (STEP_ROWS > 1 ? (column + c) / GROUP : span->rows - 1);
    }

    // Number of the query vector of column `c` of the CTA, counted over all rows and query heads.
    __device__ __forceinline__ long long vector(int c, int kv_heads) const {
        if constexpr (STEP_ROWS > 1) {
            const long long row = span->first_row + (column + c) / GROUP;
            return (row * kv_heads + kv_head) * GROUP + (column + c) % GROUP;
        }
        return (static_cast<long long>(sequence) * kv_heads + kv_head) * GROUP + column + c;
    }

    __device__ __forceinline__ Mask mask(int window, int lane) const {
#if STEP_ROWS > 1
        const int own = 2 * (lane & 3);
        return {position(0), visible.newest, {position(own), position(own + 1)}, window};
#else
        return visible;
#endif
    }
};

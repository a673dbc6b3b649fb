// Shared memory of decode_attention.cu, the tokens that a query sees, and the work of a warp. Part of that file.

// The sum over warps takes the place of the tables: acc [WARPS][HEADS][MERGE_ROW], max and sum [WARPS][HEADS][2].
constexpr int MERGE_ROW = DP + 4;  // padded, so that the lanes of a store of two channels hit different banks
constexpr int MERGE_BYTES = WARPS * HEADS * (MERGE_ROW + 2) * 4;
// Behind the tables: q · mean of 16 blocks, [WARPS][16][8 heads].
constexpr int MEAN_BYTES = KeyLayout::MEAN_BITS ? WARPS * 16 * 8 * 4 : 0;
constexpr int LOOP_BYTES = Tables::BYTES + MEAN_BYTES;
constexpr int LEAST_SHARED = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;
#ifdef TWO_KINDS
static_assert(SHARED >= LEAST_SHARED && SHARED % 16 == 0, "as named above: of the kind with larger tables");
#else
static_assert(SHARED == LEAST_SHARED && SHARED % 16 == 0, "as named above");
#endif

#if STEP_ROWS > 1
// Positions of a cell's first and last query token, and of the query tokens of the lane's columns, 2tg and 2tg + 1.
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

// The columns of a cell.
struct CellColumns {
    int sequence, kv_head, column, count;
    int cell;  // its number in a launch where every sequence has `chunks` cells of a KV head
    const Span *span;

    __device__ __forceinline__ CellColumns(const Plan &plan, int sequence, int number, int chunks)
        : sequence(sequence), span(&plan.span(sequence)) {
        const int own_chunks = chunks_of(*span);
        kv_head = number / own_chunks, column = number % own_chunks * HEADS;
        count = min(HEADS, (STEP_ROWS > 1 ? span->rows : 1) * GROUP - column);
        cell = sequence * plan.kv_heads * chunks + number;
    }

    // The query head of column `c`.
    __device__ __forceinline__ int head(int c) const { return kv_head * GROUP + (column + c) % GROUP; }

    // Number of the query vector of column `c`, counted over all rows and query heads.
    __device__ __forceinline__ int vector(int c, int kv_heads) const {
        if constexpr (STEP_ROWS > 1) {
            const int row = span->first_row + (column + c) / GROUP;
            return (row * kv_heads + kv_head) * GROUP + (column + c) % GROUP;
        }
        return (sequence * kv_heads + kv_head) * GROUP + column + c;
    }
};

// What a warp does at a time: the next units of its share that belong to one cell.
struct Work {
    CellColumns columns;
    int first, units;  // the cell's
    int count;         // quantized blocks among these units, which come first
    Visible visible;
    QuantizedBlocks quantized;

    // The warp's turn. Every call computes everything again, so that no registers hold it in between.
    static __device__ __forceinline__ Work find(const Plan &plan, int chunks) {
        const Turn &turn = plan.turns[thread_read_anew() / 32];
        const CellColumns columns(plan, turn.sequence, turn.number, chunks);
        const Visible visible(*columns.span, plan.window);
        const QuantizedBlocks quantized(*columns.span, visible);
        const int first = turn.first, units = turn.units;
        return {columns, first, units, ALL_FULL ? 0 : max(0, min(units, quantized.count - first)), visible, quantized};
    }

    // Position after the last of these quantized blocks.
    __device__ __forceinline__ int end() const { return (quantized.number + first + count) * N; }

    // Position of the query token of column `c` of the cell.
    __device__ __forceinline__ int position(int c) const {
        return columns.span->position + (STEP_ROWS > 1 ? (columns.column + c) / GROUP : 0);
    }

    __device__ __forceinline__ Mask mask(int window, int lane) const {
#if STEP_ROWS > 1
        const int own = 2 * (lane & 3);
        return {position(0), position(columns.count - 1), {position(own), position(own + 1)}, window};
#else
        return visible;
#endif
    }
};

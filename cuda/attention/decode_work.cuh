// Shared memory of decode_attention.cu, the tokens that a query sees, the work of a warp, its masks, and its running
// softmax. Part of that file.

// The sum over warps takes the place of the tables: acc [WARPS][HEADS][MERGE_ROW], max and sum [WARPS][HEADS][2].
constexpr int MERGE_ROW = DP + 4;  // padded, so that the lanes of a store of two channels hit different banks
constexpr int MERGE_BYTES = WARPS * HEADS * (MERGE_ROW + 2) * 4;
// Behind the tables: q · mean of 16 blocks, [WARPS][16][8 heads].
constexpr int MEAN_BYTES = KeyLayout::MEAN_BITS ? WARPS * 16 * 8 * 4 : 0;
constexpr int LOOP_BYTES = Tables::BYTES + MEAN_BYTES;
constexpr int LEAST_SHARED = LOOP_BYTES > MERGE_BYTES ? LOOP_BYTES : MERGE_BYTES;
static_assert(SHARED == LEAST_SHARED && SHARED % 16 == 0, "as named above");

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

// The columns, of a lane's two in a product, that may be query heads.
constexpr int OWN_COLUMNS = HEADS > 1 ? 2 : 1;

// A lane's part of the queries of a warp's columns, on its way; lane 4g + tg: channels 8i + 2tg + {0, 1} of column g.
struct Queries {
    float2 own[2 * STEPS];

    // vector: q of column g, if it exists; else zeros.
    __device__ __forceinline__ void load(const float *vector, bool is_there, int lane) {
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            const int channel = 8 * i + 2 * (lane & 3);
            own[i] = make_float2(0.0f, 0.0f);
            if (is_there && channel < D) own[i] = *reinterpret_cast<const float2 *>(vector + channel);
        }
    }
};

// Queries and online softmax of a warp's columns; lane 4g + tg has columns 2tg, 2tg + 1 in top, sum and acc.
struct ColumnState {
    unsigned q[STEPS][2];                        // qᵀ: channels 16s + 2tg + {0, 1} and + {8, 9} of column g
    float acc[STEPS][4];                         // Oᵀ: [j][2h + c] is channel 16j + 2g + h of column 2tg + c
    float top[OWN_COLUMNS], sum[OWN_COLUMNS];    // maximum; sum over this lane's tokens, rows g and g + 8

    // Nothing has been seen. factor: scale · log₂e, so that weights are 2^score.
    __device__ __forceinline__ void start(const Queries &queries, float factor) {
#pragma unroll
        for (int c = 0; c < OWN_COLUMNS; ++c) top[c] = LOWEST, sum[c] = 0.0f;
#pragma unroll
        for (int j = 0; j < STEPS; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            const float2 x = queries.own[i];
            q[i / 2][i % 2] = halves_within(x.x * factor, x.y * factor);
        }
    }

    // Turns the scores of 16 · COUNT tokens into weights, and scales acc and sum to the new maximum.
    template <int COUNT>
    __device__ __forceinline__ void absorb(float (&scores)[COUNT][4]) {
        float next[OWN_COLUMNS];
        bool grows = false;
#pragma unroll
        for (int c = 0; c < OWN_COLUMNS; ++c) {
            next[c] = top[c];
#pragma unroll
            for (int i = 0; i < COUNT; ++i) next[c] = fmaxf(next[c], fmaxf(scores[i][c], scores[i][c + 2]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                next[c] = fmaxf(next[c], __shfl_xor_sync(ALL_LANES, next[c], step));
            grows |= next[c] > top[c];
        }
        if (__any_sync(ALL_LANES, grows)) {  // rare after the first blocks
#pragma unroll
            for (int c = 0; c < OWN_COLUMNS; ++c) {
                const float rescale = exp2_fast(top[c] - next[c]);
                sum[c] *= rescale;
                top[c] = next[c];
#pragma unroll
                for (int j = 0; j < STEPS; ++j) acc[j][c] *= rescale, acc[j][c + 2] *= rescale;
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (c % 2 >= OWN_COLUMNS) {
                    scores[i][c] = 0.0f;
                    continue;
                }
                scores[i][c] = exp2_fast(scores[i][c] - top[c % 2]);
                sum[c % 2] += scores[i][c];
            }
    }
};

// Scores [i][·] belong to tokens `start` + 16i + g and + 8: invisible tokens get −inf.
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&scores)[COUNT][4], int start, const Visible &visible, int lane) {
    if (start >= visible.oldest && start + 16 * COUNT - 1 <= visible.newest) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = start + 16 * i + 8 * h + (lane >> 2);
            if (token < visible.oldest || token > visible.newest)
                scores[i][2 * h] = scores[i][2 * h + 1] = NEGATIVE_INFINITY;
        }
}

#if STEP_ROWS > 1
// The same, where each column has its own visible tokens.
template <int COUNT>
__device__ __forceinline__ void mask_scores(float (&scores)[COUNT][4], int start, const Mask &mask, int lane) {
    if (mask.sees_all(start, start + 16 * COUNT - 1)) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int token = start + 16 * i + c / 2 * 8 + (lane >> 2);
            if (!mask.sees(c % 2, token)) scores[i][c] = NEGATIVE_INFINITY;
        }
}

// The window over the quantized blocks of a warp's turn: hides, for each of the lane's columns, the first tokens of
// part `number` of the block after which there are `left` − 1 others. No quantized block has tokens after a query.
struct BlockMask {
    int oldest[2], window;  // oldest visible position, counted from the end of the last block

    __device__ __forceinline__ BlockMask(const Plan &, const Work &work, const Mask &mask) : window(mask.window) {
#pragma unroll
        for (int c = 0; c < 2; ++c) oldest[c] = mask.own[c] - mask.window + 1 - work.end();
    }
    __device__ __forceinline__ void apply(float (&scores)[PT][4], int left, int number, int lane) const {
        const int start = number * PART - left * N;
        if (window == 0 || max(oldest[0], oldest[1]) <= start) return;
#pragma unroll
        for (int i = 0; i < PT; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (start + 16 * i + c / 2 * 8 + (lane >> 2) < oldest[c % 2]) scores[i][c] = NEGATIVE_INFINITY;
    }
};
#else
// The window over the quantized blocks of a warp's turn: hides the first tokens of part `number` of the block after
// which there are `left` − 1 others.
struct BlockMask {
    const Plan &plan;  // the oldest visible position is in the warp's turn: a register less in the loop

    __device__ __forceinline__ BlockMask(const Plan &plan, const Work &, const Mask &) : plan(plan) {}
    __device__ __forceinline__ void apply(float (&scores)[PT][4], int left, int number, int lane) const {
        if (plan.window == 0) return;
        const int start = number * PART - left * N;
        mask_scores(scores, start, {plan.turns[thread_read_anew() / 32].oldest, start + PART}, lane);
    }
};
#endif

// The B operand Pᵀ: weights of 16 tokens, times `low` for row g and `high` for row g + 8.
__device__ __forceinline__ void weights_operand(unsigned (&p)[2], const float (&weights)[4], float low, float high) {
    p[0] = movmatrix_transposed(as_bits(__floats2half2_rn(weights[0] * low, weights[1] * low)));
    p[1] = movmatrix_transposed(as_bits(__floats2half2_rn(weights[2] * high, weights[3] * high)));
}

// The rows of a warp of prefill_wgmma.cu, 16 of the 64 of its warpgroup: queries, scores, online softmax. Part of that
// file.

// The numbers of 16 that a thread has at columns 2tg, 2tg + 1 (r = 0) and 2tg + 8, 2tg + 9 (r = 1) of pieces: spread()
// and the one after it.
__device__ __forceinline__ constexpr int spread(int tg, int r) { return tg / 2 * 2 + tg % 2 * 8 + r * 4; }

// Row i is token (first + i) / GROUP of the launch; rows after `last` repeat the last one.
struct Rows {
    int first, last;  // of all T · GROUP rows of the KV head
    int position;     // of token 0

    __device__ int row(int i) const { return min(first + i, last); }
    __device__ int at(int i) const { return position + row(i) / GROUP; }
};

// The rows' queries as A operands.
struct Queries {
    unsigned a[STEPS][4];

    // q: the KV head's first query of token 0. factor: scale · log₂e, so that weights are 2^score.
    __device__ __forceinline__ Queries(const float *q, long long q_stride, const Rows &rows, float factor, int lane) {
        const int g = lane / 4, tg = lane % 4, low = rows.row(g), high = rows.row(g + 8);
        const float *const x[2] = {q + low / GROUP * q_stride + low % GROUP * D,
                                   q + high / GROUP * q_stride + high % GROUP * D};
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float2 v = *reinterpret_cast<const float2 *>(x[r % 2] + 16 * s + spread(tg, r / 2));
                a[s][r] = as_bits(__floats2half2_rn(v.x * factor, v.y * factor));
            }
    }
};

// Scores of a part: [8i + 4r + 2h + c] is of row g + 8h, token 16i + spread(tg, r) + c.
using Scores = float[PART / 2];

// The online softmax of a warp's rows.
struct RowState {
    float acc[D / 2];        // [4j + 2h + c]: row g + 8h, channel 8j + 2tg + c
    float top[2], sum[2];    // of rows g and g + 8; sums are of this thread's tokens
    float rescale[2];        // what acc is to be multiplied by, if it `rises`
    bool rises;
    unsigned weights[PT][4];  // of the part at hand, A operands

    __device__ __forceinline__ RowState() {
        top[0] = top[1] = LOWEST;
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < D / 2; ++i) acc[i] = 0.0f;
#pragma unroll
        for (int u = 0; u < PT; ++u)
#pragma unroll
            for (int r = 0; r < 4; ++r) weights[u][r] = 0;
    }

    // Makes weights of a part's scores, of tokens that a row sees, and adds them up. start: the part's first position.
    __device__ __forceinline__ void weigh(Scores &scores, const Rows &rows, int start, int window, int lane) {
        if constexpr (CAPPED) {
#pragma unroll
            for (int i = 0; i < PART / 2; ++i) scores[i] = capped(scores[i]);
        }
        if (start + PART - 1 > rows.at(0) || (window > 0 && start <= rows.at(15) - window))
            mask(scores, rows, start, window, lane);
        float next[2] = {top[0], top[1]};
#pragma unroll
        for (int i = 0; i < PART / 2; ++i) next[i / 2 % 2] = fmaxf(next[i / 2 % 2], scores[i]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            next[h] = fmaxf(next[h], __shfl_xor_sync(ALL_LANES, next[h], 1));
            next[h] = fmaxf(next[h], __shfl_xor_sync(ALL_LANES, next[h], 2));
            rescale[h] = exp2_fast(top[h] - next[h]);
            sum[h] *= rescale[h];
        }
        rises = __any_sync(ALL_LANES, next[0] > top[0] || next[1] > top[1]);  // rare after the first parts
        top[0] = next[0], top[1] = next[1];
#pragma unroll
        for (int i = 0; i < PART / 2; ++i) {
            scores[i] = exp2_fast(scores[i] - top[i / 2 % 2]);
            sum[i / 2 % 2] += scores[i];
        }
    }

    static __device__ __forceinline__ void mask(Scores &scores, const Rows &rows, int start, int window, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int newest = rows.at(lane / 4 + 8 * h) - start;
            const int oldest = window > 0 ? newest - window + 1 : -start;
#pragma unroll
            for (int i = 0; i < PT; ++i)
#pragma unroll
                for (int r = 0; r < 2; ++r)
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int token = 16 * i + spread(lane % 4, r) + c;
                        if (token > newest || token < oldest) scores[8 * i + 4 * r + 2 * h + c] = NEGATIVE_INFINITY;
                    }
        }
    }

    // Takes the weights of the next product with values; those of the last one have been multiplied.
    __device__ __forceinline__ void take(const Scores &scores) {
        if (rises) {
#pragma unroll
            for (int i = 0; i < D / 2; ++i) acc[i] *= rescale[i / 2 % 2];
        }
#pragma unroll
        for (int u = 0; u < PT; ++u)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                weights[u][r] = as_bits(__floats2half2_rn(scores[8 * u + 2 * r], scores[8 * u + 2 * r + 1]));
    }

    // Starts acc += weights · values.
    __device__ __forceinline__ void add_values(const unsigned char *values) {
#pragma unroll
        for (int u = 0; u < PT; ++u) wgmma_m64k16<true>(acc, weights[u], operand_of(values, u));
    }

    __device__ __forceinline__ void wait_for_values() {
        wgmma_wait<0>();
        keep_here(acc);
        keep_here(weights);
    }

    // Writes the rows. out: the KV head's first vector of token 0. scale: a factor of all results. sink_scores: of the
    // KV head's query heads.
    __device__ __forceinline__ void write(float *out, int heads, const Rows &rows, float scale,
                                          const float *sink_scores, int lane) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float row_sum = sum[h];
            row_sum += __shfl_xor_sync(ALL_LANES, row_sum, 1);
            row_sum += __shfl_xor_sync(ALL_LANES, row_sum, 2);
            const int row = rows.first + 8 * h + lane / 4;
            if (row > rows.last) continue;
            float *const to = out + ((long long)(row / GROUP) * heads + row % GROUP) * D + lane % 4 * 2;
            float factor = scale / row_sum;
            if constexpr (SINK_SCORES) factor = scale * share_beside(sink_scores[row % GROUP], top[h], row_sum);
#pragma unroll
            for (int j = 0; j < D / 8; ++j)
                *reinterpret_cast<float2 *>(to + 8 * j) =
                    make_float2(acc[4 * j + 2 * h] * factor, acc[4 * j + 2 * h + 1] * factor);
        }
    }
};

// Before products of these registers.
__device__ __forceinline__ void begin(Queries &queries, RowState &state, Scores &scores) {
    keep_here(queries.a);
    keep_here(state.acc);
    keep_here(state.weights);
    keep_here(scores);
    wgmma_fence();
}

// Starts the product of a part's keys and the queries.
__device__ __forceinline__ void score(Scores &scores, const Queries &queries, const unsigned char *keys) {
    wgmma_m64k16<false>(scores, queries.a[0], operand_of(keys, 0));
#pragma unroll
    for (int s = 1; s < STEPS; ++s)
        wgmma_m64k16<true>(scores, queries.a[s], operand_of(keys + s / 4 * PART * COLUMN_BYTES, s % 4));
}

// Waits for all groups of products but `GROUPS_LEFT`; `scores` are of one that has ended.
template <int GROUPS_LEFT>
__device__ __forceinline__ void wait(Scores &scores) {
    wgmma_wait<GROUPS_LEFT>();
    keep_here(scores);
}

// The running softmax of a warp of decode_attention.cu, and its masks. Part of that file.

// Queries and online softmax of a warp's columns; lane 4g + tg has columns 2tg, 2tg + 1 in top, sum and acc.
struct ColumnState {
    unsigned q[STEPS][2];                        // qᵀ: channels 16s + 2tg + {0, 1} and + {8, 9} of column g
    float acc[STEPS][4] = {};                    // Oᵀ: [j][2h + c] is channel 16j + 2g + h of column 2tg + c
    float top[2] = {LOWEST, LOWEST}, sum[2] = {};  // maximum; sum over this lane's tokens, rows g and g + 8

    // vector: q of column g, if it exists; factor: scale · log₂e, so that weights are 2^score.
    __device__ __forceinline__ ColumnState(const float *vector, bool is_there, float factor, int lane) {
        const int tg = lane & 3;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            const int channel = 8 * i + 2 * tg;
            float2 x = make_float2(0.0f, 0.0f);
            if (is_there && channel < D) x = *reinterpret_cast<const float2 *>(vector + channel);
            q[i / 2][i % 2] = as_bits(__floats2half2_rn(x.x * factor, x.y * factor));
        }
    }

    // Turns the scores of 16 · COUNT tokens into weights, and scales acc and sum to the new maximum.
    template <int COUNT>
    __device__ __forceinline__ void absorb(float (&scores)[COUNT][4]) {
        float next[2] = {top[0], top[1]};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) next[c] = fmaxf(next[c], fmaxf(scores[i][c], scores[i][c + 2]));
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                next[c] = fmaxf(next[c], __shfl_xor_sync(ALL_LANES, next[c], step));
        }
        if (__any_sync(ALL_LANES, next[0] > top[0] || next[1] > top[1])) {  // rare after the first blocks
            const float rescale[2] = {exp2_fast(top[0] - next[0]), exp2_fast(top[1] - next[1])};
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                sum[c] *= rescale[c];
                top[c] = next[c];
#pragma unroll
                for (int j = 0; j < STEPS; ++j) acc[j][c] *= rescale[c], acc[j][c + 2] *= rescale[c];
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                scores[i][c] = exp2_fast(scores[i][c] - top[c & 1]);
                sum[c & 1] += scores[i][c];
            }
    }
};

// Scores [i][·] are of tokens `start` + 16i + g and + 8: sets those of invisible tokens to −inf.
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

// The window over a warp's quantized blocks: hides, for each of the lane's columns, the first `tokens` tokens from the
// next part on. No quantized block has tokens behind a query token.
struct BlockMask {
    int tokens[2];

    __device__ __forceinline__ BlockMask(const Work &work, const Mask &mask) {
        const int start = (work.quantized.number + work.first) * N;
#pragma unroll
        for (int c = 0; c < 2; ++c) tokens[c] = mask.window > 0 ? mask.own[c] - mask.window + 1 - start : 0;
    }
    __device__ __forceinline__ void apply(float (&scores)[PT][4], int lane) const {
        if (max(tokens[0], tokens[1]) <= 0) return;
#pragma unroll
        for (int i = 0; i < PT; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (16 * i + c / 2 * 8 + (lane >> 2) < tokens[c % 2]) scores[i][c] = NEGATIVE_INFINITY;
    }
    __device__ __forceinline__ void advance(bool is_last, int stride) {
#pragma unroll
        for (int c = 0; c < 2; ++c) tokens[c] -= PART + (is_last ? (stride - 1) * N : 0);
    }
};
#else
// The window over a warp's quantized blocks: hides the first `tokens` tokens of the block from the next part on.
struct BlockMask {
    int tokens;

    __device__ __forceinline__ BlockMask(const Work &work, const Mask &mask)
        : tokens(work.first ? 0 : mask.oldest - work.quantized.number * N) {}
    __device__ __forceinline__ void apply(float (&scores)[PT][4], int lane) const {
        mask_scores(scores, 0, {tokens, PART}, lane);
    }
    __device__ __forceinline__ void advance(bool is_last, int stride) { tokens = is_last ? 0 : tokens - PART; }
};
#endif

// The B operand Pᵀ: weights of 16 tokens, times `low` for row g and `high` for row g + 8.
__device__ __forceinline__ void weights_operand(unsigned (&p)[2], const float (&weights)[4], float low, float high) {
    p[0] = movmatrix_transposed(as_bits(__floats2half2_rn(weights[0] * low, weights[1] * low)));
    p[1] = movmatrix_transposed(as_bits(__floats2half2_rn(weights[2] * high, weights[3] * high)));
}

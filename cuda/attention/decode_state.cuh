// What a warp of decode_attention.cu has summed up, and how scores become weights. Part of that file.

// What one warp knows so far of its heads; lane 4g + tg has heads 2tg, 2tg + 1 in top, sum and acc.
struct State {
    unsigned q[STEPS][2];                        // qᵀ: channels 16s + 2tg + {0, 1} and + {8, 9} of head g
    float acc[STEPS][4] = {};                    // Oᵀ: [j][2h + c] is channel 16j + 2g + h of head 2tg + c
    float top[2] = {NOTHING, NOTHING}, sum[2] = {};  // maximum; sum over this lane's tokens, those of rows g, g + 8

    // vector: q of column g, where there is one; factor makes scores powers of two.
    __device__ __forceinline__ State(const float *vector, bool is_there, float factor, int lane) {
        const int tg = lane & 3;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
            const int channel = 8 * i + 2 * tg;
            float2 x = make_float2(0.0f, 0.0f);
            if (is_there && channel < D) x = *reinterpret_cast<const float2 *>(vector + channel);
            q[i / 2][i % 2] = as_bits(__floats2half2_rn(x.x * factor, x.y * factor));
        }
    }

    // Scores of 16 · COUNT tokens become their weights; what was there before is scaled to the new maximum.
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
        if (__any_sync(ALL_LANES, next[0] > top[0] || next[1] > top[1])) {  // seldom after the first blocks
            const float fade[2] = {exp2_fast(top[0] - next[0]), exp2_fast(top[1] - next[1])};
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                sum[c] *= fade[c];
                top[c] = next[c];
#pragma unroll
                for (int j = 0; j < STEPS; ++j) acc[j][c] *= fade[c], acc[j][c + 2] *= fade[c];
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

// Scores of tokens `start` + 16i + g and + 8 that are not seen become −inf.
template <int COUNT>
__device__ __forceinline__ void hide(float (&scores)[COUNT][4], int start, const Seen &seen, int lane) {
    if (start >= seen.oldest && start + 16 * COUNT - 1 <= seen.newest) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = start + 16 * i + 8 * h + (lane >> 2);
            if (token < seen.oldest || token > seen.newest)
                scores[i][2 * h] = scores[i][2 * h + 1] = __int_as_float(0xff800000);
        }
}

#if STEP_ROWS > 1
// The same where every column sees tokens of its own.
template <int COUNT>
__device__ __forceinline__ void hide(float (&scores)[COUNT][4], int start, const Sight &sight, int lane) {
    if (sight.all(start, start + 16 * COUNT - 1)) return;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int token = start + 16 * i + c / 2 * 8 + (lane >> 2);
            if (!sight.sees(c % 2, token)) scores[i][c] = __int_as_float(0xff800000);
        }
}

// What of a warp's quantized blocks is hidden: for each of the lane's columns, the first `tokens` from the part on that
// comes next. All quantized blocks are behind the query tokens.
struct Hidden {
    int tokens[2];

    __device__ __forceinline__ Hidden(const Work &work, const Sight &sight) {
        const int start = (work.quantized.number + work.first) * N;
#pragma unroll
        for (int c = 0; c < 2; ++c) tokens[c] = sight.window > 0 ? sight.own[c] - sight.window + 1 - start : 0;
    }
    __device__ __forceinline__ void hide_in(float (&scores)[PT][4], int lane) const {
        if (max(tokens[0], tokens[1]) <= 0) return;
#pragma unroll
        for (int i = 0; i < PT; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (16 * i + c / 2 * 8 + (lane >> 2) < tokens[c % 2]) scores[i][c] = __int_as_float(0xff800000);
    }
    __device__ __forceinline__ void advance(bool is_last, int stride) {
#pragma unroll
        for (int c = 0; c < 2; ++c) tokens[c] -= PART + (is_last ? (stride - 1) * N : 0);
    }
};
#else
// What of a warp's quantized blocks is hidden: the first `tokens` from the part on that comes next, in its block.
struct Hidden {
    int tokens;

    __device__ __forceinline__ Hidden(const Work &work, const Sight &sight)
        : tokens(work.first ? 0 : sight.oldest - work.quantized.number * N) {}
    __device__ __forceinline__ void hide_in(float (&scores)[PT][4], int lane) const {
        hide(scores, 0, {tokens, PART}, lane);
    }
    __device__ __forceinline__ void advance(bool is_last, int stride) { tokens = is_last ? 0 : tokens - PART; }
};
#endif

// Weights of 16 tokens, times `low` for row g and `high` for row g + 8, as the B operand Pᵀ.
__device__ __forceinline__ void weights_operand(unsigned (&p)[2], const float (&weights)[4], float low, float high) {
    p[0] = movmatrix_transposed(as_bits(__floats2half2_rn(weights[0] * low, weights[1] * low)));
    p[1] = movmatrix_transposed(as_bits(__floats2half2_rn(weights[2] * high, weights[3] * high)));
}

// Fits the norms of tokens to what errors cost, once codes are chosen. Part of encode_blocks.cu and encode_keys.cu.

// A norm, and what the errors of its token cost with it.
struct Fitted {
    float norm, cost;
};

__device__ __forceinline__ float quotient(float numerator, float denominator) {
    return denominator > 0.0f ? numerator / denominator : 1.0f;
}

// a: a token, e: its error when it was rounded with the norm `size`. aa, ae, ee: a·Ma, a·Me, e·Me; a_mean, e_mean: a·μ,
// e·μ. plain: the norm of least squares, over `size`. root: √D.
__device__ __forceinline__ Fitted tilted(float aa, float ae, float ee, float a_mean, float e_mean, float plain,
                                         float root, float size) {
    // What is read back with this size is a − e. With another one, r times as large, the error is (1 − r)·a + r·e.
    const float lean_a = (aa - a_mean * a_mean) / root + a_mean, lean_e = (ae - a_mean * e_mean) / root + e_mean;
    const float with_a = aa - ae + lean_a * (lean_a - lean_e), with_e = ae - ee + lean_e * (lean_a - lean_e);
    const float ratio = fminf(fmaxf(quotient(with_a, with_a - with_e), TILT_LOW * plain), TILT_HIGH * plain);
    const float rest = 1.0f - ratio, lean = rest * lean_a + ratio * lean_e;
    return {fmaxf(ratio * size, 0.0f), rest * (rest * aa + 2.0f * ratio * ae) + ratio * ratio * ee + lean * lean};
}

// x, points, partial, codes: `PathRounder` lists them. size: the norm that a token was rounded with.
template <class L, class Codec>
struct NormFit {
    using R = RounderMemory<L, Codec>;
    static constexpr int D = L::D, W = Codec::WIDTH, STRIDE = R::STRIDE, SHARES = R::SHARES, SUMS = R::SUMS;

    const float *x, *points;
    float *partial;
    const unsigned short *codes;
    const Cost &cost;

    // y: the point of a token's code; a: the target; v: its error if norms are tilted, else y.
    __device__ __forceinline__ void read_back(float (&y)[W], float (&v)[W], float (&a)[W], int pair, int token,
                                              float size) const {
        load_cell(y, points + codes[pair * R::CODE_STRIDE + token] * W);
        const unsigned previous_code = pair ? codes[(pair - 1) * R::CODE_STRIDE + token] : 0;
        if (previous_code & 1) y[0] = -y[0];
        if (previous_code & 2) y[1] = -y[1];
#pragma unroll
        for (int w = 0; w < W; ++w) {
            const float error = x[(pair * W + w) * STRIDE + token];
            v[w] = cost.mean ? error : y[w];
            a[w] = error + y[w] * size;
        }
    }

    // This warp's share of a·Mv, v·Mv, a·Ma and, if norms are tilted, a·mean, v·mean, a·y, y·y. M is symmetric: these
    // are sums over the entries below its diagonal and half of the diagonal, counted for both sides.
    __device__ __forceinline__ void sum_costs(float size, int share, int token) const {
        constexpr int rows = 8;
        float sums[SUMS] = {};
        for (int round = 0; round * SHARES * rows < D; ++round) {  // in alternating order: later rows are longer
            const int top = (round * SHARES + (round % 2 ? SHARES - 1 - share : share)) * rows;
            if (top >= D) continue;
            float v_m[rows] = {}, a_m[rows] = {};
#pragma unroll 1
            for (int pair = 0; pair < top / W; ++pair) {
                float y[W], v[W], a[W], m[rows];
                read_back(y, v, a, pair, token, size);
#pragma unroll
                for (int w = 0; w < W; ++w) {
                    load_floats(m, cost.matrix + (pair * W + w) * D + top);
#pragma unroll
                    for (int i = 0; i < rows; ++i) v_m[i] += m[i] * v[w], a_m[i] += m[i] * a[w];
                }
            }
#pragma unroll
            for (int pair = 0; pair < rows / W; ++pair) {
                float y[W], v[W], a[W], m[rows];
                read_back(y, v, a, top / W + pair, token, size);
#pragma unroll
                for (int w = 0; w < W; ++w) {
                    const int c = pair * W + w;
                    load_floats(m, cost.matrix + (top + c) * D + top);
                    const float v_c = v_m[c] + 0.5f * m[c] * v[w], a_c = a_m[c] + 0.5f * m[c] * a[w];
                    sums[0] += a[w] * v_c + v[w] * a_c, sums[1] += 2.0f * v[w] * v_c, sums[2] += 2.0f * a[w] * a_c;
                    const float mean = cost.mean ? cost.mean[top + c] : 0.0f;
                    sums[3] += a[w] * mean, sums[4] += v[w] * mean, sums[5] += a[w] * y[w], sums[6] += y[w] * y[w];
#pragma unroll
                    for (int i = c + 1; i < rows; ++i) v_m[i] += m[i] * v[w], a_m[i] += m[i] * a[w];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) partial[(share * SUMS + i) * TOKENS + token] = sums[i];
    }

    // From those sums: by the metric, or for the queries where norms are tilted.
    __device__ __forceinline__ Fitted operator()(float size, int t) const {
        float s[SUMS] = {};
#pragma unroll 2
        for (int c = 0; c < SHARES; ++c)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) s[i] += partial[(c * SUMS + i) * TOKENS + t];
        const float plain = quotient(s[5] * size, s[6] * size * size);
        if (cost.mean) return tilted(s[2], s[0], s[1], s[3], s[4], plain, sqrtf(float(D)), size);
        return {fmaxf(quotient(s[0] * size, s[1] * size * size) * size, 0.0f), 0.0f};
    }
};

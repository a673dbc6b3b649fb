// The op `linear` for few rows, with RMS norm before it and the residual sum after it: y = x @ weightᵀ + bias.
//
// x (rows, in), weight (out, in), bias (out) float or null; y: rows of `out` numbers, `pitch` numbers apart. With
// NORMED, x is replaced by x / rms(x) · norm, norm (in) float: every block computes 1 / rms(x) while its first weights
// are on their way. With ADD, y += instead of y =. With an ACTIVATION (GATED), weight and bias are [gate | up], 2 · out
// rows, and y is ACTIVATION(gate, up). Where the weights' Product is half, x is rounded to halves, as `narrow` rounds
// it for more rows: so the number of rows changes only the order of a sum. It is not rounded to bfloat16, whose 8 bits
// would lose more.
// SPLIT warps multiply four rows of weights by all rows of x, each warp over its own part of `in`. A warp reads each of
// its weights once, 16 bytes per lane at a time, and keeps the next 4 · DEPTH loads in flight while it multiplies. The
// rows are neighbours; with GATED, two rows of gate and the matching rows of up.
// Grid (ceil(rows of weights · SPLIT / 32)), block 256. With EXPERTS (0 or 1, default 0) it has pairs in z, and more
// arguments: chosen_expert.cuh.
// DEFINES: WEIGHT (a weight format), ROWS (most rows), NORMED (0 or 1), ADD (0 or 1), SPLIT (1, 2, 4, 8), ACTIVATION (a
// function of activation.cuh, or not defined).
// JOINS: activation.cuh, inverse_rms.cuh, chosen_expert.cuh.
// Cost: bytes of the weights, 2 KB · DEPTH per warp in flight; 1 FMA per weight and row. x is read from L1, one load
// for four weights.
// PRECOND: 1 <= rows <= ROWS <= 4; in % 8 == 0; x, weight, norm aligned to 16 bytes.

constexpr int DEPTH = ROWS > 1 ? 2 : EXPERTS ? 3 : 4;  // as registers allow
constexpr int WARPS = 8, OUTPUTS = 4, STEP = 32 * 8 * SPLIT;
constexpr int COLUMNS = GATED ? OUTPUTS / 2 : OUTPUTS;  // columns of y that a warp has

// Rounds as tensor cores take their operands.
__device__ __forceinline__ void round_inputs(float (&v)[8], __half) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const unsigned word = halves_within(v[j], v[j + 1]);
        v[j] = __half2float(__ushort_as_half(word & 0xffffu));
        v[j + 1] = __half2float(__ushort_as_half(word >> 16));
    }
}
__device__ __forceinline__ void round_inputs(float (&)[8], __nv_bfloat16) {}

// Adds the products of inputs i … i + 7 of every row with their weights. factors: 1 / rms of each row.
__device__ __forceinline__ void add_products(float (&sums)[OUTPUTS][ROWS], const float (&w)[OUTPUTS][8], const float *x,
                                             const float *norm, const float (&factors)[ROWS], int rows, int in, int i) {
#if NORMED
    float g[8];
    if (ROWS > 1) load_floats(g, norm + i);
#endif
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
        float v[8];
        load_floats(v, x + r * (long long)in + i);
#if NORMED
#pragma unroll
        for (int half = 0; half < 8; half += 4) {
            float four[4];  // with one row, 4 norm weights at a time: 8 would take registers from loads in flight
            if (ROWS == 1) load_floats(four, norm + i + half);
#pragma unroll
            for (int j = half; j < half + 4; ++j) v[j] = v[j] * factors[r] * (ROWS == 1 ? four[j - half] : g[j]);
        }
#endif
        round_inputs(v, WEIGHT::Product());
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
            for (int j = 0; j < 8; ++j) sums[o][r] += w[o][j] * v[j];
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
gemv_kernel(float *y, const float *x, const unsigned char *weight, const float *bias, const float *norm, int rows,
            int in, int out, long long pitch, float eps EXPERT_ARGUMENTS) {
    __shared__ float warp_sums[WARPS][ROWS][OUTPUTS], partial[ROWS][32];
    let_next_begin();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int first = (blockIdx.x * (WARPS / SPLIT) + warp / SPLIT) * COLUMNS;  // column of y
    const int end = first < out ? in : 0;
    const auto row_of = [&](int o) { return min(first + o % COLUMNS, out - 1) + (o < COLUMNS ? 0 : out); };
#if EXPERTS
    const int size = (GATED ? 2 : 1) * out;
    const int first_row = begin_pair(x, y, bias, experts, sharing, bias_pitch, in, size, pitch);
#else
    constexpr int first_row = 0;
#endif

    typename WEIGHT::Eight next_weights[DEPTH][OUTPUTS];
    const auto load = [&](typename WEIGHT::Eight (&to)[OUTPUTS], int i) {
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o)
            if (i < end) to[o] = WEIGHT::load8(weight, first_row + row_of(o), in, i);
    };
    float sums[OUTPUTS][ROWS] = {};
    const int start = warp % SPLIT * 32 * 8 + lane * 8;
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) load(next_weights[d], start + d * STEP);
    wait_for_previous();
    float factors[ROWS];
#pragma unroll
    for (int r = 0; NORMED && r < ROWS; ++r)
        factors[r] = r < rows ? inverse_rms(x + r * (long long)in, in, eps, partial[r]) : 0.0f;
    for (int base = start; base < end; base += DEPTH * STEP) {
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const int i = base + d * STEP;
            if (i >= end) break;
            float w[OUTPUTS][8];
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o) WEIGHT::floats(w[o], next_weights[d][o]);
            load(next_weights[d], i + DEPTH * STEP);
            add_products(sums, w, x, norm, factors, rows, in, i);
        }
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) sums[o][r] = warp_sum(sums[o][r]);
        if (lane > 0) continue;
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) warp_sums[warp][r][o] = sums[o][r];
    }
    __syncthreads();
    for (int i = lane; warp % SPLIT == 0 && i < rows * COLUMNS; i += 32) {
        const int r = i / COLUMNS, o = i % COLUMNS;
        if (first + o >= out) continue;
        const auto product = [&](int o) {
            float total = 0.0f;
#pragma unroll
            for (int part = 0; part < SPLIT; ++part) total += warp_sums[warp + part][r][o];
            return bias ? total + bias[row_of(o)] : total;
        };
        float total = product(o);
        if (GATED) total = ACTIVATION(total, product(o + COLUMNS));
        float *const at = y + r * pitch + first + o;
        *at = ADD ? *at + total : total;
    }
}

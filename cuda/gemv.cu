// y = x @ weightᵀ + bias for few rows, optionally of x normalised: the op `linear`, with `rms_norm` before it.
//
// x (rows, in), weight (out, in), bias (out) or null, y (rows, out). With NORMED, x is x / rms(x) · norm, norm (in):
// the factor 1 / rms(x) is one number per row, so a warp sums the squares on its way and multiplies the results.
// A warp makes OUTPUTS neighbouring columns of y for all rows: it reads each weight once, 16 bytes per lane at a time.
// Grid (ceil(out / (OUTPUTS · warps of a block))). DEFINES: ACT, WEIGHT, ROWS (most rows), OUTPUTS, NORMED (0 or 1).
// Cost: bytes of the weights; 1 FMA per weight and row, and x comes from the L1 cache 1 / OUTPUTS times as often.
// PRECOND: 1 <= rows <= ROWS; in % 8 == 0; x, weight, norm aligned to 16 bytes.
extern "C" __global__ void __launch_bounds__(256)
gemv_kernel(ACT *y, const ACT *x, const WEIGHT *weight, const WEIGHT *bias, const WEIGHT *norm, int rows, int in,
            int out, float eps) {
    const int lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    const int first = warp * OUTPUTS;
    if (first >= out) return;

    float sum[OUTPUTS][ROWS] = {}, squares[ROWS] = {};
#pragma unroll 2
    for (int i = lane * 8; i < in; i += 32 * 8) {
        float w[OUTPUTS][8];
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) load_floats_once(w[o], weight + (long long)min(first + o, out - 1) * in + i);
#if NORMED
        float g[8];
        load_floats(g, norm + i);
#endif
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if (r >= rows) break;
            float v[8];
            load_floats(v, x + r * (long long)in + i);
#if NORMED
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                squares[r] += v[j] * v[j];
                v[j] *= g[j];
            }
#endif
#pragma unroll
            for (int o = 0; o < OUTPUTS; ++o)
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[o][r] += w[o][j] * v[j];
        }
    }

#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        if (r >= rows) break;
        const float factor = NORMED ? rsqrtf(warp_sum(squares[r]) / in + eps) : 1.0f;
#pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const float total = warp_sum(sum[o][r]) * factor;
            if (lane == o && first + o < out)
                y[r * (long long)out + first + o] = from_float<ACT>(total + (bias ? to_float(bias[first + o]) : 0.0f));
        }
    }
}

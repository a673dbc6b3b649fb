// The op `mamba2`, last part: y = RMSNorm(y · silu(z)) · norm, where each of Q parts of a row is normalized by itself.
//
// y (T, H · D), Q parts of `size` numbers; projected: rows that begin with z, `pitch` numbers apart; norm (H · D,).
// Grid (Q, T), block any. DEFINES: none.
// JOINS: activation.cuh.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024)
mamba2_results_kernel(float *y, const float *projected, const float *norm, long long pitch, int size, float eps) {
    let_next_begin();
    wait_for_previous();
    __shared__ float partial[32];
    const int first = blockIdx.x * size;
    const float *const gate = projected + blockIdx.y * pitch + first;
    y += blockIdx.y * static_cast<long long>(gridDim.x) * size + first;
    norm += first;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        const float gated = silu(gate[i], y[i]);
        y[i] = gated;
        squares += gated * gated;
    }
    const float factor = rsqrtf(block_sum(squares, partial) / size + eps);
    for (int i = threadIdx.x; i < size; i += blockDim.x) y[i] *= factor * norm[i];
}

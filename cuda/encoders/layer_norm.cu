// The op `layer_norm`: (x − mean) / √(variance + eps) · weight + bias of every row, in place.
//
// x: rows of n numbers, `stride` numbers apart. weight, bias (n).
// Grid (rows), block any. DEFINES: none.
// Cost: reads x three times, twice from the cache.
// PRECOND: none.

extern "C" __global__ void __launch_bounds__(1024)
layer_norm_kernel(float *x, const float *weight, const float *bias, int n, long long stride, float eps) {
    __shared__ float partial_sums[32], partial_squares[32];
    x += blockIdx.x * stride;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    const float mean = block_sum(sum, partial_sums) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = rsqrtf(block_sum(squares, partial_squares) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = (x[i] - mean) * factor * weight[i] + bias[i];
}

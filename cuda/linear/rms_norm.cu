// The op `rms_norm`: y = x / rms(x) · norm for every row; with ADD, y += x / rms(x) · norm.
//
// x, y: rows of n numbers, x_stride and y_stride numbers apart; y may be x. norm (n) float.
// Grid (rows), block any. DEFINES: ADD (0 or 1).
// Cost: reads x twice, the second time from the cache.
// PRECOND: n % 8 == 0, strides % 8 == 0; x, y, norm aligned to 16 bytes.
// JOINS: inverse_rms.cuh.

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_kernel(float *y, const float *x, const float *norm, int n, long long y_stride, long long x_stride, float eps) {
    let_next_begin();
    wait_for_previous();
    __shared__ float partial[32];
    x += blockIdx.x * x_stride;
    y += blockIdx.x * y_stride;
    // Its barrier lets y be x: no thread writes before all have read for the sum.
    const float factor = inverse_rms(x, n, eps, partial);
    for (int i = threadIdx.x * 8; i < n; i += blockDim.x * 8) {
        float v[8], w[8], sum[8];
        load_floats(v, x + i);
        load_floats(w, norm + i);
        if (ADD) load_floats(sum, y + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = v[j] * factor * w[j] + (ADD ? sum[j] : 0.0f);
        store_floats(y + i, v);
    }
}

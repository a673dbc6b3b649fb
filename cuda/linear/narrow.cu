// Converts x to a 16-bit type; with NORMED, y = x / rms(x) · norm.
//
// x, y (rows, n), norm (n) float. Halves are clipped to ±65504; NaN stays.
// Grid (rows), block any. DEFINES: TO (type of y: __half or __nv_bfloat16), NORMED (0 or 1).
// PRECOND: n % 8 == 0; x, y, norm aligned to 16 bytes.
// JOINS: inverse_rms.cuh.

extern "C" __global__ void __launch_bounds__(1024)
narrow_kernel(TO *y, const float *x, const float *norm, int n, float eps) {
    let_next_begin();
    wait_for_previous();
    x += (long long)blockIdx.x * n;
    y += (long long)blockIdx.x * n;
    float factor = 1.0f;
#if NORMED
    __shared__ float partial[32];
    factor = inverse_rms(x, n, eps, partial);
#endif
    for (int i = threadIdx.x * 8; i < n; i += blockDim.x * 8) {
        float v[8];
        load_floats(v, x + i);
#if NORMED
        float w[8];
        load_floats(w, norm + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = v[j] * factor * w[j];
#endif
        store_within(y + i, v);
    }
}

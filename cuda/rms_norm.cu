// y = x / rms(x) · weight, over rows of n values.
//
// x: `heads` rows of n for each token, token t's first at x + t · x_stride. y likewise. weight (n). Strides in elements.
// Grid (T · heads), block any. DEFINES: ACT, WEIGHT.
// PRECOND: n % 8 == 0; x, y, weight aligned to 16 bytes; strides % 8 == 0; y is x, or does not overlap it.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_kernel(ACT *y, const ACT *x, const WEIGHT *weight, int n, int heads, long long y_stride, long long x_stride,
                float eps) {
    __shared__ float partial[32];
    const int token = blockIdx.x / heads, head = blockIdx.x % heads;
    x += token * x_stride + head * n;
    y += token * y_stride + head * n;

    float squares = 0.0f;
    for (int i = threadIdx.x * 8; i < n; i += blockDim.x * 8) {
        float v[8];
        load_floats(v, x + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += v[j] * v[j];
    }
    const float factor = rsqrtf(block_sum(squares, partial) / n + eps);

    for (int i = threadIdx.x * 8; i < n; i += blockDim.x * 8) {
        float v[8], w[8];
        load_floats(v, x + i);
        load_floats(w, weight + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = v[j] * factor * w[j];
        store_floats(y + i, v);
    }
}

// 1 / rms of a row, of all threads of a block: for the kernels that norm whole rows.

// x: n numbers, n % 8 == 0, aligned to 16 bytes. partial: as for block_sum, whose barrier ends all reads of x.
__device__ __forceinline__ float inverse_rms(const ACT *x, int n, float eps, float *partial) {
    float squares = 0.0f;
    for (int i = threadIdx.x * 8; i < n; i += blockDim.x * 8) {
        float v[8];
        load_floats(v, x + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += v[j] * v[j];
    }
    return rsqrtf(block_sum(squares, partial) / n + eps);
}

// 1 / rms of a row, computed by all threads of a block.

constexpr int RMS_THREADS = 256;  // that add up squares, so that blocks of any size get the same bits

// x: n numbers, n % 8 == 0, aligned to 16 bytes. partial: as for block_sum, whose barrier ends all reads of x. The bits
// are the same in blocks of at least min(n / 8, RMS_THREADS) threads.
__device__ __forceinline__ float inverse_rms(const float *x, int n, float eps, float *partial) {
    const int step = min(int(blockDim.x), RMS_THREADS) * 8;
    float squares = 0.0f;
    for (int i = threadIdx.x * 8; i < n && threadIdx.x < RMS_THREADS; i += step) {
        float v[8];
        load_floats(v, x + i);
#pragma unroll
        for (int j = 0; j < 8; ++j) squares += v[j] * v[j];
    }
    return rsqrtf(block_sum(squares, partial) / n + eps);
}

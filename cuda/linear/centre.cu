// The op `centre`: x − mean of every row, in place.
//
// x: rows of n numbers, `stride` numbers apart.
// Grid (rows), block any. DEFINES: none.
// Cost: reads x twice, the second time from the cache.
// PRECOND: none.

extern "C" __global__ void __launch_bounds__(1024) centre_kernel(float *x, int n, long long stride) {
    let_next_begin();
    wait_for_previous();
    __shared__ float partial[32];
    x += blockIdx.x * stride;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    const float mean = block_sum(sum, partial) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] -= mean;
}

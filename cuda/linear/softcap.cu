// The op `softcap`: x = cap · tanh(x / cap), and NaN for an infinity: value - value is 0 for all other numbers.
//
// x: rows of n numbers, `pitch` numbers apart.
// Grid (ceil(n / block), rows), block any. DEFINES: none.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024) softcap_kernel(float *x, int n, long long pitch, float cap) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float &value = x[blockIdx.y * pitch + i];
    value = cap * tanhf(value / cap) + (value - value);
}

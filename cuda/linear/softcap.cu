// The op `softcap`: x = cap · tanh(x / cap).
//
// x: rows of n numbers, `pitch` numbers apart.
// Grid (ceil(n / block), rows), block any. DEFINES: ACT.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024) softcap_kernel(ACT *x, int n, long long pitch, float cap) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    ACT *const at = x + blockIdx.y * pitch + i;
    *at = from_float<ACT>(cap * tanhf(to_float(*at) / cap));
}

// The op `scale`: x = x · factor.
//
// x: rows of n numbers, `pitch` numbers apart. factor: one number.
// Grid (ceil(n / block), rows), block any. DEFINES: ACT.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024) scale_kernel(ACT *x, const ACT *factor, int n, long long pitch) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    ACT *const at = x + blockIdx.y * pitch + i;
    *at = from_float<ACT>(to_float(*at) * to_float(*factor));
}

// The op `activate`: x = ACTIVATION(x, up).
//
// x, up: rows of n numbers, `pitch` and `up_pitch` numbers apart.
// Grid (ceil(n / block), rows), block any. DEFINES: ACT, ACTIVATION (a function of activation.cuh).
// JOINS: activation.cuh.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024)
activate_kernel(ACT *x, const ACT *up, int n, long long pitch, long long up_pitch) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    ACT *const at = x + blockIdx.y * pitch + i;
    *at = from_float<ACT>(ACTIVATION(to_float(*at), to_float(up[blockIdx.y * up_pitch + i])));
}

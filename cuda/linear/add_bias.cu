// y += bias, row by row.
//
// y: rows of n numbers, `pitch` numbers apart; bias (n) float.
// Grid (ceil(n / block), rows). DEFINES: ACT.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024) add_bias_kernel(ACT *y, const float *bias, int n, long long pitch) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    ACT *at = y + blockIdx.y * pitch + i;
    *at = from_float<ACT>(to_float(*at) + bias[i]);
}

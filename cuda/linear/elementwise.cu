// The ops `activate`, `gate` and `scale`: x = ACTIVATION(x, other), in place.
//
// x: rows of n numbers, `pitch` numbers apart. other: rows `other_pitch` numbers apart, of n numbers, or with GROUPED
// of one number for `group` neighbours of x.
// Grid (ceil(n / block), rows), block any. DEFINES: ACTIVATION (a function of activation.cuh), GROUPED (0 or 1).
// JOINS: activation.cuh.
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024)
elementwise_kernel(float *x, const float *other, int n, int group, long long pitch, long long other_pitch) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float *const at = x + blockIdx.y * pitch + i;
    *at = ACTIVATION(*at, other[blockIdx.y * other_pitch + (GROUPED ? i / group : i)]);
}

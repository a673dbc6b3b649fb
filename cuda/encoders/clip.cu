// The op `clip`: values below `least` become it, and those above `most`; NaN stays NaN.
//
// x: rows of n numbers, `stride` numbers apart.
// Grid (ceil(n / block), rows), block any. DEFINES: none.
// PRECOND: none.

extern "C" __global__ void __launch_bounds__(1024)
clip_kernel(float *x, int n, long long stride, float least, float most) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float &value = x[blockIdx.y * stride + i];
    value = value < least ? least : value > most ? most : value;
}

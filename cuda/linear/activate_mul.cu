// The op `activate_mul`: y = ACTIVATION(gate, up).
//
// gate_up (T, 2F) = [gate | up], y (T, F). Halves of y are clipped to ±65504 where ACT is float; NaN stays.
// Grid (ceil(F / (8 · block)), T).
// DEFINES: ACT, ACTIVATION (a function of activation.cuh), TO (type of y, default ACT).
// JOINS: activation.cuh.
// PRECOND: F % 8 == 0; gate_up and y aligned to 16 bytes.
#ifndef TO
#define TO ACT
#endif

extern "C" __global__ void __launch_bounds__(1024) activate_mul_kernel(TO *y, const ACT *gate_up, int F) {
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= F) return;
    const ACT *row = gate_up + blockIdx.y * 2ll * F;
    float gate[8], up[8];
    load_floats(gate, row + i);
    load_floats(up, row + F + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) gate[j] = ACTIVATION(gate[j], up[j]);
    TO *const at = y + (long long)blockIdx.y * F + i;
    if (sizeof(ACT) == 4) store_within(at, gate);
    else store_floats(at, gate);
}

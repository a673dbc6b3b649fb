// The op `activate_mul`: y = ACTIVATION(gate, up).
//
// gate_up (T, 2F) = [gate | up], y (T, F). Halves of y are clipped to ±65504; NaN stays.
// Grid (ceil(F / (8 · block)), T).
// DEFINES: ACTIVATION (a function of activation.cuh), TO (type of y, default float).
// JOINS: activation.cuh.
// PRECOND: F % 8 == 0; gate_up and y aligned to 16 bytes.
#ifndef TO
#define TO float
#endif

extern "C" __global__ void __launch_bounds__(1024) activate_mul_kernel(TO *y, const float *gate_up, int F) {
    let_next_begin();
    wait_for_previous();
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= F) return;
    const float *row = gate_up + blockIdx.y * 2ll * F;
    float gate[8], up[8];
    load_floats(gate, row + i);
    load_floats(up, row + F + i);
#pragma unroll
    for (int j = 0; j < 8; ++j) gate[j] = ACTIVATION(gate[j], up[j]);
    store_within(y + (long long)blockIdx.y * F + i, gate);
}

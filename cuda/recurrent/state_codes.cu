// The ops `keep_states` and `restore_states`: matrices of states become codes of 8 bits with a scale for each column
// (`state_codes`), and codes become matrices (`state_matrices`).
//
// codes (n, A, D), scales (n, D), matrices (n, A, D), of n heads. A scale is the column's largest magnitude divided by
// LARGEST; columns whose scale is not above LEAST have codes 0. Codes are rounded to nearest even.
// Grid (n), block any. DEFINES: KEY_DIM, VALUE_DIM, LARGEST, LEAST.
// PRECOND: none.
// Cost: `state_codes` reads a matrix twice, the second time from the L2 cache.
extern "C" __global__ void __launch_bounds__(1024)
state_codes_kernel(signed char *codes, float *scales, const float *matrices) {
    const long long first = blockIdx.x * static_cast<long long>(KEY_DIM) * VALUE_DIM;
    for (int column = threadIdx.x; column < VALUE_DIM; column += blockDim.x) {
        const float *const x = matrices + first + column;
        float largest = 0.0f;
#pragma unroll 8
        for (int row = 0; row < KEY_DIM; ++row) largest = fmaxf(largest, fabsf(x[row * VALUE_DIM]));
        const float scale = largest / LARGEST, factor = scale > LEAST ? 1.0f / scale : 0.0f;
        scales[blockIdx.x * static_cast<long long>(VALUE_DIM) + column] = scale;
#pragma unroll 8
        for (int row = 0; row < KEY_DIM; ++row)
            codes[first + row * VALUE_DIM + column] = __float2int_rn(x[row * VALUE_DIM] * factor);
    }
}

extern "C" __global__ void __launch_bounds__(1024)
state_matrices_kernel(float *matrices, const signed char *codes, const float *scales) {
    const long long first = blockIdx.x * static_cast<long long>(KEY_DIM) * VALUE_DIM;
    for (int column = threadIdx.x; column < VALUE_DIM; column += blockDim.x) {
        const float scale = scales[blockIdx.x * static_cast<long long>(VALUE_DIM) + column];
#pragma unroll 8
        for (int row = 0; row < KEY_DIM; ++row) {
            const long long i = first + row * VALUE_DIM + column;
            matrices[i] = codes[i] * scale;
        }
    }
}

// y = x @ rotation for every vector of D: x, y (vectors, D). For rotate, y may be x.
//
// DEFINES: D, ORDER (a power of two that divides D), VECTORS (that a block of rotate_dense rotates).
// JOINS: hadamard.cuh.
// PRECOND: D % 32 == 0 or ORDER <= 32; D <= 1024.

// A warp holds one vector: lane l has channels l, l + 32, ….
constexpr int OWN = (D + 31) / 32;

// The rotation diag(signs_in) · H/√ORDER · diag(signs_out), where Hadamard's matrix of that order repeats D/ORDER times
// along the diagonal. signs_in, signs_out (D) are ±1. Exchanged, they give the transposed rotation.
// Grid (ceil(vectors / warps of a block)), block any.
extern "C" __global__ void __launch_bounds__(256)
rotate_kernel(float *y, const float *x, const float *signs_in, const float *signs_out, int vectors) {
    let_next_begin();
    wait_for_previous();
    const int vector = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (vector >= vectors) return;
    x += (long long)vector * D;
    y += (long long)vector * D;

    float v[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int channel = lane + 32 * i;
        v[i] = channel < D ? x[channel] * signs_in[channel] : 0.0f;
    }
    hadamard<ORDER>(v);
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int channel = lane + 32 * i;
        if (channel < D) y[channel] = v[i] * signs_out[channel];
    }
}

// Any rotation, a matrix (D, D). A block reads it once for VECTORS vectors.
// Grid (ceil(vectors / VECTORS)), block any.
extern "C" __global__ void __launch_bounds__(256)
rotate_dense_kernel(float *y, const float *x, const float *rotation, int vectors) {
    let_next_begin();
    wait_for_previous();
    __shared__ float tile[VECTORS][D];
    const int first = blockIdx.x * VECTORS;
    for (int i = threadIdx.x; i < VECTORS * D; i += blockDim.x)
        tile[i / D][i % D] = first + i / D < vectors ? x[(long long)first * D + i] : 0.0f;
    __syncthreads();
    for (int column = threadIdx.x; column < D; column += blockDim.x) {
        float sum[VECTORS] = {};
#pragma unroll 4
        for (int i = 0; i < D; ++i) {
            const float r = rotation[i * D + column];
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) sum[j] += tile[j][i] * r;
        }
#pragma unroll
        for (int j = 0; j < VECTORS; ++j)
            if (first + j < vectors) y[(long long)(first + j) * D + column] = sum[j];
    }
}

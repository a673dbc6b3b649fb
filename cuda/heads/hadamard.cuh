// Hadamard's matrix times the vector of a warp. Part of rotate.cu, transform_heads.cu, place_kv.cu and
// decode_attention.cu.

// Butterflies between registers whose numbers differ by `step`.
template <int N>
__device__ __forceinline__ void butterflies(float (&v)[N], int step) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (i & step) continue;
        const float a = v[i], b = v[i + step];
        v[i] = a + b;
        v[i + step] = a - b;
    }
}

// v = v · H/√SIZE in place, where a warp has one vector, and lane l its channels NEAR · l … NEAR · l + NEAR − 1, those
// 32 · NEAR after them, and so on. Hadamard's matrix of order SIZE, a power of two, repeats along the diagonal. With
// SIZE above 32 · NEAR the channels are a multiple of that. Sums are the same for any NEAR, a power of two.
// Cost: log2(SIZE) additions per channel.
template <int SIZE, int NEAR = 1, int N>
__device__ __forceinline__ void hadamard(float (&v)[N]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < SIZE && step < NEAR; step *= 2) butterflies(v, step);
#pragma unroll
    for (int step = 1; step * NEAR < SIZE && step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, v[i], step);
            v[i] = lane & step ? other - v[i] : v[i] + other;
        }
    }
#pragma unroll
    for (int step = NEAR; 32 * step < SIZE; step *= 2) butterflies(v, step);
    const float norm = rsqrtf((float)SIZE);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= norm;
}

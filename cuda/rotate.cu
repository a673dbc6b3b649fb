// y = (x · scale) @ rotation for every vector of D.
//
// x: `heads` vectors of D for each token, token t's first at x + t · stride (elements). y (T, heads, D).
// scale (heads, D), or null for none. DEFINES: ACT, D, ORDER (a power of two that divides D).
// PRECOND: D % 32 == 0 or ORDER <= 32; D <= 1024.

// A warp holds one vector: lane l has channels l, l + 32, ….
constexpr int kPerLane = (D + 31) / 32;

// Where the rotation is diag(signs_in) · H/√ORDER · diag(signs_out), with Hadamard's matrix of that order D/ORDER times
// on the diagonal. signs (D) are ±1, null for all 1. The transposed rotation has the signs exchanged.
// Cost: log2(ORDER) additions per channel.
// Grid (ceil(T · heads / warps of a block)), block any.
extern "C" __global__ void __launch_bounds__(256)
rotate_kernel(ACT *y, const ACT *x, const float *scale, const float *signs_in, const float *signs_out, int vectors,
              int heads, long long stride) {
    const int vector = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (vector >= vectors) return;
    const int head = vector % heads;
    x += vector / heads * stride + head * D;
    y += (long long)vector * D;

    float v[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int channel = lane + 32 * i;
        v[i] = 0.0f;
        if (channel >= D) continue;
        v[i] = to_float(x[channel]);
        if (scale) v[i] *= scale[head * D + channel];
        if (signs_in) v[i] *= signs_in[channel];
    }
    // Butterflies between lanes, then between the registers of a lane.
#pragma unroll
    for (int step = 1; step < ORDER && step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, v[i], step);
            v[i] = lane & step ? other - v[i] : v[i] + other;
        }
    }
#pragma unroll
    for (int step = 1; step < ORDER / 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
            if (i & step) continue;
            const float a = v[i], b = v[i + step];
            v[i] = a + b;
            v[i + step] = a - b;
        }
    }
    const float norm = rsqrtf((float)ORDER);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
        const int channel = lane + 32 * i;
        if (channel < D) y[channel] = from_float<ACT>(v[i] * norm * (signs_out ? signs_out[channel] : 1.0f));
    }
}

// Any rotation (D, D). A block reads the matrix once for VECTORS vectors.
// Grid (ceil(T · heads / VECTORS)), block any.
constexpr int VECTORS = 4;
extern "C" __global__ void __launch_bounds__(256)
rotate_dense_kernel(ACT *y, const ACT *x, const float *scale, const float *rotation, int vectors, int heads,
                    long long stride) {
    __shared__ float held[VECTORS][D];
    const int first = blockIdx.x * VECTORS;
    for (int i = threadIdx.x; i < VECTORS * D; i += blockDim.x) {
        const int vector = first + i / D, channel = i % D, head = vector % heads;
        float v = vector < vectors ? to_float(x[vector / heads * stride + head * D + channel]) : 0.0f;
        if (scale) v *= scale[head * D + channel];
        held[i / D][channel] = v;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < D; column += blockDim.x) {
        float sum[VECTORS] = {};
#pragma unroll 4
        for (int i = 0; i < D; ++i) {
            const float r = rotation[i * D + column];
#pragma unroll
            for (int j = 0; j < VECTORS; ++j) sum[j] += held[j][i] * r;
        }
#pragma unroll
        for (int j = 0; j < VECTORS; ++j)
            if (first + j < vectors) y[(long long)(first + j) * D + column] = from_float<ACT>(sum[j]);
    }
}

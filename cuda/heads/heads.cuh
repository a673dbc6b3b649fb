// Transforms the vector of one head for the KV store: RMS norm, RoPE, scale, rotation. Part of transform_heads.cu and
// place_kv.cu.
//
// qkv (T, H + 2K, D): the heads of queries, keys, values. cos, sin (T, D/2): RoPE rotates channel j with channel j +
// D/2. With HEAD_NORMS, queries and keys are first x / rms(x) · norm, where norm is q_norm or k_norm (D); with
// VALUE_EPS, values are first x / rms(x). scale (H + 2K, D), or null for ones, multiplies queries and keys after RoPE,
// and values at once. Then one rotation is applied to queries and keys, another to values: diag(input_signs) · H/√ORDER
// · diag(output_signs), where Hadamard's matrix of that order repeats along the diagonal. The signs `input_signs` and
// `output_signs` (D) are ±1; order 1 has no rotation and reads no signs. A warp holds one vector: lane l has channels
// l, l + 32, ….
constexpr int D = HEAD_DIM, HALF = D / 2, OWN = (D + 31) / 32;  // OWN: channels of a lane

template <int ORDER>
__device__ __forceinline__ void rotate(float (&v)[OWN], const float *input_signs, const float *output_signs) {
    if constexpr (ORDER > 1) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane + 32 * i < D) v[i] *= input_signs[lane + 32 * i];
        hadamard<ORDER>(v);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane + 32 * i < D) v[i] *= output_signs[lane + 32 * i];
    }
}

// 1 / rms of the vector; its channels from D on are zero.
__device__ __forceinline__ float inverse_rms(const float (&v)[OWN], float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < OWN; ++i) squares += v[i] * v[i];
    return rsqrtf(warp_sum(squares) / D + eps);
}

// Angles of all tokens, scales of all heads, signs of both rotations.
struct HeadTransform {
    const float *cos, *sin, *scale, *key_before, *key_behind, *value_before, *value_behind;

    // v: the vector of a value head, in place.
    __device__ __forceinline__ void value(float (&v)[OWN], int head) const {
        const int lane = threadIdx.x % 32;
#ifdef VALUE_EPS
        const float factor = inverse_rms(v, VALUE_EPS);
#pragma unroll
        for (int i = 0; i < OWN; ++i) v[i] *= factor;
#endif
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (scale && lane + 32 * i < D) v[i] *= scale[head * D + lane + 32 * i];
        rotate<VALUE_ORDER>(v, value_before, value_behind);
    }

    // v: the vector of a query or key head, in place; x: the same vector in memory. norm: weights of its RMS norm.
    __device__ __forceinline__ void query_or_key(float (&v)[OWN], const float *x, const float *norm, int row, int head,
                                                 float eps) const {
        const int lane = threadIdx.x % 32;
#if HEAD_NORMS
        const float factor = inverse_rms(v, eps);
#endif
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int channel = lane + 32 * i;
            if (channel >= D) continue;
            const bool is_low = channel < HALF;
            const int angle = is_low ? channel : channel - HALF, other = is_low ? channel + HALF : angle;
            float own = v[i], partner = x[other];
#if HEAD_NORMS
            own *= factor * norm[channel];
            partner *= factor * norm[other];
#endif
            const float c = cos[row * HALF + angle], s = sin[row * HALF + angle];
            v[i] = own * c + (is_low ? -partner : partner) * s;
            if (scale) v[i] *= scale[head * D + channel];
        }
        rotate<KEY_ORDER>(v, key_before, key_behind);
    }
};

// v = the vector at x, transformed; zero from channel D on.
__device__ __forceinline__ void load_transformed(float (&v)[OWN], const HeadTransform &transform, const float *x,
                                                 const float *q_norm, const float *k_norm, int row, int head,
                                                 int heads, int kv_heads, float eps) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN; ++i) v[i] = lane + 32 * i < D ? x[lane + 32 * i] : 0.0f;
    if (head >= heads + kv_heads) transform.value(v, head);
    else transform.query_or_key(v, x, head < heads ? q_norm : k_norm, row, head, eps);
}

__device__ __forceinline__ void store_vector(float *y, const float (&v)[OWN]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (lane + 32 * i < D) y[lane + 32 * i] = v[i];
}

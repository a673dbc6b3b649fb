// The vector of one head as the store takes it: RMS norm, RoPE, scale, rotation. Of transform_heads.cu and place_kv.cu.
//
// qkv (T, H + 2K, D): the heads of queries, keys, values. cos, sin (T, D/2): channel j turns with channel j + D/2.
// With HEAD_NORMS, queries and keys are x / rms(x) · norm before, q_norm and k_norm (D). scale (H + 2K, D), or null
// for none: what queries and keys are multiplied with after RoPE, and values as they come. Then queries and keys, and
// values, go through a rotation of their own: diag(before) · H/√ORDER · diag(behind), with Hadamard's matrix of that
// order on the diagonal; signs (D) are ±1, and unread where the order is 1, which is no rotation.
// A warp holds one vector, lane l its channels l, l + 32, ….
constexpr int D = HEAD_DIM, HALF = D / 2, OWN = (D + 31) / 32;  // OWN channels of a lane

template <int ORDER>
__device__ __forceinline__ void rotate(float (&v)[OWN], const float *before, const float *behind) {
    if constexpr (ORDER > 1) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane + 32 * i < D) v[i] *= before[lane + 32 * i];
        hadamard<ORDER>(v);
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane + 32 * i < D) v[i] *= behind[lane + 32 * i];
    }
}

// Of all tokens.
struct Turns {
    const float *cos, *sin, *scale, *key_before, *key_behind, *value_before, *value_behind;

    // v: the vector of a head of values.
    __device__ __forceinline__ void value(float (&v)[OWN], int head) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (scale && lane + 32 * i < D) v[i] *= scale[head * D + lane + 32 * i];
        rotate<VALUE_ORDER>(v, value_before, value_behind);
    }

    // v: the vector of a head of queries or keys, at x in memory as well. norm: its weights.
    __device__ __forceinline__ void query_or_key(float (&v)[OWN], const float *x, const WEIGHT *norm, int row, int head,
                                                 float eps) const {
        const int lane = threadIdx.x % 32;
#if HEAD_NORMS
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) squares += v[i] * v[i];
        const float factor = rsqrtf(warp_sum(squares) / D + eps);
#endif
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int channel = lane + 32 * i;
            if (channel >= D) continue;
            const bool is_low = channel < HALF;
            const int angle = is_low ? channel : channel - HALF, other = is_low ? channel + HALF : angle;
            float own = v[i], partner = x[other];
#if HEAD_NORMS
            own *= factor * to_float(norm[channel]);
            partner *= factor * to_float(norm[other]);
#endif
            const float c = cos[row * HALF + angle], s = sin[row * HALF + angle];
            v[i] = own * c + (is_low ? -partner : partner) * s;
            if (scale) v[i] *= scale[head * D + channel];
        }
        rotate<KEY_ORDER>(v, key_before, key_behind);
    }
};

// The vector of a head; zero from D on.
__device__ __forceinline__ void conditioned(float (&v)[OWN], const Turns &turns, const float *x, const WEIGHT *q_norm,
                                            const WEIGHT *k_norm, int row, int head, int heads, int kv_heads,
                                            float eps) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN; ++i) v[i] = lane + 32 * i < D ? x[lane + 32 * i] : 0.0f;
    if (head >= heads + kv_heads) turns.value(v, head);
    else turns.query_or_key(v, x, head < heads ? q_norm : k_norm, row, head, eps);
}

__device__ __forceinline__ void store_vector(float *y, const float (&v)[OWN]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (lane + 32 * i < D) y[lane + 32 * i] = v[i];
}

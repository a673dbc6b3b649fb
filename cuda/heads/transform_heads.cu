// The op `transform_heads`: queries, keys and values of new tokens, transformed for the KV store (see heads.cuh).
//
// q (T, H, D), k (T, K, D), v (T, K, D) or null, which skips the values. vectors: T · (H + K); with v, T · (H + 2K).
// Grid (ceil(vectors / warps of a block)), block any. DEFINES: HEAD_DIM, HEAD_NORMS (0 or 1), KEY_ORDER, VALUE_ORDER,
// VALUE_EPS (or not defined), SIDES (1 if there are no values in qkv, default 2).
// PRECOND: HEAD_DIM % 2 == 0; an ORDER divides it, and is at most 32 or HEAD_DIM % 32 == 0.
// JOINS: hadamard.cuh, heads.cuh.

#ifndef SIDES
#define SIDES 2
#endif

extern "C" __global__ void __launch_bounds__(256)
transform_heads_kernel(float *q, float *k, float *v, const float *qkv, const float *cos, const float *sin,
                       const float *q_norm, const float *k_norm, const float *scale, const float *key_before,
                       const float *key_behind, const float *value_before, const float *value_behind, int vectors,
                       int heads, int kv_heads, float eps) {
    let_next_begin();
    wait_for_previous();
    const int vector = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (vector >= vectors) return;
    const int per_row = heads + kv_heads * (v ? 2 : 1), row = vector / per_row, head = vector % per_row;
    const float *const x = qkv + (row * (heads + (long long)SIDES * kv_heads) + head) * D;
    const HeadTransform transform = {cos, sin, scale, key_before, key_behind, value_before, value_behind};
    float own[OWN];
    load_transformed(own, transform, x, q_norm, k_norm, row, head, heads, kv_heads, eps);
    if (head < heads) return store_vector(q + ((long long)row * heads + head) * D, own);
    const int kv_head = (head - heads) % kv_heads;
    store_vector((head < heads + kv_heads ? k : v) + ((long long)row * kv_heads + kv_head) * D, own);
}

// The op `join_latents`: the heads of latent attention, queries, a key and a value, of their two parts.
//
// absorbed (T · H, L), kv (T, L + R), contiguous; rotated (T · H, R), rows `pitch` numbers apart.
// qkv (T, H + 2, L + R): each half of a query and of the key has half of the R rotated channels, then half of the L
// others; the value has the L latent channels of kv, then zeros.
// Grid (T, H + 2), block any. DEFINES: none.
// PRECOND: L, R even.
extern "C" __global__ void __launch_bounds__(1024)
join_latents_kernel(float *qkv, const float *absorbed, const float *rotated, const float *kv, int heads, int latent,
                    int turned, long long pitch) {
    let_next_begin();
    wait_for_previous();
    const int columns = latent + turned, head = blockIdx.y;
    const float *const key = kv + (long long)blockIdx.x * columns;
    const long long query = (long long)blockIdx.x * heads + head;
    float *const out = qkv + ((long long)blockIdx.x * (heads + 2) + head) * columns;
    const float *const channels = head < heads ? absorbed + query * latent : key;
    const float *const turning = head < heads ? rotated + query * pitch : key + latent;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) {
        if (head > heads) {
            out[i] = i < latent ? key[i] : 0.0f;
            continue;
        }
        const int half = columns / 2, side = i >= half, place = i - side * half;
        out[i] = place < turned / 2 ? turning[side * (turned / 2) + place]
                                    : channels[side * (latent / 2) + place - turned / 2];
    }
}

// The op `join_latents`: joined (T, H + 1, L + R), whose halves have half of the rotated channels, then half of the
// others: of absorbed (T · H, L) and of rotated, R numbers at rotated + i · rotated_stride; and, behind the queries, of
// kv (T, L + R), whose rotated channels come last.
//
// Grid (T, H + 1), block any. DEFINES: none. PRECOND: L and R are even.
extern "C" __global__ void __launch_bounds__(1024)
join_latents_kernel(float *joined, const float *absorbed, const float *rotated, const float *kv, int latent,
                    int rotated_size, long long rotated_stride) {
    let_next_begin();
    wait_for_previous();
    const int heads = gridDim.y - 1, head = blockIdx.y, half = (latent + rotated_size) / 2;
    const long long query = (long long)blockIdx.x * heads + head;
    const float *own = absorbed + query * latent, *turned = rotated + query * rotated_stride;
    if (head == heads) own = kv + (long long)blockIdx.x * 2 * half, turned = own + latent;
    joined += ((long long)blockIdx.x * (heads + 1) + head) * 2 * half;
    for (int i = threadIdx.x; i < 2 * half; i += blockDim.x) {
        const int side = i / half, channel = i % half - rotated_size / 2;
        joined[i] = channel < 0 ? turned[side * (rotated_size / 2) + i % half] : own[side * (latent / 2) + channel];
    }
}

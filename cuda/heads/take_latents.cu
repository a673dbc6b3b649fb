// The op `take_latents`: out (vectors, L), the channels that are not rotated of x (vectors, columns), in order.
//
// Grid (vectors), block any. DEFINES: none. PRECOND: L and columns are even.
extern "C" __global__ void __launch_bounds__(1024)
take_latents_kernel(float *out, const float *x, int latent, int columns) {
    let_next_begin();
    wait_for_previous();
    const int half = latent / 2;
    for (int i = threadIdx.x; i < latent; i += blockDim.x) {
        const int end = (1 + i / half) * (columns / 2);  // of the half
        out[(long long)blockIdx.x * latent + i] = x[(long long)blockIdx.x * columns + end - half + i % half];
    }
}

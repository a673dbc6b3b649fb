// Turn channel j with channel j + D/2 by the angle of the row's position, in place, and balance: x · scale.
//
// x: `heads` vectors of D for each token, token t's first at x + t · stride (elements). cos, sin (T, D/2).
// scale (heads, D), equal on both channels of a pair, or null for none.
// Grid (T), block any. DEFINES: ACT, D.
// PRECOND: D % 2 == 0.
extern "C" __global__ void __launch_bounds__(1024)
rope_kernel(ACT *x, const float *cos, const float *sin, const float *scale, int heads, long long stride) {
    constexpr int half_dim = D / 2;
    x += blockIdx.x * stride;
    cos += blockIdx.x * half_dim;
    sin += blockIdx.x * half_dim;
    for (int i = threadIdx.x; i < heads * half_dim; i += blockDim.x) {
        const int head = i / half_dim, j = i % half_dim;
        ACT *low = x + head * D + j, *high = low + half_dim;
        const float s = scale ? scale[head * D + j] : 1.0f;
        const float a = to_float(*low) * s, b = to_float(*high) * s;
        *low = from_float<ACT>(a * cos[j] - b * sin[j]);
        *high = from_float<ACT>(b * cos[j] + a * sin[j]);
    }
}

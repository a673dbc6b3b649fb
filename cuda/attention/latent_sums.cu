// Adds up the splits of latent_attention.cu, which explains the arguments: a step's rows of out (T, H, D).
//
// Grid (B, most rows of a sequence · H), block any. DEFINES: none. PRECOND: no row is without visible tokens.

extern "C" __global__ void __launch_bounds__(1024)
latent_sums_kernel(float *out, const float *acc, const float *ml, const int *spans, const float *factors,
                   int span_stride, int splits, int heads, int d, int padded) {
    let_next_begin();
    wait_for_previous();
    const Span &span = span_at(spans, span_stride, blockIdx.x);
    if (blockIdx.y >= span.rows * heads) return;
    const long long vector = (long long)span.first_row * heads + blockIdx.y;
    const float2 *const sums = reinterpret_cast<const float2 *>(ml) + vector * splits;
    float top = sums[0].x, total = 0.0f;
    for (int split = 1; split < splits; ++split) top = fmaxf(top, sums[split].x);
    for (int split = 0; split < splits; ++split) total += exp2_fast(sums[split].x - top) * sums[split].y;
    const float factor = (factors ? factors[vector % heads] : 1.0f) / total;
    for (int channel = threadIdx.x; channel < d; channel += blockDim.x) {
        float sum = 0.0f;
        for (int split = 0; split < splits; ++split)
            sum += exp2_fast(sums[split].x - top) * acc[(vector * splits + split) * padded + channel];
        out[vector * d + channel] = sum * factor;
    }
}

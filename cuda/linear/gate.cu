// The op `gate`: x = x · σ(logits).
//
// x: rows of n numbers, `pitch` numbers apart. logits: rows that are `logits_pitch` numbers apart, of n numbers, or of
// one for the whole row of x.
// Grid (ceil(n / block), rows), block any. DEFINES: ACT, WHOLE (1: one logit for a row).
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024)
gate_kernel(ACT *x, const ACT *logits, int n, long long pitch, long long logits_pitch) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float logit = to_float(logits[blockIdx.y * logits_pitch + (WHOLE ? 0 : i)]);
    ACT *const at = x + blockIdx.y * pitch + i;
    *at = from_float<ACT>(to_float(*at) / (1.0f + __expf(-logit)));
}

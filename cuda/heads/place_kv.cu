// The op `place_kv`: transforms queries, keys and values of a step (see heads.cuh) and writes the keys and values into
// the blocks that hold their positions.
//
// Row r of qkv is the one new token of sequence r; with STEP_ROWS > 1 a sequence has up to STEP_ROWS consecutive rows.
// q (T, H, D). current_k, current_v: pools (records, K, bytes) of full-precision records. Keys and values are stored
// there as halves, clipped to ±65504; NaN stays. spans int32 (spans_count, span_stride): a Span for each sequence; of a
// row whose Span has no rows, only queries are written. vectors: T · (H + 2K).
// Grid (ceil(vectors / warps of a block)), block any. DEFINES: HEAD_DIM, HEAD_NORMS (0 or 1), KEY_ORDER, VALUE_ORDER,
// STEP_ROWS, VALUE_EPS (or not defined).
// Cost: one token fills 2 or 4 bytes of every 32-byte sector that it writes. A layer's weights are far more bytes; a
// prompt fills whole sectors, with append_kv.cu.
// PRECOND: HEAD_DIM % 2 == 0; an ORDER divides it, and is at most 32 or HEAD_DIM % 32 == 0.
// JOINS: hadamard.cuh, heads.cuh.

// The sequence of a row: the last one whose first row is not after it.
__device__ __forceinline__ int sequence_of(int row, const int *spans, int span_stride, int spans_count) {
    int low = 0, high = min(row, spans_count - 1);
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (span_at(spans, span_stride, middle).first_row <= row) low = middle;
        else high = middle - 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(256)
place_kv_kernel(float *q, unsigned char *current_k, unsigned char *current_v, const float *qkv, const float *cos,
                const float *sin, const float *q_norm, const float *k_norm, const float *scale,
                const float *key_before, const float *key_behind, const float *value_before, const float *value_behind,
                const int *spans, int span_stride, int spans_count, int vectors, int heads, int kv_heads, float eps) {
    let_next_begin();
    wait_for_previous();
    using L = FullKeyLayout;
    const int vector = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (vector >= vectors) return;
    const int per_row = heads + 2 * kv_heads, row = vector / per_row, head = vector % per_row;
    const HeadTransform transform = {cos, sin, scale, key_before, key_behind, value_before, value_behind};
    float own[OWN];
    const float *const x = qkv + (long long)vector * D;
    load_transformed(own, transform, x, q_norm, k_norm, row, head, heads, kv_heads, eps);
    if (head < heads) {
        store_vector(q + ((long long)row * heads + head) * D, own);
        return;
    }
    const int sequence = STEP_ROWS > 1 ? sequence_of(row, spans, span_stride, spans_count) : row;
    const Span &span = span_at(spans, span_stride, sequence);
    if (span.rows == 0) return;
    const int position = span.position + (STEP_ROWS > 1 ? row - span.first_row : 0);
    const int block = position / L::N, token = position % L::N;
    const long long record = (long long)span.record(block) * kv_heads + (head - heads) % kv_heads;
    const bool is_key = head < heads + kv_heads;
    unsigned char *const at = (is_key ? current_k : current_v) + record * L::NBYTES;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int channel = lane + 32 * i;
        const __half2 pair = __floats2half2_rn(within<__half>(own[i]),
                                               within<__half>(__shfl_down_sync(0xffffffffu, own[i], 1)));
        if (channel >= L::STEPS * 16) continue;
        if (!is_key) reinterpret_cast<__half *>(at)[full_index<FullValueLayout>(token, channel)] = __low2half(pair);
        else if (channel % 2 == 0)
            *reinterpret_cast<unsigned *>(at + 2 * full_index<FullKeyLayout>(token, channel)) = as_bits(pair);
    }
}

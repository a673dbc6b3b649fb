// Queries, keys and values of a step as the store takes them (heads.cuh says how), keys and values at once in it.
//
// Row r of qkv is the one new token of sequence r, or a sequence has up to STEP_ROWS rows, one behind the other.
// q (T, H, D). Keys and values become halves, clipped to ±65504 (NaN stays), in the full-precision records in which
// their sequence grows. current_k, current_v: pools (records, K, bytes) of full-precision records.
// spans int32 (spans_count, span_stride): a Span of each sequence.
// vectors: T · (H + 2K).
// Grid (ceil(vectors / warps of a block)), block any. DEFINES: HEAD_DIM, WEIGHT (of the norms), HEAD_NORMS (0 or
// 1), KEY_ORDER, VALUE_ORDER, STEP_ROWS.
// Cost: one token has 2 or 4 bytes of every 32 that a record's writes touch. That is little beside a layer's weights;
// a prompt has all the tokens of 16, and its coalesced writes are append_kv.cu's.
// PRECOND: HEAD_DIM % 2 == 0; an ORDER divides it, and is at most 32 or HEAD_DIM % 32 == 0.
// JOINS: heads.cuh.

// Where token `token` of a block has its halves of channel `channel`, in bytes from the begin of a full-precision
// record.
template <bool VALUES>
__device__ __forceinline__ int full_offset(int token, int channel) {
    using L = FullKeyLayout;
    const int t = token % L::PART, tokens = t / 16, step = channel / 16, c = channel % 16;
    const int tile = VALUES ? tokens * L::STEPS + step : step * L::PT + tokens;
    const int g = VALUES ? c / 2 : t % 8, tg = VALUES ? t % 8 / 2 : c % 8 / 2;
    const int r = VALUES ? c % 2 + t % 16 / 8 * 2 : t % 16 / 8 + c / 8 * 2;
    return (token / L::PART * L::TILES + tile) * 512 + (4 * g + tg) * 16 + r * 4 + (VALUES ? t : c) % 2 * 2;
}

// The sequence of a row: the last one whose rows begin there or before.
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
                const float *sin, const WEIGHT *q_norm, const WEIGHT *k_norm, const float *scale,
                const float *key_before, const float *key_behind, const float *value_before, const float *value_behind,
                const int *spans, int span_stride, int spans_count, int vectors, int heads, int kv_heads, float eps) {
    using L = FullKeyLayout;
    const int vector = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (vector >= vectors) return;
    const int of_row = heads + 2 * kv_heads, row = vector / of_row, head = vector % of_row;
    const Turns turns = {cos, sin, scale, key_before, key_behind, value_before, value_behind};
    float held[OWN];
    conditioned(held, turns, qkv + (long long)vector * D, q_norm, k_norm, row, head, heads, kv_heads, eps);
    if (head < heads) {
        store_vector(q + ((long long)row * heads + head) * D, held);
        return;
    }
    const int sequence = STEP_ROWS > 1 ? sequence_of(row, spans, span_stride, spans_count) : row;
    const Span &span = span_at(spans, span_stride, sequence);
    const int position = span.position + (STEP_ROWS > 1 ? row - span.first_row : 0);
    const int block = position / L::N, token = position % L::N;
    const long long record = (long long)span.record(block) * kv_heads + (head - heads) % kv_heads;
    const bool is_key = head < heads + kv_heads;
    unsigned char *const at = (is_key ? current_k : current_v) + record * L::NBYTES;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int channel = lane + 32 * i;
        const __half2 pair = __floats2half2_rn(within<__half>(held[i]),
                                               within<__half>(__shfl_down_sync(0xffffffffu, held[i], 1)));
        if (channel >= L::STEPS * 16) continue;
        if (!is_key) *reinterpret_cast<__half *>(at + full_offset<true>(token, channel)) = __low2half(pair);
        else if (channel % 2 == 0)
            *reinterpret_cast<unsigned *>(at + full_offset<false>(token, channel)) = as_bits(pair);
    }
}

// The op `attention` for a step, with two kinds of quantized blocks in one memory: the text of decode_attention.cu for
// each kind, in the namespaces `finer` and `coarser`. Arguments and results are the same.
//
// keys, values and their tables belong to the coarser blocks, the arguments finer_… to blocks with more bits. All
// records lie in one memory, STRIDE bytes apart. The first places of a span are finer blocks (Span in
// prelude.cuh). acc, ml, counts have twice the size; after all counts come as many again as one kind has.
// A CTA reads blocks of one kind, so that it needs the tables of that kind alone: the first CTAs have the units of
// finer blocks, as many as their share of all units says and at least one, the other CTAs have all else. The kind that
// comes last finishes a head whose sequence has both (sums.cuh).
// Grid (CTAs), two or more, best one per SM; block and dynamic shared memory as in decode_attention.cu, 4 bytes more.
// DEFINES: as in decode_attention.cu; SHARED is of the kind that needs more.
// PRECOND: as for decode_attention.cu; no window.
// JOINS: decode_attention.cu.

// How many CTAs have units of finer blocks; a warp calls it together.
__device__ __forceinline__ int finer_ctas(const finer::Plan &of_finer, const coarser::Plan &of_others) {
    int finer_units = 0, units = 0;
    for (int own = threadIdx.x % 32; own < of_finer.sequences; own += 32) {
        const int cells = of_finer.kv_heads * finer::chunks_of(of_finer.span(own)), more = of_finer.units(own) * cells;
        finer_units += more, units += more + of_others.units(own) * cells;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        finer_units += __shfl_xor_sync(finer::ALL_LANES, finer_units, step);
        units += __shfl_xor_sync(finer::ALL_LANES, units, step);
    }
    if (finer_units == 0) return 0;
    return min(max(1, int((long long)finer_units * gridDim.x / units)), int(gridDim.x) - 1);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_two_kinds_kernel(TO *out, float *acc, float *ml, int *counts, const float *q, const unsigned char *keys,
                        const unsigned char *values, const unsigned char *full_k, const unsigned char *full_v,
                        const int *spans, const unsigned char *key_tables, const unsigned char *value_tables,
                        const float *factors, const float *before, const float *after, int sequences, int span_stride,
                        int kv_heads, int chunks, int window, float scale, const float *sink_scores,
                        const unsigned char *finer_keys, const unsigned char *finer_values,
                        const unsigned char *finer_key_tables, const unsigned char *finer_value_tables) {
    let_next_begin();
    wait_for_previous();
    DYNAMIC_SHARED(unsigned char, dynamic);
    int *const memory = reinterpret_cast<int *>(coarser::at_known_address(dynamic) + SHARED);
    const finer::Plan of_finer(memory, spans, span_stride, sequences, kv_heads, window);
    const coarser::Plan of_others(memory, spans, span_stride, sequences, kv_heads, window);
    const int ctas = finer_ctas(of_finer, of_others);
    if (threadIdx.x == 0) of_finer.share[2] = ctas;
    __syncthreads();
    if (blockIdx.x >= ctas) {
        coarser::decode_attention_kernel(out, acc, ml, counts, q, keys, values, full_k, full_v, spans, key_tables,
                                         value_tables, factors, before, after, sequences, span_stride, kv_heads, chunks,
                                         window, scale, sink_scores);
        return;
    }
    const int cells = sequences * kv_heads * chunks;
    const long long sums = (2ll * cells + gridDim.x) * finer::HEADS;
    finer::decode_attention_kernel(out, acc + sums * finer::DP, ml + sums * 2, counts + cells * finer::HEADS, q,
                                   finer_keys, finer_values, full_k, full_v, spans, finer_key_tables,
                                   finer_value_tables, factors, before, after, sequences, span_stride, kv_heads, chunks,
                                   window, scale, sink_scores);
}

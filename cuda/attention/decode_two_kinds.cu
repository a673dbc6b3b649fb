// The op `attention` for a step, with two kinds of quantized blocks in one memory: the parts of decode_attention.cu for
// each kind, in the namespaces `high_precision` and `low_precision`. Arguments and results are the same.
//
// keys, values and their tables belong to the low-precision blocks, the arguments high_precision_… to blocks with more
// bits. All records lie in one memory, STRIDE bytes apart. The first places of a span are high-precision blocks (Span
// in prelude.cuh). acc, ml, counts have twice the size; after all counts come as many again as one kind has.
// A CTA reads blocks of one kind, so that it needs the tables of that kind alone: the first CTAs have the units of
// high-precision blocks, as many as their share of all bytes says, the other CTAs have all else. The kind that comes
// last finishes a head whose sequence has both (sums.cuh).
// Grid (CTAs), two or more, best one per SM; block and dynamic shared memory as in decode_attention.cu, 4 bytes more.
// DEFINES: as in decode_attention.cu; SHARED is of the kind that needs more.
// PRECOND: as for decode_attention.cu; no window.
// JOINS: attention.cuh, shares.cuh, decode_work.cuh, decode_records.cuh, hadamard.cuh, sums.cuh,
// decode_share.cuh.

// How many CTAs have units of high-precision blocks; a warp calls it together. Their share of the CTAs is that of their
// bytes, rounded such that the kind of fewer CTAs gets more: so no CTA has much more than the mean of all CTAs and one
// unit.
__device__ __forceinline__ int high_precision_ctas(const high_precision::Plan &high_plan,
                                                   const low_precision::Plan &low_plan) {
    int high_units = 0, low_units = 0;
    for (int own = threadIdx.x % 32; own < high_plan.sequences; own += 32) {
        const int cells = high_plan.kv_heads * high_precision::chunks_of(high_plan.span(own));
        high_units += high_plan.units(own) * cells, low_units += low_plan.units(own) * cells;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        high_units += __shfl_xor_sync(high_precision::ALL_LANES, high_units, step);
        low_units += __shfl_xor_sync(high_precision::ALL_LANES, low_units, step);
    }
    if (high_units == 0) return 0;
    constexpr float weight = float(high_precision::KeyLayout::STRIDE) / low_precision::KeyLayout::STRIDE;  // of a unit
    const float ctas = gridDim.x * (high_units * weight / (high_units * weight + low_units));
    return min(int(2 * ctas < gridDim.x ? ceilf(ctas) : ctas), int(gridDim.x) - 1);
}

// Computes the row of units of the CTA's kind; the first warp calls it together, and a barrier must follow.
__device__ __forceinline__ void fill_row(const high_precision::Plan &high_plan, const low_precision::Plan &low_plan) {
    const int ctas = high_precision_ctas(high_plan, low_plan);
    if (threadIdx.x == 0) high_plan.share[2] = ctas;
    __syncwarp();
    if (blockIdx.x < ctas)
        high_plan.fill();
    else
        low_plan.fill();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_two_kinds_kernel(TO *out, float *acc, float *ml, int *counts, const float *q, const unsigned char *keys,
                        const unsigned char *values, const unsigned char *full_k, const unsigned char *full_v,
                        const int *spans, const unsigned char *key_tables, const unsigned char *value_tables,
                        const float *factors, const float *input_signs, const float *output_signs, int sequences,
                        int span_stride, int kv_heads, int chunks, int window, float scale, const float *sink_scores,
                        const unsigned char *high_precision_keys, const unsigned char *high_precision_values,
                        const unsigned char *high_precision_key_tables,
                        const unsigned char *high_precision_value_tables) {
    let_next_begin();
    // Most CTAs read low-precision blocks, whose tables are on their way while the kernel waits.
    const typename low_precision::Tables::Loaded<WARPS * 32> tables(key_tables, value_tables);
    wait_for_previous();
    DYNAMIC_SHARED(unsigned char, dynamic);
    unsigned char *const shared = low_precision::at_known_address(dynamic);
    int *const memory = reinterpret_cast<int *>(shared + SHARED);
    const high_precision::Plan high_plan(memory, spans, span_stride, sequences, kv_heads, window);
    const low_precision::Plan low_plan(memory, spans, span_stride, sequences, kv_heads, window);
    if (threadIdx.x < 32)
        fill_row(high_plan, low_plan);
    else
        low_plan.expect_spans(reinterpret_cast<int *>(shared), SHARED / 4);
    __syncthreads();
    if (blockIdx.x >= low_plan.share[2]) {
        const low_precision::Sums sums = {acc, reinterpret_cast<float2 *>(ml), sequences * kv_heads * chunks};
        low_precision::attend_share({out, factors, input_signs, output_signs, sink_scores}, sums, counts, q,
                              {keys, values, full_k, full_v, kv_heads}, tables, low_plan, shared, chunks, scale);
        return;
    }
    const int cells = sequences * kv_heads * chunks;
    const long long size = (2ll * cells + gridDim.x) * high_precision::HEADS;
    const high_precision::Sums sums = {acc + size * high_precision::DP, reinterpret_cast<float2 *>(ml) + size, cells};
    high_precision::attend_share({out, factors, input_signs, output_signs, sink_scores}, sums,
                        counts + cells * high_precision::HEADS, q,
                        {high_precision_keys, high_precision_values, full_k, full_v, kv_heads},
                        {high_precision_key_tables, high_precision_value_tables},
                        high_plan, shared, chunks, scale);
}

// The op `attention` for a step: Σ softmax(scale · q·k) v of new tokens over their sequences, in splits that combine.cu
// adds. T rows: one new token of each of B sequences, or up to STEP_ROWS of each.
//
// part_acc (T, H, SPLITS, DP): Σ 2^(score − max) v over the tokens of the split, v still rotated; undefined from D on.
// part_ml (T, H, SPLITS, 2): max and Σ 2^(score − max); −inf and 0, with part_acc 0, if the split sees no token.
// q (T, H, D): transformed as the keys are. keys, values (blocks, K, NBYTES), full_k, full_v (slots, K, …): records.
// spans (B, span_stride): a Span for each sequence, whose `current` and `next` are in full_k and full_v; one of zeros
// sees no token. window: tokens that a query sees, itself included; 0 for all. Behind the newest token a
// full-precision record may hold anything, also NaN.
// DEFINES: GROUP (H / K), WARPS, STEP_ROWS (1, or the most rows of a sequence). PRECOND: records aligned to 128 bytes,
// part_acc and tables to 16, part_ml and q to 8; STEP_ROWS <= N where it is above 1.
//
// Grid (SPLITS, K · chunks, B), where chunks is CHUNKS, or ceil(GROUP · rows / 8) for the most rows of a sequence;
// block WARPS · 32, dynamic shared memory SHARED_BYTES + 1024. No part of the launch depends on lengths, so that it can
// be recorded: SPLITS follows from the grid and the number of SMs, with one CTA per SM.
//
// Both products are transposed: the cache is the operand of 16 rows, and up to 8 query heads, of one row or of several,
// are the 8 columns of the other:
//     Sᵀ (16 tokens, 8 heads)   += K  (16 tokens, 16 channels) · qᵀ (16 channels, 8 heads)
//     Oᵀ (16 channels, 8 heads) += Vᵀ (16 channels, 16 tokens) · Pᵀ (16 tokens, 8 heads)
// Codes are decoded in registers, once for all query heads of a KV head; norms of tokens multiply Sᵀ and Pᵀ.
// Work is dealt out round-robin to the warps of all splits, in units of about equal bytes: first the quantized blocks,
// then the full-precision records in slices of 16 tokens. While a warp decodes values, it loads the next keys' codes.
// JOINS: attention.cuh, decode_work.cuh, decode_state.cuh, decode_full.cuh, decode_quantized.cuh.

// Adds the results of a CTA's warps and writes the sums of its columns to part_acc and part_ml.
__device__ __forceinline__ void merge(ColumnState &state, unsigned char *shared, float *part_acc, float *part_ml,
                                      const Work &work, int kv_heads) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tg = lane & 3;
    float *acc = reinterpret_cast<float *>(shared), *ml = acc + WARPS * HEADS * MERGE_ROW;
    __syncthreads();  // the sums take the place of the tables
#pragma unroll
    for (int c = 0; c < 2; ++c) {
        float sum = state.sum[c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        const int head = 2 * tg + c;
        if (head >= work.columns) continue;
        float *row = acc + (warp * HEADS + head) * MERGE_ROW + 2 * g;
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
            *reinterpret_cast<float2 *>(row + 16 * j) = make_float2(state.acc[j][c], state.acc[j][c + 2]);
        if (g == 0) *reinterpret_cast<float2 *>(ml + 2 * (warp * HEADS + head)) = make_float2(state.top[c], sum);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < work.columns * (DP / 4); e += WARPS * 32) {
        const int head = e / (DP / 4), channel = e % (DP / 4) * 4;
        float top = LOWEST, sum = 0.0f;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, ml[2 * (w * HEADS + head)]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 own = *reinterpret_cast<const float2 *>(ml + 2 * (w * HEADS + head));
            const float4 x = *reinterpret_cast<const float4 *>(acc + (w * HEADS + head) * MERGE_ROW + channel);
            const float rescale = exp2_fast(own.x - top);
            sum += own.y * rescale;
            total.x += x.x * rescale, total.y += x.y * rescale, total.z += x.z * rescale, total.w += x.w * rescale;
        }
        const long long at = work.vector(head, kv_heads) * gridDim.x + blockIdx.x;
        *reinterpret_cast<float4 *>(part_acc + at * DP + channel) = total;
        if (channel == 0) {
            part_ml[2 * at] = sum > 0.0f ? top : NEGATIVE_INFINITY;
            part_ml[2 * at + 1] = sum;
        }
    }
}

// The dynamic shared memory, at an address that the compiler knows: then it is an immediate of each lookup's load, and
// no instruction adds it. Up to sm_89 the compiler finds the address itself; from sm_90 on, where CTAs may be in
// clusters, it does not. The system reserves up to 1024 bytes at the start; this kernel has no static shared memory. If
// the system reserves less, the 1024 bytes that the launch adds to SHARED_BYTES make up for it.
__device__ __forceinline__ unsigned char *at_known_address(unsigned char *dynamic) {
#if __CUDA_ARCH__ >= 900
    if (shared_address(dynamic) > 1024) __trap();
    return static_cast<unsigned char *>(__cvta_shared_to_generic(1024));
#else
    return dynamic;
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_attention_kernel(float *part_acc, float *part_ml, const float *q, const unsigned char *keys,
                        const unsigned char *values, const unsigned char *full_k, const unsigned char *full_v,
                        const int *spans, const unsigned char *key_tables, const unsigned char *value_tables,
                        int span_stride, int kv_heads, int window, float scale) {
    DYNAMIC_SHARED(unsigned char, dynamic);
    unsigned char *const shared = at_known_address(dynamic);
    const int lane = threadIdx.x % 32;
    const Pools all = {keys, values, full_k, full_v, kv_heads};
    Work work = Work::find(spans, span_stride, kv_heads, window);
    if (STEP_ROWS > 1 && work.columns <= 0) return;  // another sequence has more rows
    Pools pools = all.at_head(work.kv_head);

    Codes codes;
    if constexpr (!ALL_FULL)
        if (work.count > 0) {
            const int id = work.quantized.ids[work.first];
            codes.keys.load(pools.key(id), 0, lane);
            codes.values.load(pools.value(id), 0, lane);
        }
    const int g = lane >> 2;
    ColumnState state(q + work.vector(g, kv_heads) * D, g < work.columns, scale * LOG2_E, lane);
    if constexpr (Tables::BYTES > 0)
        if (blockIdx.x < work.quantized.count) {  // a warp of this CTA has a quantized block
            Tables::fill(shared, key_tables, value_tables);
            __syncthreads();
        }
    if constexpr (!ALL_FULL) {
        const BlockMask block_mask(work, work.mask(window, lane));
        const int *const ids = work.quantized.ids + work.first;
        attend_blocks(state, codes, ids, work.stride, work.count, block_mask, pools, shared, lane);
        work = Work::find(spans, span_stride, kv_heads, window);
        pools = all.at_head(work.kv_head);
    }
    attend_full(state, work, work.mask(window, lane), pools, lane);
    merge(state, shared, part_acc, part_ml, work, kv_heads);
}

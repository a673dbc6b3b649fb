// Attention of a step's new tokens over the records of their sequences, Σ softmax(scale · q·k) v, in parts that
// combine.cu adds. T rows: one new token of each of B sequences, or up to STEP_ROWS.
//
// part_acc (T, H, SPLITS, DP): Σ 2^(score − max) v over what the split has seen, v still rotated; behind D there may be
// anything. part_ml (T, H, SPLITS, 2): max and Σ 2^(score − max); a split that saw nothing has −inf, 0 and acc 0.
// q (T, H, D) as the keys are: rotated, smoothed. keys, values (blocks, K, NBYTES), full_k, full_v (slots, K, …):
// records. spans (B, span_stride): `current` and `next` are full-precision records. A sequence of zeros sees nothing.
// window: tokens seen, 0 for all. Behind the newest token a full-precision record may have anything, NaN too.
// DEFINES: GROUP (H / K), WARPS, STEP_ROWS (1, or the most that a sequence may have). PRECOND: records aligned to 128
// bytes, part_acc and tables to 16, part_ml and q to 8; where STEP_ROWS > 1 it is at most N.
//
// Grid (SPLITS, K · chunks, B), where chunks are CHUNKS, or ceil(GROUP · rows / 8) for the most rows of a sequence;
// block WARPS · 32, dynamic shared memory SHARED_BYTES + 1024. Nothing of it depends on lengths, so that a recorded
// launch serves every step: SPLITS are for the machine, which has one CTA an SM.
//
// Both products are transposed, so that the cache is the operand of 16 rows and up to 8 query heads, of one row or
// several, are the 8 columns:
//     Sᵀ (16 tokens, 8 heads)   += K  (16 tokens, 16 channels) · qᵀ (16 channels, 8 heads)
//     Oᵀ (16 channels, 8 heads) += Vᵀ (16 channels, 16 tokens) · Pᵀ (16 tokens, 8 heads)
// Codes are decoded in registers, once for all heads of a KV head; norms of tokens multiply Sᵀ and Pᵀ.
// Work is dealt out in units of about as many bytes, to all warps of all splits in turn: first the quantized blocks,
// then the full-precision records in slices of 16 tokens. The codes of a warp's next block are on their way while
// values are decoded.
// JOINS: decode_work.cuh, decode_state.cuh, decode_full.cuh, decode_quantized.cuh.

// The sum over the warps of a CTA goes out, for each of its columns.
__device__ __forceinline__ void merge(State &state, unsigned char *shared, float *part_acc, float *part_ml,
                                      const Work &work, int kv_heads) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, tg = lane & 3;
    float *acc = reinterpret_cast<float *>(shared), *ml = acc + WARPS * HEADS * MERGE_ROW;
    __syncthreads();  // the tables are done with
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
        float top = NOTHING, sum = 0.0f;
        float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, ml[2 * (w * HEADS + head)]);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float2 own = *reinterpret_cast<const float2 *>(ml + 2 * (w * HEADS + head));
            const float4 x = *reinterpret_cast<const float4 *>(acc + (w * HEADS + head) * MERGE_ROW + channel);
            const float fade = exp2_fast(own.x - top);
            sum += own.y * fade;
            total.x += x.x * fade, total.y += x.y * fade, total.z += x.z * fade, total.w += x.w * fade;
        }
        const long long at = work.vector(head, kv_heads) * gridDim.x + blockIdx.x;
        *reinterpret_cast<float4 *>(part_acc + at * DP + channel) = total;
        if (channel == 0) {
            part_ml[2 * at] = sum > 0.0f ? top : __int_as_float(0xff800000);
            part_ml[2 * at + 1] = sum;
        }
    }
}

// The dynamic shared memory at an address that is a constant, and so a part of the instruction of every lookup; a sum
// of two registers would cost one more. Up to sm_89 the compiler sees that by itself; from sm_90 on, where CTAs may be
// in clusters, it does not. The first 1024 bytes are the system's; this kernel has no static shared memory. Where the
// system takes less, what the launch has beyond SHARED_BYTES makes up for it.
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
    Pools pools = all.of(work.kv_head);

    Codes codes;
    if constexpr (!ALL_EXACT)
        if (work.count > 0) {
            const int id = work.quantized.ids[work.first];
            codes.keys.load(pools.key(id), 0, lane);
            codes.values.load(pools.value(id), 0, lane);
        }
    const int g = lane >> 2;
    State state(q + work.vector(g, kv_heads) * D, g < work.columns, scale * 1.44269504f, lane);
    if constexpr (Tables::BYTES > 0)
        if (blockIdx.x < work.quantized.count) {  // any of the CTA's warps has a block
            Tables::fill(shared, key_tables, value_tables);
            __syncthreads();
        }
    if constexpr (!ALL_EXACT) {
        const Hidden hidden(work, work.sight(window, lane));
        const int *const ids = work.quantized.ids + work.first;
        attend_blocks(state, codes, ids, work.stride, work.count, hidden, pools, shared, lane);
        work = Work::find(spans, span_stride, kv_heads, window);
        pools = all.of(work.kv_head);
    }
    attend_full(state, work, work.sight(window, lane), pools, lane);
    merge(state, shared, part_acc, part_ml, work, kv_heads);
}

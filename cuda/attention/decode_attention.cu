// The op `attention` for a step: softmax(scale · q·k) v of new tokens over their sequences, scaled and rotated back. T
// rows: one new token of each of B sequences, or up to STEP_ROWS of each.
//
// out (T, H, D): factors (H), or null for ones, times each head, then diag(input_signs) · H/√ORDER · diag(output_signs)
// as in rotate.cu; with ORDER 1 there is no rotation, and nothing reads the signs `input_signs` and `output_signs` (D).
// A row without visible tokens gives 0. acc, ml: scratch for 2 · cells + CTAs sums of sums.cuh, where cells is B · K ·
// chunks. counts (cells · HEADS): zero before the launch, and again after it. q (T, H, D): transformed as the keys are.
// keys, values (blocks, K, NBYTES), full_k, full_v (slots, K, …): records. spans (B, span_stride): a Span for each
// sequence, whose `records` are in full_k and full_v; one of zeros sees no token. window: tokens that a
// query sees, itself included; 0 for all. After the newest token a full-precision record may hold anything, also NaN.
// sink_scores (H): read with SINK_SCORES, see attention.cuh.
// Grid (CTAs), best one per SM; block WARPS · 32, dynamic shared memory SHARED + 4 (2 B + 7 WARPS + 2) + 1024. chunks:
// CHUNKS, or ceil(GROUP · rows / 8) for the most rows of a sequence. No part of the launch depends on lengths, so that
// it can be recorded: every CTA computes from `spans` which units are its own (shares.cuh).
// DEFINES: GROUP (H / K), WARPS, STEP_ROWS (1, or the most rows of a sequence), ORDER, SHARED (bytes of tables and
// means, and then of sums), TO (type of out, default float; halves are clipped to ±65504, NaN stays), SOFTCAP (or not
// defined) and SINK_SCORES (0 or 1, default 0) as in attention.cuh.
// PRECOND: records aligned to 128 bytes, out, acc, tables, before and after to 16, ml and q to 8; STEP_ROWS <= N where
// it is above 1; ORDER divides D, and is at most 32 or D % 32 == 0.
//
// Both products are transposed: the cache is the operand of 16 rows, and up to 8 query heads are the 8 columns of the
// other (README.md). Codes are decoded in registers, once for all query heads of a KV head; norms of
// tokens multiply Sᵀ and Pᵀ. While a warp decodes values, it loads the next keys' codes. One CTA finishes a cell inside
// its share. In any other cell, a warp of each CTA stores its sum of a head, and the last one to do so, by `counts`,
// adds them up in the order of the row: the result is the same in every run.
// JOINS: attention.cuh, shares.cuh, decode_work.cuh, decode_records.cuh, hadamard.cuh, sums.cuh,
// decode_share.cuh.

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_attention_kernel(TO *out, float *acc, float *ml, int *counts, const float *q, const unsigned char *keys,
                        const unsigned char *values, const unsigned char *full_k, const unsigned char *full_v,
                        const int *spans, const unsigned char *key_tables, const unsigned char *value_tables,
                        const float *factors, const float *input_signs, const float *output_signs, int sequences,
                        int span_stride, int kv_heads, int chunks, int window, float scale, const float *sink_scores) {
    let_next_begin();
    // Tables are constants. They are on their way while the kernel waits and the first warp computes the row of units,
    // and are stored while the first codes are on theirs.
    const typename Tables::Loaded<WARPS * 32> tables(key_tables, value_tables);
    wait_for_previous();
    DYNAMIC_SHARED(unsigned char, dynamic);
    unsigned char *const shared = at_known_address(dynamic);
    const Plan plan(reinterpret_cast<int *>(shared + SHARED), spans, span_stride, sequences, kv_heads, window);
    const Pools pools = {keys, values, full_k, full_v, kv_heads};
    const Sums sums = {acc, reinterpret_cast<float2 *>(ml), sequences * kv_heads * chunks};
    if (threadIdx.x < 32)
        plan.fill();
    else
        plan.expect_spans(reinterpret_cast<int *>(shared), SHARED / 4);
    __syncthreads();
    attend_share({out, factors, input_signs, output_signs, sink_scores}, sums, counts, q, pools, tables, plan, shared,
                 chunks, scale);
}

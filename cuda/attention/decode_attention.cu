// The op `attention` for a step: softmax(scale · q·k) v of new tokens over their sequences, scaled and rotated back.
// T rows: one new token of each of B sequences, or up to STEP_ROWS of each.
//
// out (T, H, D): factors (H), or null for ones, times each head, then diag(before) · H/√ORDER · diag(behind) as in
// rotate.cu; with ORDER 1 there is no rotation, and the signs `before` and `behind` (D) are not read. A row without
// visible tokens gives 0.
// acc, ml: scratch for 2 · cells + CTAs sums of sums.cuh, where cells is B · K · chunks. counts (cells): zero
// before the launch, and again after it.
// q (T, H, D): transformed as the keys are. keys, values (blocks, K, NBYTES), full_k, full_v (slots, K, …): records.
// spans (B, span_stride): a Span for each sequence, whose `current` and `next` are in full_k and full_v; one of zeros
// sees no token. window: tokens that a query sees, itself included; 0 for all. Behind the newest token a
// full-precision record may hold anything, also NaN. sink_scores (H): read with SINK_SCORES, see attention.cuh.
// DEFINES: GROUP (H / K), WARPS, STEP_ROWS (1, or the most rows of a sequence), ORDER, SHARED (bytes of tables and
// means, and then of sums), TO (of out; float if it is not defined; halves are clipped to ±65504, NaN stays), SOFTCAP
// (or not defined) and SINK_SCORES (0 or 1, default 0) as in attention.cuh.
// PRECOND: records aligned to 128 bytes, acc and tables to 16, ml and q to 8; STEP_ROWS <= N where it is above 1; ORDER
// divides D, and is at most 32 or D % 32 == 0.
//
// Grid (CTAs), best one per SM; block WARPS · 32, dynamic shared memory SHARED + 4 (2 B + 7 WARPS + 3) + 1024.
// chunks: CHUNKS, or ceil(GROUP · rows / 8) for the most rows of a sequence. No part of the launch depends on lengths,
// so that it can be recorded: every CTA computes from `spans` which units are its own (shares.cuh).
//
// Both products are transposed: the cache is the operand of 16 rows, and up to 8 query heads, of one row or of several,
// are the 8 columns of the other:
//     Sᵀ (16 tokens, 8 heads)   += K  (16 tokens, 16 channels) · qᵀ (16 channels, 8 heads)
//     Oᵀ (16 channels, 8 heads) += Vᵀ (16 channels, 16 tokens) · Pᵀ (16 tokens, 8 heads)
// Codes are decoded in registers, once for all query heads of a KV head; norms of tokens multiply Sᵀ and Pᵀ.
// While a warp decodes values, it loads the next keys' codes.
//
// A cell inside one CTA's share is finished there. Of any other, each CTA stores its sum, and the last one to do so,
// by `counts`, adds them up. Sums are added in the order of the row, so the result is the same in every run. By
// rounding it depends on the number of CTAs and on the lengths of all sequences, which say where the row is cut.
// JOINS: last.cuh, attention.cuh, shares.cuh, decode_work.cuh, decode_state.cuh, decode_full.cuh, decode_quantized.cuh,
// sums.cuh.

// The dynamic shared memory, at an address that the compiler knows: then it is an immediate of each lookup's load, and
// no instruction adds it. Up to sm_89 the compiler finds the address itself; from sm_90 on, where CTAs may be in
// clusters, it does not. The system reserves up to 1024 bytes at the start; this kernel has no static shared memory. If
// the system reserves less, the 1024 bytes that the launch adds to SHARED make up for it.
__device__ __forceinline__ unsigned char *at_known_address(unsigned char *dynamic) {
#if __CUDA_ARCH__ >= 900
    if (shared_address(dynamic) > 1024) __trap();
    return static_cast<unsigned char *>(__cvta_shared_to_generic(1024));
#else
    return dynamic;
#endif
}

// The CTAs that share a cell: `count` from number `first` on.
struct Sharers {
    int first, count;

    __device__ __forceinline__ Sharers(const Shares &ctas, const Cell &cell)
        : first(ctas.taker(cell.start)), count(ctas.taker(cell.end - 1) - first + 1) {}
};

// Adds the sums of the CTA's warps, and those of all CTAs where this one is the last of a cell.
__device__ __forceinline__ void finish(unsigned char *shared, int *is_last, const Plan &plan, const Sums &sums,
                                       const Result &result, int *counts, int chunks) {
    const int warp = threadIdx.x / 32;
    const Shares ctas = plan.ctas(), warps = plan.warps(ctas);
    const int begin = ctas.begin(blockIdx.x), end = ctas.end(blockIdx.x);
    const WarpSums own(shared);
    __syncthreads();
    // The heads of all cells are dealt out to the warps.
    for (int unit = begin, c = warp; unit < end;) {
        const Cell cell = plan.cell(unit);
        const CellColumns columns(plan, cell.sequence, cell.number, chunks);
        const int cell_end = min(cell.end, end), number = sums.part(columns.cell, blockIdx.x);
        for (; c < columns.count; c += WARPS) {
            const HeadScale scale = result.scale(columns.head(c));
            HeadSum head = own.head(warps, unit, cell_end, c, sums, columns.cell);
            if (cell.start >= begin && cell.end <= end) result.write(head, columns.vector(c, plan.kv_heads), scale);
            else head.store(sums.acc_at(number) + c * DP, sums.ml_at(number) + 2 * c);
        }
        c -= columns.count, unit = cell_end;
    }
    // Only the first and the last cell can have units of other CTAs.
    const Cell first = plan.cell(begin), last = plan.cell(end - 1);
    const bool shares_first = first.start < begin || first.end > end;
    const bool shares_last = last.start != first.start && last.end > end;
    if (!shares_first && !shares_last) return;
    const Sharers of_first(ctas, first), of_last(ctas, last);
    __syncthreads();
    if (threadIdx.x < 2) {
        const Cell own_cell = threadIdx.x == 0 ? first : last;
        const int number = CellColumns(plan, own_cell.sequence, own_cell.number, chunks).cell;
        const bool is_shared = threadIdx.x == 0 ? shares_first : shares_last;
        const int sharing = threadIdx.x == 0 ? of_first.count : of_last.count;
        is_last[threadIdx.x] = is_shared && arrives_last(counts + number, sharing);
    }
    __syncthreads();
    int c = warp;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        if (!is_last[i]) continue;
        const Sharers sharers = i == 0 ? of_first : of_last;
        const CellColumns columns(plan, i == 0 ? first.sequence : last.sequence, i == 0 ? first.number : last.number,
                                  chunks);
        const int number = sums.part(columns.cell, sharers.first);
        const float *const acc = sums.acc_at(number), *const ml = sums.ml_at(number);
        for (; c < columns.count; c += WARPS) {
            const HeadScale scale = result.scale(columns.head(c));
            HeadSum head;
            head.add<HeadSum::FAR_BATCH>(acc + c * DP, HEADS * DP, ml + 2 * c, 2 * HEADS, sharers.count);
            result.write(head, columns.vector(c, plan.kv_heads), scale);
        }
        c -= columns.count;
    }
}

// Zeros for the rows of sequences that see no token.
__device__ __forceinline__ void clear_unseen(const Plan &plan, TO *out) {
    if (STEP_ROWS > 1) return;  // such a sequence has no rows
    const int size = plan.kv_heads * GROUP * D;
    for (int sequence = blockIdx.x; sequence < plan.sequences; sequence += gridDim.x) {
        if (plan.stretches[sequence].size > 0) continue;
        for (int i = threadIdx.x; i < size; i += WARPS * 32) out[(long long)sequence * size + i] = from_float<TO>(0.0f);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
decode_attention_kernel(TO *out, float *acc, float *ml, int *counts, const float *q, const unsigned char *keys,
                        const unsigned char *values, const unsigned char *full_k, const unsigned char *full_v,
                        const int *spans, const unsigned char *key_tables, const unsigned char *value_tables,
                        const float *factors, const float *before, const float *behind, int sequences, int span_stride,
                        int kv_heads, int chunks, int window, float scale, const float *sink_scores) {
    let_next_begin();
    // Tables are constants. They are on their way while the kernel waits and the first warp computes the row of units.
    const typename Tables::Loaded<WARPS * 32> tables(key_tables, value_tables);
    wait_for_previous();
    DYNAMIC_SHARED(unsigned char, dynamic);
    unsigned char *const shared = at_known_address(dynamic);
    int *const is_last = reinterpret_cast<int *>(shared + SHARED);
    const Plan plan(is_last + 2, spans, span_stride, sequences, kv_heads, window);
    const Pools pools = {keys, values, full_k, full_v, kv_heads};
    const Sums sums = {acc, ml, sequences * kv_heads * chunks};
    plan.fill();
    tables.store(shared);
    __syncthreads();
    const bool has_units = plan.begin();
    clear_unseen(plan, out);
    if (!has_units) return;

    ColumnState state;
    Codes codes;
    const auto begin_turn = [&] {
        plan.begin_turn();
        const Work work = Work::find(plan, chunks);
        const int lane = thread_read_anew() % 32, g = lane >> 2;
        codes = Codes();  // the registers of the last cell's codes are free
        if constexpr (!ALL_FULL)
            if (work.count > 0) {
                // Lane l has block l of the turn, or the last one.
                const int number = min(lane, work.count - 1);
                const unsigned own = pools.record(work.quantized.ids[work.first + number], work.columns.kv_head);
                const unsigned record = __shfl_sync(ALL_LANES, own, 0);
                codes.keys.load(pools.key(record), 0, lane);
                codes.values.load(pools.value(record), 0, lane);
                if (number == lane) {
                    expect_norms<KeyCodec, KeyLayout>(pools.key(own));
                    expect_norms<ValueCodec, ValueLayout>(pools.value(own));
                }
                if (lane == 0) plan.turns[thread_read_anew() / 32].oldest = work.visible.oldest - work.end();
                __syncwarp();
            }
        const bool is_there = work.units > 0 && g < work.columns.count;
        state.start(q + work.columns.vector(g, kv_heads) * D, is_there, scale * LOG2_E, lane);
    };
    begin_turn();
#pragma unroll 1
    for (;;) {
        const int lane = threadIdx.x % 32;
        if constexpr (!ALL_FULL) {
            const Work work = Work::find(plan, chunks);
            const BlockMask block_mask(plan, work, work.mask(window, lane));
            attend_blocks(state, codes, plan, chunks, work.count, block_mask, pools, shared, lane);
        }
        {
            const Work work = Work::find(plan, chunks);
            attend_full(state, work, work.mask(window, lane), pools, lane);
        }
        const Work work = Work::find(plan, chunks);
        const int warp = thread_read_anew() / 32, columns = work.units > 0 ? work.columns.count : 0;
        const bool ends_share = plan.turns[warp].next >= plan.turns[warp].end;
        if (ends_share) __syncthreads();  // the sums take the place of the tables
        const WarpSums own(shared);
        const int at = warp * HEADS, cell = work.columns.cell;
        store_sum(state, ends_share ? own.acc + at * MERGE_ROW : sums.acc_at(cell), ends_share ? MERGE_ROW : DP,
                  ends_share ? own.ml + 2 * at : sums.ml_at(cell), columns, thread_read_anew() % 32);
        if (ends_share) break;
        begin_turn();
    }
    finish(shared, is_last, plan, sums, Result(out, factors, sink_scores, before, behind), counts, chunks);
}

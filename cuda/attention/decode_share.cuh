// What a CTA of decode_attention.cu does with its share of the row of units. Part of that file.

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

// A head of a cell that other CTAs share: the sum of `sharing` CTAs, from sum `number` on, is its result.
struct SharedHead {
    int sharing, number, column;
    int count, vector;  // where its CTAs are counted, and its result is written
    HeadScale scale;

    __device__ __forceinline__ SharedHead lane_head(int lane) const {
        const auto from = [&](auto x) { return __shfl_sync(ALL_LANES, x, lane); };
        return {from(sharing), from(number),        from(column),
                from(count),   from(vector), {from(scale.factor), from(scale.sink_score)}};
    }
};

// Adds the sums of the CTA's warps; the last warp that has added its own adds the sums of all CTAs.
__device__ __forceinline__ void finish(unsigned char *shared, const Plan &plan, const Sums &sums, const Result &result,
                                       int *counts, int chunks) {
    const int lane = threadIdx.x % 32;
    const Shares ctas = plan.ctas(), warps = plan.warps(ctas);
    const int begin = ctas.begin(blockIdx.x), end = ctas.end(blockIdx.x);
    const WarpSums own(shared);
    SharedHead waiting = {};  // lane i has the i-th head of this warp
    int waits = 0;
    __syncthreads();
    // The heads of all cells are dealt out to the warps.
#pragma unroll 1
    for (int unit = begin, c = threadIdx.x / 32; unit < end;) {
        const Cell cell = plan.cell(unit);
        const CellColumns columns(plan, cell.sequence, cell.number, chunks);
        const int cell_end = min(cell.end, end);
        const bool is_shared = cell.start < begin || cell.end > end;
#pragma unroll 1
        for (; c < columns.count; c += WARPS) {
            const int vector = columns.vector(c, plan.kv_heads);
            const HeadScale scale = result.scale(columns.head(c));
            HeadSum head = own.head(warps, unit, cell_end, c, sums, columns.cell);
            if (!is_shared) {
                result.write(head, vector, scale);
                continue;
            }
            const int first = ctas.taker(cell.start), sharing = ctas.taker(cell.end - 1) - first + 1;
            const int number = sums.part(columns.cell, first), mine = number + blockIdx.x - first;
            head.store(sums.acc_at(mine, c), sums.ml_at(mine, c));
            if (lane == waits) waiting = {sharing, number, c, columns.cell * HEADS + c, vector, scale};
            ++waits;
        }
        c -= columns.count, unit = cell_end;
    }
    static_assert(2 * HEADS <= 32, "of the first and of the last cell, which alone are shared, a lane has a head");
    if (waits == 0) return;
    __syncwarp();  // lanes have stored their channels
    const bool is_last = lane < waits && arrives_last(counts + waiting.count, waiting.sharing);
    __syncwarp();  // and may read the sums of other CTAs
#pragma unroll 1
    for (unsigned lasts = __ballot_sync(ALL_LANES, is_last); lasts; lasts &= lasts - 1) {
        const SharedHead own_head = waiting.lane_head(__ffs(lasts) - 1);
        HeadSum head;
        head.add_all(sums.acc_at(own_head.number, own_head.column), sums.ml_at(own_head.number, own_head.column),
                     own_head.sharing);
        result.write(head, own_head.vector, own_head.scale);
    }
}

// Zeros for the rows of sequences that see no token.
__device__ __forceinline__ void clear_unseen(const Plan &plan, TO *out) {
    if (STEP_ROWS > 1) return;  // such a sequence has no rows
    const int size = plan.kv_heads * GROUP * D;
    for (int sequence = blockIdx.x; sequence < plan.sequences; sequence += gridDim.x) {
        if (plan.stretches[sequence].size > 0) continue;
#pragma unroll 1
        for (int i = threadIdx.x; i < size; i += WARPS * 32) out[(long long)sequence * size + i] = from_float<TO>(0.0f);
    }
}

// Attention over the CTA's share of the plan's row; called by all threads. tables: on their way, and stored while the
// first codes are on theirs. The others are the kernel's arguments.
__device__ __forceinline__ void attend_share(const Target &target, const Sums &sums, int *counts, const float *q,
                                             const Pools &pools, const typename Tables::Loaded<WARPS * 32> &tables,
                                             const Plan &plan, unsigned char *shared, int chunks, float scale) {
    const bool has_units = plan.begin();
    clear_unseen(plan, target.out);
    if (!has_units) return;

    Codes codes;
    Queries queries;
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
                if constexpr (BY_GROUPS) {
#pragma unroll
                    for (int group = 0; group < AHEAD; ++group)
                        load_group(codes.keys, pools.key(record), 0, lane, group);
                    expect_part({record, 0, 0}, pools, lane);
                } else {
                    codes.keys.load(pools.key(record), 0, lane);
                    if constexpr (!ONE_SIDE_AT_A_TIME) codes.values.load(pools.value(record), 0, lane);
                }
                if (number == lane) {
                    expect_norms<KeyCodec, KeyLayout>(pools.key(own));
                    expect_norms<ValueCodec, ValueLayout>(pools.value(own));
                }
                if (lane == 0) plan.turns[thread_read_anew() / 32].oldest = work.visible.oldest - work.end();
                __syncwarp();
            }
        const bool is_there = work.units > 0 && g < work.columns.count;
        queries.load(q + (long long)work.columns.vector(g, plan.kv_heads) * D, is_there, lane);
    };
    begin_turn();
    tables.store(shared);
    __syncthreads();
    ColumnState state;
#pragma unroll 1
    for (;;) {
        state.start(queries, scale * LOG2_E);
        if constexpr (!ALL_FULL) {
            const int lane = threadIdx.x % 32;
            const Work work = Work::find(plan, chunks);
            const BlockMask block_mask(plan, work, work.mask(plan.window, lane));
            attend_blocks(state, codes, plan, chunks, work.count, block_mask, pools, shared, lane);
        }
        {
            const int lane = thread_read_anew() % 32;
            const Work work = Work::find(plan, chunks);
            attend_full(state, work, work.mask(plan.window, lane), pools, lane);
        }
        const Work work = Work::find(plan, chunks);
        const int warp = thread_read_anew() / 32, columns = work.units > 0 ? work.columns.count : 0;
        const bool ends_share = plan.turns[warp].next >= plan.turns[warp].end;
        if (ends_share) __syncthreads();  // the sums take the place of the tables
        const WarpSums own(shared);
        const int at = warp * HEADS, cell = work.columns.cell;
        store_sum(state, ends_share ? own.acc + at * MERGE_ROW : sums.acc_at(cell), ends_share ? MERGE_ROW : DP,
                  ends_share ? own.ml + at : sums.ml_at(cell), columns, thread_read_anew() % 32);
        if (ends_share) break;
        begin_turn();
    }
    finish(shared, plan, sums, Result(target), counts, chunks);
}

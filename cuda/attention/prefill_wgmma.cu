// Attention of a prompt on a GPU of compute capability 9.0: prefill_attention.cu for keys and values in half precision,
// with products of warpgroups. Arguments and results are those of that kernel; key_tables and value_tables are null.
//
// A CTA has two warpgroups of 64 rows of scores each: row r is token r / GROUP, query head r % GROUP of the KV head. It
// loops over the parts of blocks (64 tokens) that are visible to any of its rows. Queries, scores, weights and results
// are in registers, keys and values of a part in tiles of shared memory (wgmma.cuh), in rings of SLOTS each. Values are
// multiplied by the weights of a part while the weights of the next one are computed.
//
// A record has neighbouring channels of a token, or tokens of a channel, in pieces of 8 bytes, which are copied as they
// are. Of 16 numbers, piece tg has 2tg, 2tg + 1, 2tg + 8 and 2tg + 9, so that a thread's columns of operand A stand for
// other numbers than wgmma says: those of `spread`. Queries are loaded so. Weights are where scores were, so their
// tokens must be in the order of the values': keys are copied to the columns of a tile in that order.
//
// Grid (ceil(T · GROUP / (WARPS · 16)), K), block WARPS · 32. DEFINES: GROUP (H / K), WARPS (8), SLOTS (of each ring),
// SHARED (bytes of dynamic shared memory): the rings, and 896 bytes so that they can begin at a multiple of 1,024;
// SOFTCAP (or not defined) and SINK_SCORES (0 or 1, default 0) as in attention.cuh.
// PRECOND: that of prefill_attention.cu; keys without means; D 64 or 128; N a multiple of 64. Compiled for sm_90a.
// JOINS: attention.cuh, visible_parts.cuh, wgmma.cuh, wgmma_rows.cuh.

static_assert(KEYS_ARE_FULL && VALUES_ARE_FULL && PART == 64 && D % 64 == 0 && WARPS % 4 == 0 && SLOTS >= 2, "");
static_assert(SHARED == 896 + 2 * SLOTS * PART_BYTES, "both rings, from a multiple of 1,024 on");

// Starts the copy of a part's keys. A column of a tile is a token, and its rows are 64 channels: of 128, the upper half
// is in a second tile. A warp copies 256 bytes in a row, and the pieces of 16 of its threads, of g and g + 2, go to
// different banks.
__device__ __forceinline__ void copy_keys(unsigned char *to, const unsigned char *part, int warp, int lane) {
    const int tg = lane % 4, half = lane / 4 % 2, g = warp % 2 * 4 + lane / 8 % 2 * 2 + lane / 16;
#pragma unroll
    for (int m = 0; m < PT; m += WARPS / 2) {
        const int i = m + warp / 2, column = 16 * i + g / 2 * 4 + half * 2 + g % 2;
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
            cp_async<8>(to + s / 4 * PART * COLUMN_BYTES + swizzled(column, s % 4 * 32 + tg * 8),
                        part + ((s * PT + i) * 32 + g * 4 + tg) * 16 + half * 8);
    }
}

// Calls visit(place in the tile, byte of the part, u, tg) for each piece of values that the thread copies. A column of
// the tile is a channel, and its rows are the part's tokens.
template <class Visit>
__device__ __forceinline__ void visit_values(int warp, int lane, const Visit &visit) {
    const int tg = lane % 4, half = lane / 16, g = warp % 2 * 4 + lane / 4 % 4;
#pragma unroll
    for (int m = 0; m < STEPS; m += WARPS / 2) {
        const int j = m + warp / 2, column = 16 * j + 2 * g + half;
#pragma unroll
        for (int u = 0; u < PT; ++u)
            visit(swizzled(column, u * 32 + tg * 8), ((u * STEPS + j) * 32 + g * 4 + tg) * 16 + half * 8, u, tg);
    }
}

// Clears the values of tokens after `newest`, which have weight 0 but may be NaN, where the thread has copied them.
__device__ __forceinline__ void clear_values(unsigned char *values, int start, int newest, int warp, int lane) {
    visit_values(warp, lane, [&](int place, int, int u, int tg) {
        unsigned *const words = reinterpret_cast<unsigned *>(values + place);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int token = start + 16 * u + 8 * r + 2 * tg;
            if (token > newest) words[r] = 0;
            else if (token == newest) words[r] &= 0xffffu;
        }
    });
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
prefill_wgmma_kernel(float *out, const float *q, const unsigned char *keys, const unsigned char *values,
                     const unsigned char *full_k, const unsigned char *full_v, const unsigned char *current_k,
                     const unsigned char *current_v, const int *spans, const unsigned char *, const unsigned char *,
                     const float *factors, int span_stride, int kv_heads, int heads, long long q_stride, int window,
                     float scale, const float *sink_scores) {
    DYNAMIC_SHARED(unsigned char, shared);
    unsigned char *const key_ring = shared + (0u - shared_address(shared)) % PATTERN_BYTES;
    unsigned char *const value_ring = key_ring + SLOTS * PART_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    const Span &span = span_at(spans, span_stride, 0);
    const int position = span.position, newest = position + span.rows - 1;
    const int first = (gridDim.x - 1 - blockIdx.x) * WARPS * 16;  // the last rows first: they take longest
    const int last = min(first + WARPS * 16, span.rows * GROUP) - 1;
    if (first > last) return;
    const VisibleParts parts(span, position + first / GROUP, position + last / GROUP, window);
    const SidePools key_pools = {keys, full_k, current_k, kv_heads};
    const SidePools value_pools = {values, full_v, current_v, kv_heads};
    const int count = parts.count();
    auto keys_of = [&](int n) { return key_ring + n % SLOTS * PART_BYTES; };
    auto values_of = [&](int n) { return value_ring + n % SLOTS * PART_BYTES; };

    // Stage n has the keys of part n and the values of the one before, one group of copies.
    auto start_stage = [&](int n) {
        if (n < count) copy_keys(keys_of(n), parts.at(n).full(key_pools), warp, lane);
        if (n > 0 && n <= count) {
            const unsigned char *const part = parts.at(n - 1).full(value_pools);
            unsigned char *const to = values_of(n - 1);
            visit_values(warp, lane, [&](int place, int byte, int, int) { cp_async<8>(to + place, part + byte); });
        }
        cp_async_commit();
    };
    // Makes a stage that has arrived known to all threads and their products. What they have used is free from then on.
    auto take_stage = [&] {
        fence_async_proxy();
        __syncthreads();
    };

    const Rows rows = {first + warp * 16, last, position};
    for (int n = 0; n < SLOTS - 1; ++n) start_stage(n);
    Queries queries(q + span.first_row * q_stride + head * GROUP * D, q_stride, rows, scale * LOG2_E, lane);
    RowState state;
    Scores scores;
    cp_async_wait<SLOTS - 2>();
    take_stage();
    begin(queries, state, scores);
    score(scores, queries, keys_of(0));
    wgmma_commit();
    start_stage(SLOTS - 1);
    wait<0>(scores);
    state.weigh(scores, rows, parts.at(0).start, window, lane);
    state.take(scores);
#pragma unroll 1
    for (int n = 1; n < count; ++n) {
        cp_async_wait<SLOTS - 2>();
        take_stage();
        begin(queries, state, scores);
        score(scores, queries, keys_of(n));
        wgmma_commit();
        state.add_values(values_of(n - 1));
        wgmma_commit();
        start_stage(n + SLOTS - 1);  // while the products are computed
        wait<1>(scores);
        state.weigh(scores, rows, parts.at(n).start, window, lane);
        state.wait_for_values();
        state.take(scores);
    }
    cp_async_wait<0>();
    const int start = parts.at(count - 1).start;
    if (start + PART - 1 > newest) clear_values(values_of(count - 1), start, newest, warp, lane);
    take_stage();
    begin(queries, state, scores);
    state.add_values(values_of(count - 1));
    wgmma_commit();
    state.wait_for_values();
    if (first + warp * 16 > last) return;
    const float factor = factors ? factors[head * GROUP] : 1.0f;
    state.write(out + ((long long)span.first_row * heads + head * GROUP) * D, heads, rows, factor,
                SINK_SCORES ? sink_scores + head * GROUP : nullptr, lane);
}

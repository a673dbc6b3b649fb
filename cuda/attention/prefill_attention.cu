// Causal attention of the new rows of one sequence over [sink | quantized blocks | current], all of them records.
//
// out float (T, H, D): Σ softmax(scale · q·k) v for every row and head, v as stored, times the head's factor: factors
// (H), alike for the heads that read one KV head, or null for ones. q float: H vectors of D at q + r · q_stride for row
// r, turned as the keys are. keys, values (blocks, K, bytes): quantized records; full_k, full_v (slots, K, bytes): the
// sink's; current_k, current_v (records, K, bytes): those that have the new rows. spans: one row, as for
// decode_attention.cu. A row at position p sees tokens p − window + 1 … p; from the first on if window is 0.
//
// A CTA has WARPS · WARP_ROWS rows of scores: row r is token r / GROUP, query head r % GROUP of the KV head. It walks
// over the parts of blocks (PART tokens) that any of its rows sees. A part's keys lie in shared memory as in an exact
// record, and so do its values: a tile there, the A operand of 16 rows, is the B operand of two products, and a lane
// reads both at once: registers 0, 2 are rows 0 … 7 and 1, 3 rows 8 … 15, which are tokens of keys, even and odd
// channels of values. Full-precision parts are copied. Quantized ones are decoded once for all rows, each warp some
// tiles. A part's values come while its keys are used, the next part's keys while its values are; half of the warps
// decode before they multiply, the others after, so that one waits for memory while the other computes.
//
// Grid (ceil(T · GROUP / (WARPS · WARP_ROWS)), K), block WARPS · 32. DEFINES: GROUP (H / K), WARPS, WARP_ROWS (16, 32)
// Dynamic shared memory SHARED_BYTES: tables of both codecs, keys and values of a part, and the queries if WARP_ROWS is
// 32 and DP > 64.
// WARP_ROWS 32 reads shared memory half as often. Registers and 99 KB suffice for it up to DP 64, and to DP 128 where
// both sides are f16 without means. Their layouts serve every cache as long as there are no quantized blocks.
// PRECOND: the new rows are in their records; out aligned to 16 bytes, q to 8, q_stride even. Behind the newest token
// a full-precision record may have anything, NaN too.
// JOINS: prefill_parts.cuh, prefill_rows.cuh.

// Both jobs of a warp between two barriers: bring a part of one side, use a part of the other. Copies go on by
// themselves, and begin at once; of the warps that decode, half multiply first, if there are registers for that.
template <class Bring, class Use>
__device__ __forceinline__ void both(Region region, int warp, const Bring &bring, const Use &use) {
    if constexpr ((RAW_KEYS && RAW_VALUES) || DP > 128) {
        bring();
        use();
    } else {
        const bool bring_first = region != CODED || warp * 2 < WARPS;
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {  // a loop, so that the text of each is there once
            if ((turn == 0) == bring_first) bring();
            else use();
        }
    }
    cp_async_wait<0>();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
prefill_attention_kernel(float *out, const float *q, const unsigned char *keys, const unsigned char *values,
                         const unsigned char *full_k, const unsigned char *full_v, const unsigned char *current_k,
                         const unsigned char *current_v, const int *spans, const unsigned char *key_tables,
                         const unsigned char *value_tables, const float *factors, int span_stride, int kv_heads,
                         int heads, long long q_stride, int window, float scale) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    const Span &span = span_at(spans, span_stride, 0);
    const int position = span.position, held_newest = position + span.rows - 1;
    const int first = (gridDim.x - 1 - blockIdx.x) * WARPS * WARP_ROWS;  // last rows first: they take longest
    const int last = min(first + WARPS * WARP_ROWS, span.rows * GROUP) - 1;
    if (first > last) return;
    const Walk walk(span, kv_heads, head, position + first / GROUP, position + last / GROUP, window);
    const Pools key_pools = {keys, full_k, current_k}, value_pools = {values, full_v, current_v};
    auto bring_keys = [&](const Part &part) {
        bring<RAW_KEYS, KeyLayout>(shared + KEYS, part, key_pools, [&](const unsigned char *record) {
            decode_keys(shared + KEYS, record, part.number, Tables::keys(shared), warp, lane);
        });
    };
    auto bring_values = [&](const Part &part) {
        bring<RAW_VALUES, ValueLayout>(shared + VALUES, part, value_pools, [&](const unsigned char *record) {
            decode_values(shared + VALUES, record, part.number, Tables::values(shared), warp, lane);
        });
    };

    if (walk.quantized > 0) Tables::fill(shared, key_tables, value_tables);
    const Rows rows = {first + warp * WARP_ROWS, last, position};
    const Queries queries(q + span.first_row * q_stride + head * GROUP * D, q_stride, rows, scale * 1.44269504f,
                          shared + QUERIES + warp * (MT * STEPS * 512), lane);
    State state;
    __syncthreads();

    const int parts = walk.parts();
#pragma unroll 1
    for (int n = -1; n < parts; ++n) {  // −1: nothing is there to be used yet
        const Part part = walk.at(max(n, 0)), next = walk.at(min(n + 1, parts - 1));
        const bool seen = n >= 0 && rows.see(part.start, window);
        if (n >= 0) {
            both(part.region, warp, [&] { bring_values(part); }, [&] {
                if (seen) state.weigh(queries, shared + KEYS, rows, part.start, window, lane);
            });
            // Read again where registers are short.
            const int newest = DP > 128 ? position + span.rows - 1 : held_newest;
            if (part.start + PART - 1 > newest) clear_values(shared + VALUES, part.start, newest);
            __syncthreads();
        }
        both(next.region, warp, [&] { if (n + 1 < parts) bring_keys(next); }, [&] {
            if (seen) state.add(shared + VALUES, lane);
        });
        __syncthreads();
    }
    if (!rows.any()) return;
    const float factor = factors ? factors[head * GROUP] : 1.0f;
    state.write(out + ((long long)span.first_row * heads + head * GROUP) * D, heads, rows, factor, lane);
}

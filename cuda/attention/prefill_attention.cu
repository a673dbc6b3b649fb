// The op `attention` for prompts: causal attention of the new rows of each sequence over its records, [sink | quantized
// blocks | full precision].
//
// out float (T, H, D): Σ softmax(scale · q·k) v for every row and head, v as stored, times the head's factor. factors
// (H), equal for the query heads of one KV head, or null for ones. q float: H vectors of D at q + r · q_stride for row
// r, transformed as the keys are. keys, values (blocks, K, bytes): quantized records; full_k, full_v (slots, K, bytes):
// the sink's records; current_k, current_v (records, K, bytes): those of the newest blocks and of the new rows. spans:
// a Span for each sequence. tiles (tiles, 2): the index of a span, and the first of its T · GROUP rows of scores that a
// CTA has. A row at position p sees tokens p − window + 1 … p, or 0 … p if window is 0; up to its span's `sees`, if
// that is later. sink_scores (H): read with SINK_SCORES, see attention.cuh.
// Grid (tiles, K), block WARPS · 32. DEFINES: GROUP (H / K), WARPS, WARP_ROWS (16 or 32), SHARED (bytes of dynamic
// shared memory): tables of both codecs, keys and values of a part, and the queries if WARP_ROWS is 32 and DP > 64;
// SOFTCAP (or not defined) and SINK_SCORES (0 or 1, default 0) as in attention.cuh.
// WARP_ROWS 32 reads shared memory half as often; registers and 99 KB suffice for it up to DP 64, and up to DP 128 if
// both sides are f16 without means.
// PRECOND: the new rows are in their records; out aligned to 16 bytes, q to 8, q_stride even. After the newest token a
// full-precision record may hold anything, also NaN.
//
// A CTA has at most WARPS · WARP_ROWS rows of scores of a sequence: row r is token r / GROUP, query head r % GROUP of
// the KV head. It loops over the parts of blocks (PART tokens) that are visible to any of its rows. Keys and values of
// a part lie in shared memory as in a full-precision record: a tile, an A operand of 16 rows there, serves as the B
// operands of two products, and a lane reads both at once. Registers 0, 2 have rows 0 … 7, and 1, 3 rows 8 … 15: tokens
// for keys; even and odd channels for values. Full-precision parts are copied; quantized parts are decoded once for all
// rows, some tiles by each warp. A part's values are loaded while its keys are used, the next part's keys while its
// values are used. Half of the warps decode before they multiply, the others after, so that loads overlap with
// computation.
// JOINS: attention.cuh, visible_parts.cuh, decode_parts.cuh, prefill_rows.cuh.


// The two tasks of a warp between two barriers: fetch a part of one side, use a part of the other. Copies are
// asynchronous and start first; of the warps that decode, half multiply first, if there are registers for that.
template <class Fetch, class Use>
__device__ __forceinline__ void overlap(Region region, int warp, const Fetch &fetch, const Use &use) {
    if constexpr ((KEYS_ARE_FULL && VALUES_ARE_FULL) || DP > 128) {
        fetch();
        use();
    } else {
        const bool fetch_first = region != Region::QUANTIZED || warp * 2 < WARPS;
#pragma unroll 1
        for (int step = 0; step < 2; ++step) {  // a loop, so that the code of each is there once
            if ((step == 0) == fetch_first) fetch();
            else use();
        }
    }
    cp_async_wait<0>();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
prefill_attention_kernel(float *out, const float *q, const unsigned char *keys, const unsigned char *values,
                         const unsigned char *full_k, const unsigned char *full_v, const unsigned char *current_k,
                         const unsigned char *current_v, const int *spans, const int *tiles,
                         const unsigned char *key_tables, const unsigned char *value_tables, const float *factors,
                         int span_stride, int kv_heads, int heads, long long q_stride, int window, float scale,
                         const float *sink_scores
) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
    // Wide heads leave no register for what the compiler would keep over the loop: for sm_90 a part of the span's
    // address, in full precision; for newer ones rows of scores, from the number of the lane, otherwise. For older
    // architectures it would keep more.
    constexpr bool IS_WIDE = DP > 128, IS_FULL = KEYS_ARE_FULL && VALUES_ARE_FULL;
#if __CUDA_ARCH__ == 900
    constexpr bool HIDES_ADDRESS = IS_WIDE && IS_FULL, READS_LANE = false;
#elif __CUDA_ARCH__ >= 1000 || !defined(__CUDA_ARCH__)
    constexpr bool HIDES_ADDRESS = false, READS_LANE = IS_WIDE && !IS_FULL;
#else
    constexpr bool HIDES_ADDRESS = false, READS_LANE = false;
#endif
    const auto own_lane = [&] { return READS_LANE ? thread_read_anew() % 32 : lane; };
    const unsigned number = tiles[2 * blockIdx.x];
    const auto *const from = reinterpret_cast<const unsigned char *>(spans);
    const auto *const hidden = reinterpret_cast<const Span *>(at_record<4>(from, number * span_stride));
    const Span &span = HIDES_ADDRESS ? *hidden : span_at(spans, span_stride, int(number));
    const int position = span.position, kept_newest = position + span.rows - 1;
    const int first = tiles[2 * blockIdx.x + 1], last = min(first + WARPS * WARP_ROWS, span.rows * GROUP) - 1;
    const VisibleParts parts(span, position + first / GROUP, max(position + last / GROUP, span.sees), window);
    const SidePools key_pools = {keys, full_k, current_k, kv_heads};
    const SidePools value_pools = {values, full_v, current_v, kv_heads};
    auto fetch_keys = [&](const Part &part) {
        fetch<KEYS_ARE_FULL, KeyLayout>(shared + KEYS, part, key_pools, [&](const unsigned char *record) {
            const int thread = decoding_thread();
            decode_keys(shared + KEYS, record, part.number, Tables::keys(shared), thread / 32, thread % 32);
        });
    };
    auto fetch_values = [&](const Part &part) {
        fetch<VALUES_ARE_FULL, ValueLayout>(shared + VALUES, part, value_pools, [&](const unsigned char *record) {
            const int thread = decoding_thread();
            decode_values(shared + VALUES, record, part.number, Tables::values(shared), thread / 32, thread % 32);
        });
    };

    if (parts.quantized > 0) Tables::fill<WARPS * 32>(shared, key_tables, value_tables);
    const Rows rows = {first + warp * WARP_ROWS, last, position, span.sees};
    const Queries queries(q + span.first_row * q_stride + head * GROUP * D, q_stride, rows, scale * LOG2_E,
                          shared + QUERIES + warp * (MT * STEPS * 512), lane);
    RowState state;
    __syncthreads();

    const int count = parts.count();
#pragma unroll 1
    for (int n = -1; n < count; ++n) {  // at −1 there is nothing to use yet
        const Part part = parts.at(max(n, 0)), next = parts.at(min(n + 1, count - 1));
        const bool is_visible = n >= 0 && rows.see_any(part.start, window);
        if (n >= 0) {
            overlap(part.region, warp, [&] { fetch_values(part); }, [&] {
                if (is_visible) state.add_keys(queries, shared + KEYS, rows, part.start, window, own_lane());
            });
            // Computed again where registers are short.
            const int newest = DP > 128 ? position + span.rows - 1 : kept_newest;
            if (part.start + PART - 1 > newest) clear_values(shared + VALUES, part.start, newest);
            __syncthreads();
        }
        overlap(next.region, warp, [&] { if (n + 1 < count) fetch_keys(next); }, [&] {
            if (is_visible) state.add_values(shared + VALUES, own_lane());
        });
        __syncthreads();
    }
    if (!rows.any()) return;
    const float factor = factors ? factors[head * GROUP] : 1.0f;
    state.write(out + ((long long)span.first_row * heads + head * GROUP) * D, heads, rows, factor,
                SINK_SCORES ? sink_scores + head * GROUP : nullptr, own_lane());
}

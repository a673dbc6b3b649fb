// Attention of a step over full-precision records. Part of decode_attention.cu.

// All pools of records. A KV head's record of a block or slot has a number; the pools' addresses stay kernel arguments,
// and take no registers.
struct Pools {
    const unsigned char *keys, *values, *full_keys, *full_values;
    int kv_heads;

    __device__ __forceinline__ unsigned record(int id, int kv_head) const { return unsigned(id) * kv_heads + kv_head; }
    __device__ __forceinline__ const unsigned char *key(unsigned record) const {
        return at_record<KeyLayout::STRIDE>(keys, record);
    }
    __device__ __forceinline__ const unsigned char *value(unsigned record) const {
        return at_record<ValueLayout::STRIDE>(values, record);
    }
    __device__ __forceinline__ const unsigned char *full_key(unsigned record) const {
        return at_record<FullKeyLayout::NBYTES>(full_keys, record);
    }
    __device__ __forceinline__ const unsigned char *full_value(unsigned record) const {
        return at_record<FullValueLayout::NBYTES>(full_values, record);
    }
};

// 16 tokens of a full-precision block, from position `start` on. key and value point to the lane's 16 bytes of the
// slice's first tile; its next tile is KEY_STEP or VALUE_STEP bytes on.
struct Slice {
    static constexpr int VALUE_STEP = 512, KEY_STEP = 512 * PT;
    const unsigned char *key, *value;
    int start;

    // Slice number e. With ALL_FULL the blocks between sink and current block come first.
    __device__ __forceinline__ Slice(int e, const QuantizedBlocks &quantized, const FullBlocks &full,
                                     const Pools &pools, int kv_head, int lane) {
        const int block_slices = ALL_FULL ? quantized.count * SLICES : 0;
        const int in_current = e - block_slices - full.sink_slices;
        if (e < block_slices) {
            start = quantized.number * N + 16 * e;
            const unsigned record = pools.record(quantized.ids[e / SLICES], kv_head);
            key = pools.key(record), value = pools.value(record);
        } else {
            start = in_current < 0 ? 16 * (e - block_slices) : full.start + 16 * in_current;
            const bool is_next = STEP_ROWS > 1 && start >= full.next_start;
            const int slot = in_current < 0 ? full.sink : is_next ? full.next : full.current;
            const unsigned record = pools.record(slot, kv_head);
            key = pools.full_key(record), value = pools.full_value(record);
        }
        const int in_record = start % N / 16, part = in_record / PT, i = in_record % PT;
        key += (part * TILES + i) * 512 + lane * 16;
        value += (part * TILES + i * STEPS) * 512 + lane * 16;
    }
};

// Clears the tokens of a value tile that have not been written yet: they may be NaN, and 0 · NaN is NaN.
__device__ __forceinline__ void clear_unwritten(unsigned (&tile)[4], int start, int newest, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int written = newest + 1 - (start + 8 * h + 2 * (lane & 3));  // how many of a register's two tokens
        const unsigned keep = written >= 2 ? ~0u : written == 1 ? 0xffffu : 0u;
        tile[2 * h] &= keep, tile[2 * h + 1] &= keep;
    }
}

__device__ __forceinline__ void attend_slice(ColumnState &state, const Slice &slice, const Mask &mask, int newest,
                                             int lane) {
    // Values are in flight while scores are computed, unless there are too few registers for both tiles.
    constexpr bool TOGETHER = STEPS <= 8 || STEP_ROWS == 1;
    unsigned k[STEPS][4], v[STEPS][4];
    const auto load_values = [&] {
#pragma unroll
        for (int j = 0; j < STEPS; ++j) load_f16_tile(v[j], slice.value + j * Slice::VALUE_STEP);
    };
#pragma unroll
    for (int s = 0; s < STEPS; ++s) load_f16_tile(k[s], slice.key + s * Slice::KEY_STEP);
    if constexpr (TOGETHER) load_values();

    float scores[1][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) mma_m16n8k16_f16(scores[0], k[s], state.q[s]);
    if constexpr (!TOGETHER) load_values();
    cap_scores(scores);
    mask_scores(scores, slice.start, mask, lane);
    state.absorb(scores);

    unsigned p[2];
    weights_operand(p, scores[0], 1.0f, 1.0f);
    const bool ragged = slice.start + 15 > newest;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
        if (ragged) clear_unwritten(v[j], slice.start, newest, lane);
        mma_m16n8k16_f16(state.acc[j], v[j], p);
    }
}

// Attention over the warp's slices.
__device__ __forceinline__ void attend_full(ColumnState &state, const Work &work, const Mask &mask, const Pools &pools,
                                             int lane) {
    const FullBlocks full(*work.columns.span, work.visible);
    const int units_before = ALL_FULL ? 0 : work.quantized.count, end = work.first + work.units - units_before;
#pragma unroll 1
    for (int e = work.first + work.count - units_before; e < end; ++e)
        attend_slice(state, Slice(e, work.quantized, full, pools, work.columns.kv_head, lane), mask,
                     work.visible.newest, lane);
}

// Attention of a step over full-precision records, then over quantized blocks. Part of decode_attention.cu.

// All pools of records. A KV head's record of a block or slot has a number; the pools' addresses stay kernel arguments,
// and take no registers.
struct Pools {
    const unsigned char *keys, *values, *full_keys, *full_values;
    int kv_heads;

    __device__ __forceinline__ unsigned record(int id, int kv_head) const { return unsigned(id) * kv_heads + kv_head; }
    __device__ __forceinline__ const unsigned char *key(unsigned record) const {
        return at_record<KeyLayout::NBYTES>(keys, record);
    }
    __device__ __forceinline__ const unsigned char *value(unsigned record) const {
        return at_record<ValueLayout::NBYTES>(values, record);
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

    // Slice number e. With ALL_FULL the blocks of the block table come first.
    __device__ __forceinline__ Slice(int e, const QuantizedBlocks &quantized, const FullBlocks &full,
                                     const Pools &pools, int kv_head, int lane) {
        const int block_slices = ALL_FULL ? quantized.count * SLICES : 0;
        const int number = e - block_slices - full.sink_slices;
        if (e < block_slices) {
            start = quantized.number * N + 16 * e;
            const unsigned record = pools.record(quantized.ids[e / SLICES], kv_head);
            key = pools.key(record), value = pools.value(record);
        } else {
            start = number < 0 ? 16 * (e - block_slices) : full.start + 16 * number;
            const int slot = number < 0 ? full.sink : full.later[start / N];
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

// Writes q · mean of the 16 blocks whose records lanes 1 … 16 have the numbers of to the warp's means [16][8 columns].
__device__ __forceinline__ void mean_scores(float2 *means, const ColumnState &state, const Pools &pools,
                                            unsigned record, int lane) {
    const int g = lane >> 2, tg = lane & 3;
    const unsigned char *low = pools.key(__shfl_sync(ALL_LANES, record, g + 1));
    const unsigned char *high = pools.key(__shfl_sync(ALL_LANES, record, g + 9));
    float products[4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        unsigned x[2], y[2];
        mean_tile<KeyLayout>(x, low, s, tg);
        mean_tile<KeyLayout>(y, high, s, tg);
        const unsigned a[4] = {x[0], y[0], x[1], y[1]};
        mma_m16n8k16_f16(products, a, state.q[s]);
    }
    const float low_scale = mean_scale<KeyLayout>(low), high_scale = mean_scale<KeyLayout>(high);
    __syncwarp();  // all lanes have read the previous 16
    means[lane] = make_float2(products[0] * low_scale, products[1] * low_scale);
    means[lane + 32] = make_float2(products[2] * high_scale, products[3] * high_scale);
    __syncwarp();
}

// Brings what stands after the codes of a record, norms and a mean, near. The loads of these come late, where a warp
// with few blocks has nothing to do until they arrive.
template <class Codec, class L>
__device__ __forceinline__ void expect_norms(const unsigned char *record) {
    int start = L::MEAN;
    if constexpr (Codec::NORMED) start = L::NORMS;
#pragma unroll
    for (int at = start / 128 * 128; at < L::NBYTES; at += 128) prefetch_line(record + at);
}

// Brings the codes of part `number` of a record near; a warp calls it together.
template <class Codec>
__device__ __forceinline__ void expect_codes(const unsigned char *record, int number, int lane) {
    constexpr int bytes = sizeof(typename Codec::Codes) * 32;
#pragma unroll
    for (int at = 0; at < bytes; at += 32 * 128)
        if (at + lane * 128 < bytes) prefetch_line(record + number * bytes + at + lane * 128);
}

// Codes of one part of a quantized block, loaded or in flight.
struct Codes {
    typename KeyCodec::Codes keys;
    typename ValueCodec::Codes values;
};

// With wide heads or many warps, codes that take 64 registers leave none for codes in flight: values are loaded after
// the keys' use, and the next keys after the values'.
constexpr bool ONE_SIDE_AT_A_TIME = (DP > 128 || WARPS > 8) && sizeof(Codes) >= 64 * sizeof(unsigned);

// Part `number` of a quantized block, after which the warp's turn has `left` − 1 of them.
struct BlockPart {
    unsigned record;
    int number, left;
};

// With many warps, wide codes are loaded in groups of four tiles, if they can be: AHEAD groups are in flight while one
// is decoded, first of keys, then of values, then of the next part's keys. They come from the L2 cache, for a part is
// expected while the one before it is decoded.
constexpr bool BY_GROUPS = ONE_SIDE_AT_A_TIME && WARPS > 8 && KeyCodec::BY_GROUPS && ValueCodec::BY_GROUPS;
constexpr int GROUPS = TILES / 4, AHEAD = 2;
static_assert(!BY_GROUPS || AHEAD <= GROUPS, "a part begins with groups of keys");
__device__ __forceinline__ void expect_part(const BlockPart &part, const Pools &pools, int lane) {
    expect_codes<KeyCodec>(pools.key(part.record), part.number, lane);
    expect_codes<ValueCodec>(pools.value(part.record), part.number, lane);
}
template <class SideCodes>
__device__ __forceinline__ void load_group(SideCodes &codes, const unsigned char *record, int part, int lane,
                                           int group) {
    if constexpr (BY_GROUPS) codes.load_group(record, part, lane, group);
}
// Loads the group that is AHEAD of group `group` of a part, both counted over keys and then values.
__device__ __forceinline__ void load_ahead(Codes &codes, int group, const BlockPart &part, const BlockPart &next,
                                           bool last, const Pools &pools, int lane) {
    const int number = group + AHEAD;
    if (number < GROUPS)
        load_group(codes.keys, pools.key(part.record), part.number, lane, number);
    else if (number < 2 * GROUPS)
        load_group(codes.values, pools.value(part.record), part.number, lane, number - GROUPS);
    else if (!last)
        load_group(codes.keys, pools.key(next.record), next.number, lane, number - 2 * GROUPS);
}

// codes: in, codes of `part`; out, unless `part` is the last one, codes of `next`, which are loaded meanwhile.
__device__ __forceinline__ void attend_part(ColumnState &state, Codes &codes, const BlockPart &part,
                                            const BlockPart &next, bool last, const BlockMask &block_mask, float2 mean,
                                            const Pools &pools, unsigned char *shared, int lane) {
    float scores[PT][4] = {}, norm[2 * PT];
    if (BY_GROUPS && !last) expect_part(next, pools, lane);
    if constexpr (KeyCodec::NORMED)
        KeyCodec::norms(norm, pools.key(part.record), part.number, lane, Tables::keys(shared));
    {
        typename KeyCodec::Decoder decoder(codes.keys, Tables::keys(shared), lane);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            unsigned a[4];
            decoder.next(t, a);
            mma_m16n8k16_f16(scores[t % PT], a, state.q[t / PT]);
            if (BY_GROUPS && t % 4 == 3) load_ahead(codes, t / 4, part, next, last, pools, lane);
        }
    }
    if constexpr (ONE_SIDE_AT_A_TIME && !BY_GROUPS)
        codes.values.load(pools.value(part.record), part.number, lane);
    else if (!BY_GROUPS && !last)
        codes.keys.load(pools.key(next.record), next.number, lane);
#pragma unroll
    for (int i = 0; i < PT; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float mean_score = c & 1 ? mean.y : mean.x;
            scores[i][c] =
                KeyCodec::NORMED ? fmaf(scores[i][c], norm[2 * i + c / 2], mean_score) : scores[i][c] + mean_score;
        }
    if constexpr (ValueCodec::NORMED)
        ValueCodec::norms(norm, pools.value(part.record), part.number, lane, Tables::values(shared));
    cap_scores(scores);
    block_mask.apply(scores, part.left, part.number, lane);
    state.absorb(scores);

    typename ValueCodec::Decoder decoder(codes.values, Tables::values(shared), lane);
    unsigned p[2];
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
        const int i = t / STEPS;
        if (t % STEPS == 0)
            weights_operand(p, scores[i], ValueCodec::NORMED ? norm[2 * i] : 1.0f,
                            ValueCodec::NORMED ? norm[2 * i + 1] : 1.0f);
        unsigned a[4];
        decoder.next(t, a);
        mma_m16n8k16_f16(state.acc[t % STEPS], a, p);
        if (BY_GROUPS && t % 4 == 3) load_ahead(codes, GROUPS + t / 4, part, next, last, pools, lane);
    }
    if (last || BY_GROUPS) return;
    if constexpr (ONE_SIDE_AT_A_TIME)
        codes.keys.load(pools.key(next.record), next.number, lane);
    else
        codes.values.load(pools.value(next.record), next.number, lane);
}

// Attention over the quantized blocks of the warp's turn, `left` of them. codes: of the first block's first part.
__device__ __forceinline__ void attend_blocks(ColumnState &state, Codes &codes, const Plan &plan, int chunks, int left,
                                              const BlockMask &block_mask, const Pools &pools, unsigned char *shared,
                                              int lane) {
    float2 *means = reinterpret_cast<float2 *>(shared + Tables::BYTES) + thread_read_anew() / 32 * 64;
    while (left > 0) {
        // Blocks are counted from the last one, and taken in groups of 16 of that count. Lanes 1 … 16 have the
        // numbers of their records, and lane 0 the number of the block after them.
        unsigned record;
        {
            const Work work = Work::find(plan, chunks);
            const int number = min(max(0, (left - 1) / 16 * 16 + lane - 1), left - 1);
            const int id = work.quantized.ids[work.first + work.count - 1 - number];
            record = pools.record(id, work.columns.kv_head);
        }
        if constexpr (KeyLayout::MEAN_BITS != 0) mean_scores(means, state, pools, record, thread_read_anew() % 32);
        int number = 0;
#pragma unroll 1
        do {
            const int j = (left - 1) % 16;
            float2 mean = make_float2(0.0f, 0.0f);
            if constexpr (KeyLayout::MEAN_BITS != 0) mean = means[4 * j + (lane & 3)];
            const BlockPart part = {__shfl_sync(ALL_LANES, record, j + 1), number, left};
            const bool ends_block = number == PARTS - 1, last = ends_block && left == 1;
            number = ends_block ? 0 : number + 1, left -= ends_block;
            const BlockPart next = {__shfl_sync(ALL_LANES, record, j + !ends_block), number, left};
            attend_part(state, codes, part, next, last, block_mask, mean, pools, shared, lane);
        } while (number > 0 || left % 16 > 0);
    }
}

// Attention of a step over quantized blocks. Part of decode_attention.cu.

// Writes q · mean of the 16 blocks whose ids lanes 0 … 15 have to the warp's means [16][8 columns].
__device__ __forceinline__ void mean_scores(float2 *means, const ColumnState &state, const Pools &pools, int id,
                                            int lane) {
    const int g = lane >> 2, tg = lane & 3;
    const unsigned char *low = pools.key(__shfl_sync(ALL_LANES, id, g));
    const unsigned char *high = pools.key(__shfl_sync(ALL_LANES, id, g + 8));
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

// Codes of one part of a quantized block, loaded or in flight.
struct Codes {
    typename KeyCodec::Codes keys;
    typename ValueCodec::Codes values;
};

// Part `number` of quantized block `id`.
struct BlockPart {
    int id, number;
};

// codes: in, those of `part`; out, unless `part` is the last one, those of `next`, which are loaded meanwhile.
__device__ __forceinline__ void attend_part(ColumnState &state, Codes &codes, const BlockPart &part,
                                            const BlockPart &next, bool last, const BlockMask &block_mask, float2 mean,
                                            const Pools &pools, unsigned char *shared, int lane) {
    float scores[PT][4] = {}, norm[2 * PT];
    if constexpr (KeyCodec::NORMED) KeyCodec::norms(norm, pools.key(part.id), part.number, lane, Tables::keys(shared));
    {
        typename KeyCodec::Decoder decoder(codes.keys, Tables::keys(shared), lane);
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            unsigned a[4];
            decoder.next(t, a);
            mma_m16n8k16_f16(scores[t % PT], a, state.q[t / PT]);
        }
    }
    if (!last) codes.keys.load(pools.key(next.id), next.number, lane);
#pragma unroll
    for (int i = 0; i < PT; ++i)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float mean_score = c & 1 ? mean.y : mean.x;
            scores[i][c] =
                KeyCodec::NORMED ? fmaf(scores[i][c], norm[2 * i + c / 2], mean_score) : scores[i][c] + mean_score;
        }
    if constexpr (ValueCodec::NORMED)
        ValueCodec::norms(norm, pools.value(part.id), part.number, lane, Tables::values(shared));
    block_mask.apply(scores, lane);
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
    }
    if (!last) codes.values.load(pools.value(next.id), next.number, lane);
}

// Attention over `left` quantized blocks, whose ids are ids[0], ids[stride], … . codes, block_mask: those of the first
// block's first part.
__device__ __forceinline__ void attend_blocks(ColumnState &state, Codes &codes, const int *ids, int stride, int left,
                                              BlockMask block_mask, const Pools &pools, unsigned char *shared,
                                              int lane) {
    float2 *means = reinterpret_cast<float2 *>(shared + Tables::BYTES) + threadIdx.x / 32 * 64;
    for (; left > 0; ids += 16 * stride) {
        // Lane l < 16 has the id of the l-th block from here; behind the last block it has the last id again.
        const int id = ids[min(lane, left - 1) * stride];
        if constexpr (KeyLayout::MEAN_BITS != 0) mean_scores(means, state, pools, id, lane);
#pragma unroll 1
        for (int j = 0, number = 0; j < 16 && left > 0;) {
            const int own = __shfl_sync(ALL_LANES, id, j);
            float2 mean = make_float2(0.0f, 0.0f);
            if constexpr (KeyLayout::MEAN_BITS != 0) mean = means[4 * j + (lane & 3)];
            const BlockPart part = {own, number};
            const bool ends_block = number == PARTS - 1, last = ends_block && left == 1;
            number = ends_block ? 0 : number + 1, j += ends_block, left -= ends_block;
            const BlockPart next = {__shfl_sync(ALL_LANES, id, j), number};
            attend_part(state, codes, part, next, last, block_mask, mean, pools, shared, lane);
            block_mask.advance(ends_block, stride);
        }
    }
}

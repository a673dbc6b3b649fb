// Attention of a step over quantized blocks. Part of decode_attention.cu.

// q · mean of 16 blocks at once, those whose ids lanes 0 … 15 have, into the warp's means [16][8 heads].
__device__ __forceinline__ void mean_scores(float2 *means, const State &state, const Pools &pools, int id, int lane) {
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
    __syncwarp();  // the last group has been read
    means[lane] = make_float2(products[0] * low_scale, products[1] * low_scale);
    means[lane + 32] = make_float2(products[2] * high_scale, products[3] * high_scale);
    __syncwarp();
}

// Codes on their way, or here, of one part of a quantized block.
struct Codes {
    typename KeyCodec::Codes keys;
    typename ValueCodec::Codes values;
};

// A part of a quantized block.
struct Part {
    int id, number;
};

// `codes` are those of `now`, and then, unless it is the last, those of `next`.
__device__ __forceinline__ void attend_part(State &state, Codes &codes, const Part &now, const Part &next, bool last,
                                            const Hidden &hidden, float2 mean, const Pools &pools, unsigned char *shared,
                                            int lane) {
    float scores[PT][4] = {}, norm[2 * PT];
    if constexpr (KeyCodec::NORMED) KeyCodec::norms(norm, pools.key(now.id), now.number, lane, Tables::keys(shared));
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
            const float of_mean = c & 1 ? mean.y : mean.x;
            scores[i][c] = KeyCodec::NORMED ? fmaf(scores[i][c], norm[2 * i + c / 2], of_mean) : scores[i][c] + of_mean;
        }
    if constexpr (ValueCodec::NORMED)
        ValueCodec::norms(norm, pools.value(now.id), now.number, lane, Tables::values(shared));
    hidden.hide_in(scores, lane);
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

// `left` quantized blocks, whose ids are `stride` apart from `ids` on. `codes` are those of the first one's first
// part, with which `hidden` begins.
__device__ __forceinline__ void attend_blocks(State &state, Codes &codes, const int *ids, int stride, int left,
                                              Hidden hidden, const Pools &pools, unsigned char *shared, int lane) {
    float2 *means = reinterpret_cast<float2 *>(shared + Tables::BYTES) + threadIdx.x / 32 * 64;
    for (; left > 0; ids += 16 * stride) {
        // Lane l: the block l from here; behind the last it is the last again.
        const int id = ids[min(lane, left - 1) * stride];
        if constexpr (KeyLayout::MEAN_BITS != 0) mean_scores(means, state, pools, id, lane);
#pragma unroll 1
        for (int j = 0, part = 0; j < 16 && left > 0;) {
            const int own = __shfl_sync(ALL_LANES, id, j);
            float2 mean = make_float2(0.0f, 0.0f);
            if constexpr (KeyLayout::MEAN_BITS != 0) mean = means[4 * j + (lane & 3)];
            const Part now = {own, part};
            const bool turns = part == PARTS - 1, last = turns && left == 1;
            part = turns ? 0 : part + 1, j += turns, left -= turns;
            const Part next = {__shfl_sync(ALL_LANES, id, j), part};
            attend_part(state, codes, now, next, last, hidden, mean, pools, shared, lane);
            hidden.advance(turns, stride);
        }
    }
}

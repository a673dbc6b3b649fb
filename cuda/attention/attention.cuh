// Part of decode_attention.cu, prefill_attention.cu and latent_attention.cu: the shapes of a block, and constants of an
// online softmax.

constexpr int D = FullKeyLayout::D, DP = FullKeyLayout::DP, N = FullKeyLayout::N, STEPS = FullKeyLayout::STEPS;
constexpr int PART = FullKeyLayout::PART, PARTS = FullKeyLayout::PARTS, PT = FullKeyLayout::PT;
constexpr int TILES = FullKeyLayout::TILES;

// Whether a side stores all blocks, not only the sink and the newest ones, as full-precision records.
constexpr bool KEYS_ARE_FULL = !KeyCodec::QUANTIZED && KeyLayout::MEAN_BITS == 0;
constexpr bool VALUES_ARE_FULL = !ValueCodec::QUANTIZED;

using Tables = SharedTables<KeyCodec, ValueCodec>;

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOWEST = -1e30f;        // the maximum before the first score: finite, for −inf − (−inf) is NaN
constexpr float LOG2_E = 1.44269504f;  // scores include it, so that a weight is 2^score

// Whether every query head has a sink score, which takes part in the softmax of its rows, and whose value is 0.
#ifndef SINK_SCORES
#define SINK_SCORES 0
#endif

// With SOFTCAP, a float c: a score s, without LOG2_E, becomes c · tanh(s / c) = c − 2c / (1 + e^(2s / c)).
#ifdef SOFTCAP
constexpr bool CAPPED = true;
constexpr float CAP = SOFTCAP;
#else
constexpr bool CAPPED = false;
constexpr float CAP = 1.0f;
#endif
__device__ __forceinline__ float capped(float score) {
    constexpr float most = CAP * LOG2_E;
    return most - __fdividef(2.0f * most, 1.0f + exp2_fast(score * (2.0f / CAP)));
}

// What a sum of weighted values is multiplied by, in a softmax in which a sink score takes part: sum, the sum of
// weights without it, is of maximum `top`.
__device__ __forceinline__ float share_with_sink(float sink_score, float top, float sum) {
    const float score = sink_score * LOG2_E, highest = fmaxf(top, score), rescale = exp2_fast(top - highest);
    return rescale / (sum * rescale + exp2_fast(score - highest));
}

// Caps scores where the launch has a soft cap.
template <int COUNT>
__device__ __forceinline__ void cap_scores(float (&scores)[COUNT][4]) {
    if constexpr (CAPPED) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) scores[i][c] = capped(scores[i][c]);
    }
}

// Part of decode_attention.cu and prefill_attention.cu: the shapes of a block, and constants of their online softmax.

constexpr int D = FullKeyLayout::D, DP = FullKeyLayout::DP, N = FullKeyLayout::N, STEPS = FullKeyLayout::STEPS;
constexpr int PART = FullKeyLayout::PART, PARTS = FullKeyLayout::PARTS, PT = FullKeyLayout::PT;
constexpr int TILES = FullKeyLayout::TILES;

// Whether a side stores all blocks, not only the sink and the current block, as full-precision records.
constexpr bool KEYS_ARE_FULL = !KeyCodec::QUANTIZED && KeyLayout::MEAN_BITS == 0;
constexpr bool VALUES_ARE_FULL = !ValueCodec::QUANTIZED;

using Tables = SharedTables<KeyCodec, ValueCodec>;

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOWEST = -1e30f;        // the maximum before the first score: finite, for −inf − (−inf) is NaN
constexpr float LOG2_E = 1.44269504f;  // scores include it, so that a weight is 2^score

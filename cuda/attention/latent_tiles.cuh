// Part of latent_attention.cu, which explains letters and DEFINES: the tiles of a part of a block that a warp has.

constexpr int OWN = STEPS / WARPS;  // steps of 16 channels
static_assert(STEPS % WARPS == 0, "warps have equally many steps");

// [s · PT + i]: of the warp's step s, tokens 16i … 16i + 15 of the part.
using OwnTiles = unsigned[OWN * PT][4];

// Decodes the warp's tiles. W is a constant, so that each warp's code loads and looks up only its own.
template <int W = 0>
__device__ __forceinline__ void decode_own(OwnTiles &tiles, const unsigned char *record, int part,
                                           const unsigned char *tables, int warp, int lane) {
    if (warp == W) {
        typename KeyCodec::Codes codes;
        codes.load(record, part, lane);
        float norm[2 * PT] = {};
        if constexpr (KeyCodec::NORMED) KeyCodec::norms(norm, record, part, lane, tables);
        const __half2 scale = __float2half2_rn(mean_scale<KeyLayout>(record));
        typename KeyCodec::Decoder decoder(codes, tables, lane);
        constexpr int first = OWN * PT * W;
#pragma unroll
        for (int t = KeyCodec::RANDOM_ACCESS ? first : 0; t < first; ++t) decoder.pass(t);
#pragma unroll
        for (int i = 0; i < OWN * PT; ++i) {
            unsigned mean[2];
            decoder.next(first + i, tiles[i]);
            mean_tile<KeyLayout>(mean, record, (first + i) / PT, lane % 4);
#pragma unroll
            for (int r = 0; r < 4; ++r)
                tiles[i][r] = decoded_key(tiles[i][r], norm[i % PT * 2 + r % 2], __hmul2(as_half2(mean[r / 2]), scale));
        }
    } else if constexpr (W + 1 < WARPS) {
        decode_own<W + 1>(tiles, record, part, tables, warp, lane);
    }
}

// Loads the warp's tiles of a full-precision part that begins at position `start`. Tokens after `newest` become 0: they
// may be NaN.
__device__ __forceinline__ void load_own(OwnTiles &tiles, const unsigned char *part, int start, int newest, int warp,
                                         int lane) {
#pragma unroll
    for (int i = 0; i < OWN * PT; ++i) {
        load_f16_tile(tiles[i], part + (warp * OWN * PT + i) * 512 + lane * 16);
#pragma unroll
        for (int r = 0; r < 4; ++r)
            if (start + i % PT * 16 + r % 2 * 8 + lane / 4 > newest) tiles[i][r] = 0;
    }
}

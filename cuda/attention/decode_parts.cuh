// Decodes parts of quantized blocks into the order of full-precision records. Part of prefill_attention.cu and of
// latent_attention.cu.

// A register of a key tile, two neighbouring channels of a token: point · norm + mean.
__device__ __forceinline__ unsigned decoded_key(unsigned point, float norm, __half2 mean) {
    const __half2 x = as_half2(point);
    constexpr bool centred = KeyLayout::MEAN_BITS > 0;
    if constexpr (KeyCodec::NORMED && centred) return as_bits(__hfma2(x, __float2half2_rn(norm), mean));
    if constexpr (KeyCodec::NORMED) return as_bits(__hmul2(x, __float2half2_rn(norm)));
    if constexpr (centred) return as_bits(__hadd2(x, mean));
    return point;
}

// The thread's number, where it decodes: wide heads leave no register to keep it in.
__device__ __forceinline__ int decoding_thread() { return DP > 128 ? thread_read_anew() : threadIdx.x; }

// Decodes one side: warp W decodes the tiles from TILES · W / WARPS on. W is a constant, so that each warp's code loads
// and looks up only its own tiles.
template <class Codec, class L, int W = 0>
__device__ __forceinline__ void decode_side(unsigned char *to, const unsigned char *record, int part,
                                            const unsigned char *tables, int warp, int lane) {
    if (warp == W) {
        typename Codec::Codes codes;
        codes.load(record, part, lane);
        float norm[2 * PT] = {};
        if constexpr (Codec::NORMED) Codec::norms(norm, record, part, lane, tables);
        const __half2 scale = __float2half2_rn(mean_scale<L>(record));
        typename Codec::Decoder decoder(codes, tables, lane);
        __half2 pair[2];  // values alone: norms of tokens 16u + 2tg + {0, 1}, and + 8
        constexpr int first = TILES * W / WARPS;
#pragma unroll
        for (int t = Codec::RANDOM_ACCESS ? first : 0; t < TILES * (W + 1) / WARPS; ++t) {
            unsigned a[4], mean[2];
            if (t < first) {
                decoder.pass(t);
                continue;
            }
            decoder.next(t, a);
            if constexpr (!L::VALUES) {
                mean_tile<L>(mean, record, t / PT, lane % 4);
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    a[r] = decoded_key(a[r], norm[t % PT * 2 + r % 2], __hmul2(as_half2(mean[r / 2]), scale));
            } else if constexpr (Codec::NORMED) {
                // Tokens are columns: a lane gets the norms of its tokens from the lanes that load them.
                if (t == first || t % STEPS == 0) {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float low = __shfl_sync(ALL_LANES, norm[t / STEPS * 2 + h], lane % 4 * 8);
                        const float high = __shfl_sync(ALL_LANES, norm[t / STEPS * 2 + h], lane % 4 * 8 + 4);
                        pair[h] = __floats2half2_rn(low, high);
                    }
                }
#pragma unroll
                for (int r = 0; r < 4; ++r) a[r] = as_bits(__hmul2(as_half2(a[r]), pair[r / 2]));
            }
            reinterpret_cast<uint4 *>(to)[t * 32 + lane] = f16_words(a);
        }
    } else if constexpr (W + 1 < WARPS) {
        decode_side<Codec, L, W + 1>(to, record, part, tables, warp, lane);
    }
}

__device__ __forceinline__ void decode_keys(unsigned char *to, const unsigned char *record, int part,
                                            const unsigned char *tables, int warp, int lane) {
    decode_side<KeyCodec, KeyLayout>(to, record, part, tables, warp, lane);
}
__device__ __forceinline__ void decode_values(unsigned char *to, const unsigned char *record, int part,
                                              const unsigned char *tables, int warp, int lane) {
    decode_side<ValueCodec, ValueLayout>(to, record, part, tables, warp, lane);
}

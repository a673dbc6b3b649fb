// Encode full blocks: full-precision records become records of codes, chosen as engine/quantization/encode.py and
// `Codec.encode` choose them.
//
// keys, values (blocks, K, NBYTES), exact (slots, K, bytes): pools of records. moves int32 (count, 2): slot of the
// full-precision record, id of the block. tables: of the side's codec; near uint16 (64, 64, NEAR), for codecs of
// pairs: what engine/backends/cuda/candidates.py makes. Of one layer, float32, from engine.quantization.metric; null
// pointers for what there is not:
//   feedback (K, D, D)      F transposed: row c has what the error of channel c adds to the others. Null: the nearest
//                           points and the rms, and nothing else is read
//   matrix (K, D, D)        M, what errors cost: norms are fitted to it, but those of keys with a tilt
//   tilt_second (K, D, D), tilt_mean (K, D)     norms of keys are tilted
//   token_feedback (N, N)   transposed: row i has what the error of token i adds to the others. Values only
//
// A lane has a token. Pair j (or value j) of token t waits for the pairs before it, and with feedback between tokens
// for pair j of the tokens before. So the CTA goes through the cells (t, j) front by front: j = front, or
// t + j = front.
// A thread for every token rounds; the other warps share the sums over what came before. x in shared memory holds
// targets, and behind the front their errors.
// Without a metric codes, norms and means are NumPy's to the bit: sums in its order, no fused multiplication.
//
// Grid (count, K), block WARPS · 32, dynamic shared memory Room::BYTES (x and mean for a codec that is not ROUNDED).
// DEFINES: TOKENS, so many of a block are in shared memory at once: a divisor of N, 16 or a multiple of 32; WARPS, a
// multiple of TOKENS / 32, and two times that at least; LARGEST, what values are clipped to before they are rounded;
// TILT_LOW, TILT_HIGH, how far a norm may tilt from that of least squares.
// PRECOND: full-precision records are finite, pools aligned to 128 bytes, everything else to 16.
// JOINS: full_block.cuh, nearest.cuh, rounding_room.cuh, rounding.cuh.

template <class Codec, class L, class Full>
__device__ __forceinline__ void encode_block(const Move<L, Full> &move, const unsigned short *near, const Cost &cost) {
    DYNAMIC_SHARED(unsigned char, shared);
    if constexpr (Codec::ROUNDED) {
        Rounder<L, Codec>(shared, near, cost).encode(move);
    } else {
        float *x = reinterpret_cast<float *>(shared), *mean = x + L::N * L::D;
        load_tokens<L, L::D, 1>(x, move.full(), 0, L::N);
        __syncthreads();
        if constexpr (L::MEAN_BITS != 0) {
            add_tokens<L::D, L::D, 1>(mean, x, L::N, true);
            __syncthreads();
            store_mean<L>(move.record(), mean);
            __syncthreads();
            for (int i = threadIdx.x; i < L::N * L::D; i += THREADS) x[i] = __fsub_rn(x[i], mean[i % L::D]);
            __syncthreads();
        }
        Codec::encode(move.record(), x, nullptr, move.tables, threadIdx.x, THREADS);
    }
}

__device__ __forceinline__ const float *of_head(const float *all, int size) {
    return all ? all + blockIdx.y * size : all;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS > 12 ? 1 : 2)
encode_keys_kernel(unsigned char *keys, const unsigned char *full, const int *moves, const unsigned char *tables,
                   const unsigned short *near, const float *feedback, const float *tilt_second, const float *tilt_mean,
                   const float *matrix, int kv_heads) {
    using L = KeyLayout;
    const Cost cost = {of_head(feedback, L::D * L::D), of_head(tilt_second ? tilt_second : matrix, L::D * L::D),
                       tilt_second ? of_head(tilt_mean, L::D) : nullptr, nullptr};
    encode_block<KeyCodec>(Move<L, FullKeyLayout>{keys, full, tables, moves, kv_heads}, near, cost);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS > 12 ? 1 : 2)
encode_values_kernel(unsigned char *values, const unsigned char *full, const int *moves, const unsigned char *tables,
                     const unsigned short *near, const float *feedback, const float *matrix,
                     const float *token_feedback, int kv_heads) {
    using L = ValueLayout;
    const Cost cost = {of_head(feedback, L::D * L::D), of_head(matrix, L::D * L::D), nullptr, token_feedback};
    encode_block<ValueCodec>(Move<L, FullValueLayout>{values, full, tables, moves, kv_heads}, near, cost);
}

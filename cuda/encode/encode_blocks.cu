// The op `encode_blocks`: quantizes complete blocks. Full-precision records become records of codes, which are chosen
// as `Codec.encode` chooses them. What has a metric is left to encode_rows.cu.
//
// sides (rows, 7): addresses, a SideArrays in each row. The first `keys` rows are keys of a layer, the others values.
// jobs int32 (count, 3): row of `sides`, slot of the full-precision record, id of the block. The arrays of a side:
//   quantized (blocks, K, NBYTES), full (slots, K, bytes)     pools of records
//   tables                  the codec's
//   candidates uint16       for codes of pairs: made by engine/backends/cuda/kv/store.py;
// and those of a metric, which encode_rows.cu lists: null, and not read here.
//
// Every pair takes the nearest point, every norm is the rms or covers the largest value. Codes, norms and means equal
// NumPy's to the bit: sums are in its order, multiplications not fused.
// Grid (count, K), block WARPS · 32, dynamic shared memory SHARED.
// DEFINES: TOKENS, tokens of a block that are in shared memory at once: a divisor of N, 16 or a multiple of 32; WARPS;
// LARGEST, to which values are clipped before rounding with a metric; SHARED, the bytes of `shared_bytes` for the side
// that needs more.
// PRECOND: full-precision records are finite; pools aligned to 128 bytes, other arrays to 16.
// JOINS: full_block.cuh, nearest.cuh, rounding.cuh.

template <class L, class Codec>
__device__ constexpr int shared_bytes() {
    if constexpr (Codec::NORMED) return sizeof(RounderArrays<L, Codec>);
    return Codec::QUANTIZED ? 4 * L::D * (L::N + 1) : 0;  // x and the mean
}
constexpr int KEY_BYTES = shared_bytes<KeyLayout, KeyCodec>(), VALUE_BYTES = shared_bytes<ValueLayout, ValueCodec>();
static_assert(SHARED == (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES), "as named above");

template <class Codec, class L, class Full>
__device__ __forceinline__ void encode_block(const Move<L, Full> &move) {
    if constexpr (!Codec::QUANTIZED) {
        static_assert(L::MEAN_BITS == 0 && L::NBYTES == Full::NBYTES, "a block in half precision is copied");
        const uint4 *const full = reinterpret_cast<const uint4 *>(move.full());
        uint4 *const record = reinterpret_cast<uint4 *>(move.record());
        for (int i = threadIdx.x; i < L::NBYTES / 16; i += THREADS) record[i] = full[i];
        return;
    }
    DYNAMIC_SHARED(unsigned char, shared);
    if constexpr (Codec::NORMED) {
        Rounder<L, Codec>(shared, move.side->candidates).encode(move);
    } else if constexpr (Codec::QUANTIZED) {
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
        Codec::encode(move.record(), x, move.side->tables, threadIdx.x, THREADS);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, WARPS > 12 ? 1 : 2)
encode_blocks_kernel(const unsigned long long *sides, const int *jobs, int keys, int kv_heads) {
    const int *job = jobs + 3 * blockIdx.x;
    const SideArrays *side = reinterpret_cast<const SideArrays *>(sides) + job[0];
    if (job[0] < keys)
        encode_block<KeyCodec>(Move<KeyLayout, FullKeyLayout>{side, job, kv_heads});
    else
        encode_block<ValueCodec>(Move<ValueLayout, FullValueLayout>{side, job, kv_heads});
}

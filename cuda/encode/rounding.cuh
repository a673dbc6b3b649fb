// Chooses codes and norms of a block as `Codec.encode` does, to the bit: the nearest points, and as the norm the rms
// or what covers the largest value. Part of encode_blocks.cu.

// Shared memory.
template <class L, class Codec>
struct RounderArrays {
    static constexpr int PAIRS = L::D / Codec::WIDTH;
    using Code = typename CodeOf<Codec::WIDTH == 1 && Codec::POINTS <= 256>::Type;  // twice as many as of pairs
    // Strides of a row of tokens: neither tokens of a row nor pairs of a token share a bank.
    static constexpr int STRIDE = TOKENS + 4, CODE_STRIDE = TOKENS + 2;
    static_assert(L::N % TOKENS == 0, "");

    float x[L::D * STRIDE];  // rows are channels
    float points[Codec::POINTS * Codec::WIDTH], mean[L::D], norms[L::N];
    Code codes[L::N * PAIRS];
    Code new_codes[PAIRS * CODE_STRIDE];  // of the tokens in x
};

template <class L, class Codec>
struct Rounder {
    using Arrays = RounderArrays<L, Codec>;
    static constexpr int W = Codec::WIDTH, PAIRS = Arrays::PAIRS, STRIDE = Arrays::STRIDE;

    Arrays &arrays;
    const Nearest<Codec> nearest;

    __device__ Rounder(unsigned char *shared, const unsigned short *candidates)
        : arrays(*reinterpret_cast<Arrays *>(shared)), nearest{arrays.points, candidates} {}

    template <class Full>
    __device__ __forceinline__ void encode(const Move<L, Full> &move) {
        const float *table = reinterpret_cast<const float *>(move.side->tables + Codec::POINTS_F32);
#pragma unroll 1
        for (int i = threadIdx.x; i < Codec::POINTS * W; i += THREADS) arrays.points[i] = table[i];
        if constexpr (L::MEAN_BITS != 0) mean_of_block<L, STRIDE>(arrays.mean, arrays.x, move, TOKENS);
        for (int first = 0; first < L::N; first += TOKENS) {
            if (L::MEAN_BITS == 0 || TOKENS < L::N) load_tokens<L, 1, STRIDE>(arrays.x, move.full(), first, TOKENS);
            __syncthreads();
            if constexpr (Codec::COVERED)
                cover<L, Codec, STRIDE>(arrays.norms + first, arrays.x, arrays.mean, TOKENS, move.side->tables);
            else
                measure<L, STRIDE>(arrays.norms + first, arrays.x, arrays.mean, TOKENS, false);
            __syncthreads();
            round(first);
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS)
                arrays.codes[first * PAIRS + i] = arrays.new_codes[i % PAIRS * Arrays::CODE_STRIDE + i / PAIRS];
            __syncthreads();
        }
        Codec::pack(move.record(), arrays.codes, arrays.norms, move.side->tables, threadIdx.x, THREADS);
    }

    __device__ __forceinline__ void round(int first) {
#pragma unroll 1
        for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
            const int t = i % TOKENS, pair = i / TOKENS;
            float norm = arrays.norms[first + t], unit[W];
            if (W == 2) norm = fminf(norm, __int_as_float(L::LARGEST_NORM));
#pragma unroll
            for (int w = 0; w < W; ++w)
                unit[w] = __fdiv_rn(arrays.x[(pair * W + w) * STRIDE + t], norm > 0.0f ? norm : 1.0f);
            arrays.new_codes[pair * Arrays::CODE_STRIDE + t] = static_cast<typename Arrays::Code>(nearest(unit));
        }
    }
};

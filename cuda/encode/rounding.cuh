// Chooses codes and norms of a block as `Codec.encode` does, to the bit: the nearest points, and as the norm the rms
// or what covers the largest value. Part of encode_blocks.cu.
template <class L, class Codec>
struct Rounder {
    using R = RounderMemory<L, Codec>;
    static constexpr int W = Codec::WIDTH, PAIRS = R::PAIRS, STRIDE = R::STRIDE;

    using Code = typename R::Code;

    float *x;              // (D, STRIDE); columns are tokens
    float *points, *mean;  // (POINTS, W), (D)
    float *sizes;          // (N): the norms
    Code *codes;           // (N, PAIRS)
    Code *new_codes;       // (PAIRS, CODE_STRIDE): codes of the tokens in x
    Nearest<Codec> nearest;

    __device__ Rounder(unsigned char *shared, const unsigned short *candidates)
        : x(area<float>(shared, 0)), points(area<float>(shared, R::POINTS)), mean(area<float>(shared, R::MEAN)),
          sizes(area<float>(shared, R::SIZES)), codes(area<Code>(shared, R::CODES)),
          new_codes(area<Code>(shared, R::NEW_CODES)), nearest{points, candidates} {}

    template <class Full>
    __device__ __forceinline__ void encode(const Move<L, Full> &move) {
        const float *table = reinterpret_cast<const float *>(move.side->tables + Codec::POINTS_F32);
#pragma unroll 1
        for (int i = threadIdx.x; i < Codec::POINTS * W; i += THREADS) points[i] = table[i];
        if constexpr (L::MEAN_BITS != 0) mean_of_block<L, STRIDE>(mean, x, move, TOKENS);
        for (int first = 0; first < L::N; first += TOKENS) {
            if (L::MEAN_BITS == 0 || TOKENS < L::N) load_tokens<L, 1, STRIDE>(x, move.full(), first, TOKENS);
            __syncthreads();
            if constexpr (Codec::COVERED)
                cover<L, Codec, STRIDE>(sizes + first, x, mean, TOKENS, move.side->tables);
            else
                measure<L, STRIDE>(sizes + first, x, mean, TOKENS, false);
            __syncthreads();
            round(first);
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS)
                codes[first * PAIRS + i] = new_codes[i % PAIRS * R::CODE_STRIDE + i / PAIRS];
            __syncthreads();
        }
        Codec::pack(move.record(), codes, sizes, move.side->tables, threadIdx.x, THREADS);
    }

    __device__ __forceinline__ void round(int first) {
#pragma unroll 1
        for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
            const int t = i % TOKENS, pair = i / TOKENS;
            float size = sizes[first + t], unit[W];
            if (W == 2) size = fminf(size, __int_as_float(L::LARGEST_NORM));
#pragma unroll
            for (int w = 0; w < W; ++w) unit[w] = __fdiv_rn(x[(pair * W + w) * STRIDE + t], size > 0.0f ? size : 1.0f);
            new_codes[pair * R::CODE_STRIDE + t] = static_cast<Code>(nearest(unit));
        }
    }
};

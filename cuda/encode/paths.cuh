// Chooses codes and norms of a block as `engine.quantization.encode` does for codes whose points depend on the code
// before: a token is rounded to its best path (path_search.cuh), all pairs together, and norms are fitted as for other
// codecs. Part of encode_blocks.cu.
//
// Tokens of values are in the order of their rounds: with feedback between tokens there are four, and each needs the
// errors of earlier rounds. x has the tokens of one round, or as many as there is room for.
template <class L, class Codec>
struct PathRounder {
    using R = RounderMemory<L, Codec>;
    static constexpr int D = L::D, PAIRS = R::PAIRS, STRIDE = R::STRIDE;
    static constexpr int ROUND = L::VALUES ? L::N / 4 : L::N;  // tokens that are rounded together
    static constexpr int COUNT = ROUND <= TOKENS ? ROUND : ROUND % TOKENS ? 16 : TOKENS;  // tokens in x
    static_assert(ROUND % COUNT == 0 && COUNT % 4 == 0, "");

    float *x;                   // (D, STRIDE): targets, then errors; columns are tokens
    float *partial;             // (SHARES, SUMS, TOKENS)
    float2 *points;             // (POINTS)
    float *mean;                // (D)
    float *sizes, *norms;       // (N): norms that tokens are rounded with, in their order in x; norms to be stored
    float *least;               // (TOKENS): the least cost of each token so far
    unsigned short *codes;      // (N, PAIRS)
    unsigned short *new_codes;  // (PAIRS, CODE_STRIDE): codes of the tokens in x
    unsigned short *links;      // (PAIRS, TOKENS, 4): see PathSearch
    const SideArrays *side;     // kept in no register while paths are searched for

    __device__ PathRounder(unsigned char *shared, const SideArrays *side)
        : x(area<float>(shared, 0)), partial(area<float>(shared, R::PARTIAL)), points(area<float2>(shared, R::POINTS)),
          mean(area<float>(shared, R::MEAN)), sizes(area<float>(shared, R::SIZES)),
          norms(area<float>(shared, R::NORMS)), least(area<float>(shared, R::LEAST)),
          codes(area<unsigned short>(shared, R::CODES)), new_codes(area<unsigned short>(shared, R::NEW_CODES)),
          links(area<unsigned short>(shared, R::LINKS)), side(side) {}

    __device__ __forceinline__ bool has_metric() const { return side->feedback; }
    __device__ __forceinline__ const float *token_feedback() const {
        return L::VALUES ? side->token_feedback : nullptr;
    }

    // The token of the block that is number `i` in the order of rounds.
    static __device__ __forceinline__ int token_of(int i) { return L::VALUES ? i % ROUND * 4 + i / ROUND : i; }

    template <class Full>
    __device__ __forceinline__ void encode(const Move<L, Full> &move) {
        const float2 *table = reinterpret_cast<const float2 *>(move.side->tables + Codec::POINTS_F32);
        for (int i = threadIdx.x; i < Codec::POINTS; i += THREADS) points[i] = table[i];
        if constexpr (L::MEAN_BITS != 0) mean_of_block<L, STRIDE>(mean, x, move, COUNT);
        constexpr float factors[] = {NORM_FACTORS};
        const int norms_to_try = !L::VALUES && side->mean_query ? PATH_NORMS : 1;
#pragma unroll 1
        for (int first = 0; first < L::N; first += COUNT)
#pragma unroll 1
            for (int number = 0; number < norms_to_try; ++number) {
                float factor = factors[0];
#pragma unroll
                for (int i = 1; i < PATH_NORMS; ++i)
                    if (number == i) factor = factors[i];
                load(move.full(), first);
                __syncthreads();
                measure<L, STRIDE>(sizes + first, x, mean, COUNT, factor, has_metric());
                __syncthreads();
                if (token_feedback() && first >= ROUND) {
                    catch_up(move.full(), first);
                    __syncthreads();
                }
                search(first);
                __syncthreads();
                if (has_metric()) fit(first, number);
                keep(first);
                __syncthreads();
            }
        Codec::pack(move.record(), codes, norms, move.side->tables, threadIdx.x, THREADS);
    }

    // Loads tokens `first` … `first` + COUNT − 1 in the order of rounds.
    __device__ __forceinline__ void load(const unsigned char *full, int first) const {
        if constexpr (L::VALUES) {
            for (int i = threadIdx.x; i < COUNT * D; i += THREADS)
                x[i % D * STRIDE + i / D] = full_value<L>(full, token_of(first + i / D), i % D);
        } else {
            load_tokens<L, 1, STRIDE>(x, full, first, COUNT);
        }
    }

    // Adds the feedback of the errors of earlier rounds to the targets.
    __device__ void catch_up(const unsigned char *full, int first) const {
        for (int i = threadIdx.x; i < COUNT / 4 * D; i += THREADS) {
            const int channel = i % D, pair = channel / 2, column = i / D * 4;
            float sums[4] = {};
#pragma unroll 2
            for (int earlier = 0; earlier < first / ROUND * ROUND; ++earlier) {
                const int token = token_of(earlier);
                const unsigned short *own = codes + token * PAIRS + pair;
                const float2 point = flipped(points[*own], pair ? own[-1] : 0);
                const float rounded = __fmul_rn(channel % 2 ? point.y : point.x, sizes[earlier]);
                const float error = full_value<L>(full, token, channel) - rounded;
                float weights[4];
                load_floats(weights, token_feedback() + earlier * L::N + first + column);
#pragma unroll
                for (int t = 0; t < 4; ++t) sums[t] += weights[t] * error;
            }
#pragma unroll
            for (int t = 0; t < 4; ++t) x[channel * STRIDE + column + t] += sums[t];
        }
    }

    // Finds the best path of each token in x and writes its codes. A warp has eight tokens; where there are fewer, some
    // lanes search for the last one again and write nothing.
    __device__ __forceinline__ void search(int first) const {
#pragma unroll 1
        for (int start = threadIdx.x / 32 * 8; start < COUNT; start += WARPS * 8) {
            const int own = start + threadIdx.x % 32 / 4, column = min(own, COUNT - 1);
            float size = sizes[first + column];
            if (has_metric()) {
                size = size > 0.0f ? __frcp_rn(size) : 0.0f;
            } else {
                size = fminf(size, __int_as_float(L::LARGEST_NORM));
                size = size > 0.0f ? size : 1.0f;
            }
            PathSearch<L, Codec> search = {x + column, points, links + own * 4,
                                           reinterpret_cast<const unsigned *>(side->candidates),
                                           at_head(side->feedback, D * D), at_head(side->weights, PAIRS), size, 0.0f};
            search.run();
            search.trace(new_codes + own, own < COUNT);
        }
    }

    // Replaces targets by errors, and fits norms to them. Begins after a barrier and ends with one.
    __device__ __forceinline__ void fit(int first, int number) {
        for (int i = threadIdx.x; i < COUNT * PAIRS; i += THREADS) {
            const int t = i % COUNT, pair = i / COUNT;
            const unsigned short *own = new_codes + pair * R::CODE_STRIDE + t;
            const float2 point = flipped(points[*own], pair ? own[-R::CODE_STRIDE] : 0);
            float *place = x + 2 * pair * STRIDE + t;
            place[0] -= __fmul_rn(point.x, sizes[first + t]), place[STRIDE] -= __fmul_rn(point.y, sizes[first + t]);
        }
        __syncthreads();
        const int share = threadIdx.x / 32 / R::GROUPS, token = threadIdx.x / 32 % R::GROUPS * 32 + threadIdx.x % 32;
        const Cost cost = cost_of<L>(*side);
        const NormFit<L, Codec> norm_fit = {x, reinterpret_cast<const float *>(points), partial, new_codes, cost};
        if (token < COUNT) norm_fit.sum_costs(sizes[first + token], share, token);
        __syncthreads();
        if (threadIdx.x < COUNT) {
            const int t = threadIdx.x;
            const auto fitted = norm_fit(sizes[first + t], t);
            const bool best = number == 0 || fitted.cost < least[t];
            if (best) norms[token_of(first + t)] = fitted.norm, least[t] = fitted.cost;
            partial[t] = best;
        }
        __syncthreads();
    }

    // Keeps the codes of tokens that have got better ones; without a metric all of them, and the rms as their norms.
    __device__ __forceinline__ void keep(int first) const {
        for (int i = threadIdx.x; i < COUNT * PAIRS; i += THREADS) {
            const int t = i / PAIRS, pair = i % PAIRS;
            if (!has_metric() || partial[t] != 0.0f)
                codes[token_of(first + t) * PAIRS + pair] = new_codes[pair * R::CODE_STRIDE + t];
        }
        if (!has_metric())
            for (int t = threadIdx.x; t < COUNT; t += THREADS) norms[token_of(first + t)] = sizes[first + t];
    }
};

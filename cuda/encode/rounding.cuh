// Chooses codes and norms of a block as `engine.quantization.encode` does: keys with a metric by error feedback between
// pairs and with fitted norms; without a metric, the nearest points. Part of encode_blocks.cu.
template <class L, class Codec>
struct Rounder {
    using R = RounderMemory<L, Codec>;
    static constexpr int D = L::D, W = Codec::WIDTH, PAIRS = R::PAIRS, STRIDE = R::STRIDE;
    static constexpr int AHEAD_IN_PAIRS = TOKENS < L::N ? 2 : 4, AHEAD_IN_SHARES = TOKENS < L::N ? 2 : 5;  // unrolling
    static constexpr int GROUPS = R::GROUPS, FEEDERS = R::FEEDERS;

    float *x;                   // (D, STRIDE): targets, then errors; columns are tokens
    float *partial;             // (2, FEEDERS, W, TOKENS): feedback to this pair and the next; (SHARES, SUMS, TOKENS)
    float *points, *mean;       // (POINTS, W), (D)
    float *sizes, *norms;       // (N): norms that the tokens are rounded with; norms to be stored
    unsigned short *codes;      // (N, PAIRS)
    unsigned short *new_codes;  // (PAIRS, CODE_STRIDE): codes of the tokens in x
    Cost cost;
    Nearest<Codec> nearest;

    __device__ Rounder(unsigned char *shared, const unsigned short *candidates, const Cost &cost)
        : x(area<float>(shared, 0)), partial(area<float>(shared, R::PARTIAL)),
          points(area<float>(shared, R::POINTS)), mean(area<float>(shared, R::MEAN)),
          sizes(area<float>(shared, R::SIZES)), norms(area<float>(shared, R::NORMS)),
          codes(area<unsigned short>(shared, R::CODES)), new_codes(area<unsigned short>(shared, R::NEW_CODES)),
          cost(cost), nearest{points, candidates} {}

    template <class Full>
    __device__ __forceinline__ void encode(const Move<L, Full> &move) {
        const float *table = reinterpret_cast<const float *>(move.side->tables + Codec::POINTS_F32);
#pragma unroll 1
        for (int i = threadIdx.x; i < Codec::POINTS * W; i += THREADS) points[i] = table[i];
        if constexpr (L::MEAN_BITS != 0) mean_of_block<L, STRIDE>(mean, x, move, TOKENS);
        for (int first = 0; first < L::N; first += TOKENS) {
            if (L::MEAN_BITS == 0 || TOKENS < L::N) load_tokens<L, 1, STRIDE>(x, move.full(), first, TOKENS);
            __syncthreads();
            measure<L, STRIDE>(sizes + first, x, mean, TOKENS, 1.0f, cost.feedback);
            __syncthreads();
            if (L::VALUES || !cost.feedback) round_to_nearest(first);
            else if constexpr (!L::VALUES) round_with_feedback(first);
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS)
                codes[first * PAIRS + i] = new_codes[i % PAIRS * R::CODE_STRIDE + i / PAIRS];
            __syncthreads();
        }
        Codec::pack(move.record(), codes, norms, move.side->tables, threadIdx.x, THREADS);
    }

    // As Codec.encode: the nearest points, and the rms as the norm.
    __device__ __forceinline__ void round_to_nearest(int first) {
#pragma unroll 1
        for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
            const int t = i % TOKENS, pair = i / TOKENS;
            float size = sizes[first + t], unit[W];
            if (W == 2) size = fminf(size, __int_as_float(L::LARGEST_NORM));
#pragma unroll
            for (int w = 0; w < W; ++w) unit[w] = __fdiv_rn(x[(pair * W + w) * STRIDE + t], size > 0.0f ? size : 1.0f);
            new_codes[pair * R::CODE_STRIDE + t] = static_cast<unsigned short>(nearest(unit));
            if (pair == 0) norms[first + t] = sizes[first + t];
        }
    }

    // The first GROUPS warps round a pair of each token while the others add up the feedback to the next one. The
    // feedback of the pair just before comes too late for that: round_pair adds it.
    __device__ __forceinline__ void round_with_feedback(int first) {
        const int warp = threadIdx.x / 32, feeder = warp / GROUPS - 1, token = warp % GROUPS * 32 + threadIdx.x % 32;
        Last last = {};
        // No feedback to the first pair. The index is computed here, not kept in a register from round to round.
        for (int i = thread_read_anew(); i < FEEDERS * W * TOKENS; i += THREADS) partial[i] = 0.0f;
        if (feeder < 0 && token < TOKENS) last.remember(sizes[first + token]);
        __syncthreads();
        for (int pair = 0; pair < PAIRS; ++pair) {
            if (token < TOKENS) {
                if (feeder < 0) round_pair(pair, token, last);
                else if (pair + 1 < PAIRS) feed_pairs(pair + 1, feeder, token);
            }
            __syncthreads();
        }
        const NormFit<L, Codec> norm_fit = {x, points, partial, new_codes, cost};
        if (token < TOKENS) norm_fit.sum_costs(sizes[first + token], feeder + 1, token);
        __syncthreads();
        if (threadIdx.x < TOKENS)
            norms[first + threadIdx.x] = norm_fit(sizes[first + threadIdx.x], threadIdx.x).norm;
    }

    // Feedback to a pair from pairs before the previous one, into `partial`: this warp's share.
    __device__ __forceinline__ void feed_pairs(int pair, int feeder, int token) {
        const float *f = cost.feedback + pair * W;
        float sum[W] = {};
#pragma unroll AHEAD_IN_PAIRS
        for (int before = feeder; before < pair - 1; before += FEEDERS) {
#pragma unroll
            for (int w = 0; w < W; ++w) {
                const float error = x[(before * W + w) * STRIDE + token];
                float weight[W];
                load_cell(weight, f + (before * W + w) * D);
#pragma unroll
                for (int r = 0; r < W; ++r) sum[r] += weight[r] * error;
            }
        }
#pragma unroll
        for (int w = 0; w < W; ++w) partial[((pair % 2 * FEEDERS + feeder) * W + w) * TOKENS + token] = sum[w];
    }

    // A token in registers: rms, 1 / rms, the error of the previous pair.
    struct Last {
        float size, inverse, error[W];

        __device__ __forceinline__ void remember(float rms) {
            size = rms, inverse = rms > 0.0f ? __frcp_rn(rms) : 0.0f;
        }
    };

    __device__ __forceinline__ void round_pair(int pair, int t, Last &last) {
        float *place = x + pair * W * STRIDE + t;
        float target[W], aim[W], rounded[W];
#pragma unroll
        for (int w = 0; w < W; ++w) {
            aim[w] = target[w] = place[w * STRIDE];
#pragma unroll AHEAD_IN_SHARES
            for (int c = 0; c < FEEDERS; ++c) aim[w] += partial[((pair % 2 * FEEDERS + c) * W + w) * TOKENS + t];
        }
        if (pair > 0) {
#pragma unroll
            for (int w = 0; w < W; ++w) {
                float weight[W];
                load_cell(weight, cost.feedback + (pair * W - W + w) * D + pair * W);
#pragma unroll
                for (int r = 0; r < W; ++r) aim[r] += weight[r] * last.error[w];
            }
        }
#pragma unroll
        for (int w = 0; w < W; ++w) aim[w] *= last.inverse;
        const unsigned code = nearest(aim);
        new_codes[pair * R::CODE_STRIDE + t] = static_cast<unsigned short>(code);
        load_cell(rounded, points + code * W);
#pragma unroll
        for (int w = 0; w < W; ++w)
            place[w * STRIDE] = last.error[w] = target[w] - __fmul_rn(rounded[w], last.size);
    }
};

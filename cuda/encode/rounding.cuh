// Chooses codes and norms of a block as `engine.quantization.encode` does: with a metric, by error feedback between
// pairs and between tokens and with fitted norms; without, the nearest points.
// Part of encode_blocks.cu.
template <class L, class Codec>
struct Rounder {
    using R = RounderMemory<L, Codec>;
    static constexpr int D = L::D, W = Codec::WIDTH, PAIRS = R::PAIRS, STRIDE = R::STRIDE;
    static constexpr int AHEAD_IN_PAIRS = TOKENS < L::N ? 2 : 4, AHEAD_IN_SHARES = TOKENS < L::N ? 2 : 5;  // unrolling
    static constexpr int GROUPS = R::GROUPS, FEEDERS = R::FEEDERS;

    float *x;                   // (D, STRIDE): targets, then errors; columns are tokens
    float *partial;             // (2, FEEDERS, W, TOKENS): feedback to this front and the next; (SHARES, SUMS, TOKENS)
    float *errors;              // (2, W, TOKENS): value minus rounded value, of this front and the previous one
    float *points, *mean;       // (POINTS, W), (D)
    float *sizes, *norms;       // (N): norms that the tokens are rounded with; norms to be stored
    unsigned short *codes;      // (N, PAIRS)
    unsigned short *new_codes;  // (PAIRS, CODE_STRIDE): codes of the tokens in x
    const unsigned char *full;
    Cost cost;
    Nearest<Codec> nearest;

    __device__ Rounder(unsigned char *shared, const unsigned short *candidates, const Cost &cost)
        : x(area<float>(shared, 0)), partial(area<float>(shared, R::PARTIAL)), errors(area<float>(shared, R::ERRORS)),
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
            full = move.full();
            if (cost.feedback) round_with_feedback(first);
            else round_to_nearest(first);
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

    // The first GROUPS warps round a front while the others add up the feedback to the next one. The feedback of a
    // token's previous pair and of the previous token comes too late for that: round_pair adds it.
    __device__ __forceinline__ void round_with_feedback(int first) {
        if (L::VALUES && cost.token_feedback && first > 0) catch_up(first);
        const int warp = threadIdx.x / 32, feeder = warp / GROUPS - 1, token = warp % GROUPS * 32 + threadIdx.x % 32;
        const int fronts = PAIRS + (cost.token_feedback ? TOKENS - 1 : 0);
        Own own = {};
        // No feedback to the first front. The index is computed here, not kept in a register from round to round.
        for (int i = thread_read_anew(); i < FEEDERS * W * TOKENS; i += THREADS) partial[i] = 0.0f;
        if (feeder < 0 && token < TOKENS)
            own.remember(sizes[first + token], L::VALUES && cost.token_feedback && token > 0
                                                   ? cost.token_feedback[(first + token - 1) * L::N + first + token]
                                                   : 0.0f);
        __syncthreads();
        for (int front = 0; front < fronts; ++front) {
            if (feeder < 0) {
                if (token < TOKENS) round_pair(first, front, token, own);
            } else {
                if (L::VALUES && cost.token_feedback && front > 0) feed_tokens(first, front - 1, feeder, token);
                feed_pairs(front + 1, feeder, token);
            }
            __syncthreads();
        }
        const NormFit<L, Codec> norm_fit = {x, points, partial, new_codes, cost};
        if (token < TOKENS) norm_fit.sum_costs(sizes[first + token], feeder + 1, token);
        __syncthreads();
        if (threadIdx.x < TOKENS)
            norms[first + threadIdx.x] = norm_fit(sizes[first + threadIdx.x], threadIdx.x).norm;
    }

    // The pair that a token rounds on a front; it may be outside 0 … PAIRS − 1.
    __device__ __forceinline__ int pair_of(int t, int front) const { return cost.token_feedback ? front - t : front; }

    // Adds the feedback of tokens before `first` to the targets.
    __device__ void catch_up(int first) {
        for (int i = threadIdx.x; i < TOKENS * D; i += THREADS) {
            const int t = i % TOKENS, channel = i / TOKENS;
            float sum = 0.0f;
#pragma unroll 2
            for (int before = 0; before < first; ++before) {
                const float rounded = points[codes[before * PAIRS + channel / W] * W + channel % W] * sizes[before];
                sum += cost.token_feedback[before * L::N + first + t] *
                       (full_value<L>(full, before, channel) - rounded);
            }
            x[channel * STRIDE + t] += sum;
        }
        __syncthreads();
    }

    // Adds the feedback of a front's errors to later tokens except the next one: this warp's share.
    __device__ __forceinline__ void feed_tokens(int first, int front, int feeder, int token) {
        const int oldest = max(0, front - PAIRS + 1), newest = min(front, TOKENS - 1);
        const float *latest = errors + front % 2 * W * TOKENS;
        for (int from = oldest + feeder; from <= newest; from += FEEDERS) {
            if (token <= from + 1 || token >= TOKENS) continue;
            const float weight = cost.token_feedback[(first + from) * L::N + first + token];
            float *target = x + (front - from) * W * STRIDE + token;
#pragma unroll
            for (int w = 0; w < W; ++w) target[w * STRIDE] += weight * latest[w * TOKENS + from];
        }
    }

    // Feedback to a front from pairs before the previous one, into `partial`: this warp's share.
    __device__ __forceinline__ void feed_pairs(int front, int feeder, int token) {
        if (token >= TOKENS) return;
        const int pair = pair_of(token, front), most = min(pair_of(token / 32 * 32, front), PAIRS - 1) - 1;
        const bool is_there = pair >= 0 && pair < PAIRS;
        const float *f = cost.feedback + (is_there ? pair * W : 0), *own = x + token;
        float sum[W] = {};
#pragma unroll AHEAD_IN_PAIRS
        for (int before = feeder; before < most; before += FEEDERS) {
            if (L::VALUES && !(is_there && before < pair - 1)) continue;
#pragma unroll
            for (int w = 0; w < W; ++w) {
                const float error = own[(before * W + w) * STRIDE];
                float weight[W];
                load_cell(weight, f + (before * W + w) * D);
#pragma unroll
                for (int r = 0; r < W; ++r) sum[r] += weight[r] * error;
            }
        }
#pragma unroll
        for (int w = 0; w < W; ++w) partial[((front % 2 * FEEDERS + feeder) * W + w) * TOKENS + token] = sum[w];
    }

    // A token in registers: rms, 1 / rms, the feedback weight of the previous token, the error of the previous pair.
    struct Own {
        float size, inverse, weight, error[W];

        __device__ __forceinline__ void remember(float rms, float previous_weight) {
            size = rms, inverse = rms > 0.0f ? __frcp_rn(rms) : 0.0f, weight = previous_weight;
        }
    };

    __device__ __forceinline__ void round_pair(int first, int front, int t, Own &own) {
        const int pair = pair_of(t, front);
        if (pair < 0 || pair >= PAIRS) return;
        float *place = x + pair * W * STRIDE + t, *own_error = errors + front % 2 * W * TOKENS + t;
        const float *before = errors + (front + 1) % 2 * W * TOKENS + t - 1;
        float target[W], aim[W], rounded[W], value[W] = {};
#pragma unroll
        for (int w = 0; w < W; ++w) {
            if constexpr (L::VALUES)
                if (cost.token_feedback) value[w] = full_value<L>(full, first + t, pair * W + w);
            target[w] = place[w * STRIDE];
            if (own.weight != 0.0f) target[w] += own.weight * before[w * TOKENS];
            aim[w] = target[w];
#pragma unroll AHEAD_IN_SHARES
            for (int c = 0; c < FEEDERS; ++c) aim[w] += partial[((front % 2 * FEEDERS + c) * W + w) * TOKENS + t];
        }
        if (pair > 0) {
#pragma unroll
            for (int w = 0; w < W; ++w) {
                float weight[W];
                load_cell(weight, cost.feedback + (pair * W - W + w) * D + pair * W);
#pragma unroll
                for (int r = 0; r < W; ++r) aim[r] += weight[r] * own.error[w];
            }
        }
#pragma unroll
        for (int w = 0; w < W; ++w) aim[w] *= own.inverse;
        const unsigned code = nearest(aim);
        new_codes[pair * R::CODE_STRIDE + t] = static_cast<unsigned short>(code);
        load_cell(rounded, points + code * W);
#pragma unroll
        for (int w = 0; w < W; ++w) {
            rounded[w] = __fmul_rn(rounded[w], own.size);
            place[w * STRIDE] = own.error[w] = target[w] - rounded[w];
            own_error[w * TOKENS] = value[w] - rounded[w];
        }
    }
};

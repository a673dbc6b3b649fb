// Choosing codes and norms of a block as `engine.quantization.encode` does: with feedback between pairs and between
// tokens, norms fitted or tilted; or the nearest points. Part of encode_blocks.cu, which says what each thread does.
template <class L, class Codec>
struct Rounder {
    using R = Room<L, Codec>;
    static constexpr int D = L::D, W = Codec::WIDTH, PAIRS = R::PAIRS, STRIDE = R::STRIDE;
    static constexpr int AHEAD_IN_PAIRS = TOKENS < L::N ? 2 : 4, AHEAD_IN_SHARES = TOKENS < L::N ? 2 : 5;  // registers
    static constexpr int GROUPS = R::GROUPS, SHARES = R::SHARES, FEEDERS = R::FEEDERS, SUMS = R::SUMS;

    float *x;               // (D, STRIDE): columns are tokens
    float *partial;         // (2, FEEDERS, W, TOKENS): what feeds a front, and the next; (SHARES, SUMS, TOKENS)
    float *errors;          // (2, W, TOKENS): of a front, and the one before, against the values themselves
    float *points, *mean;   // (POINTS, W), (D)
    float *sizes, *norms;   // (N): rms, and what is stored
    unsigned short *codes;   // (N, PAIRS)
    unsigned short *turned;  // (PAIRS, CODE_STRIDE): those of the tokens in x
    const unsigned char *full;
    Cost cost;
    Nearest<Codec> nearest;

    __device__ Rounder(unsigned char *shared, const unsigned short *near, const Cost &cost)
        : x(area<float>(shared, 0)), partial(area<float>(shared, R::PARTIAL)), errors(area<float>(shared, R::ERRORS)),
          points(area<float>(shared, R::POINTS)), mean(area<float>(shared, R::MEAN)), sizes(area<float>(shared, R::SIZES)),
          norms(area<float>(shared, R::NORMS)), codes(area<unsigned short>(shared, R::CODES)),
          turned(area<unsigned short>(shared, R::TURNED)), cost(cost), nearest{points, near} {}

    template <class Full>
    __device__ __forceinline__ void encode(const Move<L, Full> &move) {
        const float *table = reinterpret_cast<const float *>(move.tables + Codec::POINTS_F32);
#pragma unroll 1
        for (int i = threadIdx.x; i < Codec::POINTS * W; i += THREADS) points[i] = table[i];
        if constexpr (L::MEAN_BITS != 0) {
            for (int first = 0; first < L::N; first += TOKENS) {
                load_tokens<L, 1, STRIDE>(x, move.full(), first, TOKENS);
                __syncthreads();
                add_tokens<D, 1, STRIDE>(mean, x, TOKENS, first == 0);
                __syncthreads();
            }
            store_mean<L>(move.record(), mean);
        }
        for (int first = 0; first < L::N; first += TOKENS) {
            if (L::MEAN_BITS == 0 || TOKENS < L::N) load_tokens<L, 1, STRIDE>(x, move.full(), first, TOKENS);
            __syncthreads();
            measure(first);
            __syncthreads();
            full = move.full();
            if (cost.feedback)
                round_well(first);
            else
                round_plainly(first);
            __syncthreads();
#pragma unroll 1
            for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS)
                codes[first * PAIRS + i] = turned[i % PAIRS * R::CODE_STRIDE + i / PAIRS];
            __syncthreads();
        }
        Codec::pack(move.record(), codes, norms, move.tables, threadIdx.x, THREADS);
    }

    // x without the mean; the rms of tokens. Eight lanes have a token, and add as NumPy does.
    __device__ void measure(int first) {
        constexpr int head = D <= 128 ? D : D / 2 / 8 * 8;
        for (int four = threadIdx.x / 32; four < TOKENS / 4; four += WARPS) {
            const int t = 4 * four + threadIdx.x % 32 / 8;
            float sum = squares(x + t, 0, head);
            if (head < D) sum = __fadd_rn(sum, squares(x + t, head, D));
            if (threadIdx.x % 8 == 0) sizes[first + t] = __fsqrt_rn(__fdiv_rn(sum, float(D)));
        }
    }

    __device__ __forceinline__ float squares(float *column, int from, int to) {
        float sum = 0.0f;
        for (int c = from + threadIdx.x % 8; c < to; c += 8) {
            float value = column[c * STRIDE];
            if (L::MEAN_BITS) value = __fsub_rn(value, mean[c]);
            if (cost.feedback) value = fminf(fmaxf(value, -LARGEST), LARGEST);
            column[c * STRIDE] = value;
            sum = __fadd_rn(sum, __fmul_rn(value, value));
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
        return sum;
    }

    // As Codec.encode.
    __device__ __forceinline__ void round_plainly(int first) {
#pragma unroll 1
        for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
            const int t = i % TOKENS, pair = i / TOKENS;
            float size = sizes[first + t], unit[W];
            if (W == 2) size = fminf(size, __int_as_float(L::LARGEST_NORM));
#pragma unroll
            for (int w = 0; w < W; ++w) unit[w] = __fdiv_rn(x[(pair * W + w) * STRIDE + t], size > 0.0f ? size : 1.0f);
            turned[pair * R::CODE_STRIDE + t] = static_cast<unsigned short>(nearest(unit));
            if (pair == 0) norms[first + t] = sizes[first + t];
        }
    }

    // The first warps round a front while the others sum what feeds the next. What the latest front itself feeds to the
    // same token, and to the next one, is added where it is needed.
    __device__ __forceinline__ void round_well(int first) {
        if (L::VALUES && cost.tokens && first > 0) catch_up(first);
        const int warp = threadIdx.x / 32, feeder = warp / GROUPS - 1, token = warp % GROUPS * 32 + threadIdx.x % 32;
        const int fronts = PAIRS + (cost.tokens ? TOKENS - 1 : 0);
        Own own = {};
        if (feeder >= 0)
            feed_pairs(0, feeder, token);
        else if (token < TOKENS)
            own.remember(sizes[first + token], L::VALUES && cost.tokens && token > 0
                                                   ? cost.tokens[(first + token - 1) * L::N + first + token]
                                                   : 0.0f);
        __syncthreads();
        for (int front = 0; front < fronts; ++front) {
            if (feeder < 0) {
                if (token < TOKENS) round_pair(first, front, token, own);
            } else {
                if (L::VALUES && cost.tokens && front > 0) feed_tokens(first, front - 1, feeder, token);
                feed_pairs(front + 1, feeder, token);
            }
            __syncthreads();
        }
        if (token < TOKENS) sum_costs(first, feeder + 1, token);
        __syncthreads();
        if (threadIdx.x < TOKENS) norms[first + threadIdx.x] = norm_of(threadIdx.x, sizes[first + threadIdx.x]);
    }

    // What a token rounds on a front; there may be no such pair.
    __device__ __forceinline__ int pair_of(int t, int front) const { return cost.tokens ? front - t : front; }

    // What the errors of tokens before `first` add to targets.
    __device__ void catch_up(int first) {
        for (int i = threadIdx.x; i < TOKENS * D; i += THREADS) {
            const int t = i % TOKENS, channel = i / TOKENS;
            float sum = 0.0f;
#pragma unroll 2
            for (int before = 0; before < first; ++before) {
                const float taken = points[codes[before * PAIRS + channel / W] * W + channel % W] * sizes[before];
                sum += cost.tokens[before * L::N + first + t] * (full_value<L>(full, before, channel) - taken);
            }
            x[channel * STRIDE + t] += sum;
        }
        __syncthreads();
    }

    // What the errors of a front add to the targets of later tokens but the next: this warp's share.
    __device__ __forceinline__ void feed_tokens(int first, int front, int feeder, int token) {
        const int oldest = max(0, front - PAIRS + 1), newest = min(front, TOKENS - 1);
        const float *latest = errors + front % 2 * W * TOKENS;
        for (int from = oldest + feeder; from <= newest; from += FEEDERS) {
            if (token <= from + 1 || token >= TOKENS) continue;
            const float fed = cost.tokens[(first + from) * L::N + first + token];
            float *target = x + (front - from) * W * STRIDE + token;
#pragma unroll
            for (int w = 0; w < W; ++w) target[w * STRIDE] += fed * latest[w * TOKENS + from];
        }
    }

    // What the errors of the pairs before the last add to the targets of a front: this warp's share.
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
                float fed[W];
                load_cell(fed, f + (before * W + w) * D);
#pragma unroll
                for (int r = 0; r < W; ++r) sum[r] += fed[r] * error;
            }
        }
#pragma unroll
        for (int w = 0; w < W; ++w) partial[((front % 2 * FEEDERS + feeder) * W + w) * TOKENS + token] = sum[w];
    }

    // What the thread of a token remembers of it: how the last token feeds it, and the error of its last pair.
    struct Own {
        float size, inverse, fed, error[W];

        __device__ __forceinline__ void remember(float rms, float fed_by_last) {
            size = rms, inverse = rms > 0.0f ? __frcp_rn(rms) : 0.0f, fed = fed_by_last;
        }
    };

    __device__ __forceinline__ void round_pair(int first, int front, int t, Own &own) {
        const int pair = pair_of(t, front);
        if (pair < 0 || pair >= PAIRS) return;
        float *place = x + pair * W * STRIDE + t, *now = errors + front % 2 * W * TOKENS + t;
        const float *before = errors + (front + 1) % 2 * W * TOKENS + t - 1;
        float target[W], aim[W], taken[W], value[W] = {};
#pragma unroll
        for (int w = 0; w < W; ++w) {
            if constexpr (L::VALUES)
                if (cost.tokens) value[w] = full_value<L>(full, first + t, pair * W + w);
            target[w] = place[w * STRIDE];
            if (own.fed != 0.0f) target[w] += own.fed * before[w * TOKENS];
            aim[w] = target[w];
#pragma unroll AHEAD_IN_SHARES
            for (int c = 0; c < FEEDERS; ++c) aim[w] += partial[((front % 2 * FEEDERS + c) * W + w) * TOKENS + t];
        }
        if (pair > 0) {
#pragma unroll
            for (int w = 0; w < W; ++w) {
                float fed[W];
                load_cell(fed, cost.feedback + (pair * W - W + w) * D + pair * W);
#pragma unroll
                for (int r = 0; r < W; ++r) aim[r] += fed[r] * own.error[w];
            }
        }
#pragma unroll
        for (int w = 0; w < W; ++w) aim[w] *= own.inverse;
        const unsigned code = nearest(aim);
        turned[pair * R::CODE_STRIDE + t] = static_cast<unsigned short>(code);
        load_cell(taken, points + code * W);
#pragma unroll
        for (int w = 0; w < W; ++w) {
            taken[w] = __fmul_rn(taken[w], own.size);
            place[w * STRIDE] = own.error[w] = target[w] - taken[w];
            now[w * TOKENS] = value[w] - taken[w];
        }
    }

    // What a token's codes say, in units of its size, and the target.
    __device__ __forceinline__ void read_back(float (&y)[W], float (&a)[W], int pair, int token, float size) const {
        load_cell(y, points + turned[pair * R::CODE_STRIDE + token] * W);
#pragma unroll
        for (int w = 0; w < W; ++w) a[w] = x[(pair * W + w) * STRIDE + token] + y[w] * size;
    }

    // This warp's share of a·My, yMy, aMa and, if norms are tilted, a·mean, y·mean, a·y, y·y. M is symmetric: these are
    // sums over what is below its diagonal, and half the diagonal, once for either side.
    __device__ __forceinline__ void sum_costs(int first, int share, int token) {
        constexpr int rows = 8;
        const float size = sizes[first + token];
        float sums[SUMS] = {};
        for (int turn = 0; turn * SHARES * rows < D; ++turn) {  // back and forth, for later rows are longer
            const int top = (turn * SHARES + (turn % 2 ? SHARES - 1 - share : share)) * rows;
            if (top >= D) continue;
            float y_m[rows] = {}, a_m[rows] = {};
#pragma unroll 1
            for (int pair = 0; pair < top / W; ++pair) {
                float y[W], a[W], m[rows];
                read_back(y, a, pair, token, size);
#pragma unroll
                for (int w = 0; w < W; ++w) {
                    load_floats(m, cost.matrix + (pair * W + w) * D + top);
#pragma unroll
                    for (int i = 0; i < rows; ++i) y_m[i] += m[i] * y[w], a_m[i] += m[i] * a[w];
                }
            }
#pragma unroll
            for (int pair = 0; pair < rows / W; ++pair) {
                float y[W], a[W], m[rows];
                read_back(y, a, top / W + pair, token, size);
#pragma unroll
                for (int w = 0; w < W; ++w) {
                    const int c = pair * W + w;
                    load_floats(m, cost.matrix + (top + c) * D + top);
                    const float y_c = y_m[c] + 0.5f * m[c] * y[w], a_c = a_m[c] + 0.5f * m[c] * a[w];
                    sums[0] += a[w] * y_c + y[w] * a_c, sums[1] += 2.0f * y[w] * y_c, sums[2] += 2.0f * a[w] * a_c;
                    if (cost.mean) {
                        const float mean = cost.mean[top + c];
                        sums[3] += a[w] * mean, sums[4] += y[w] * mean, sums[5] += a[w] * y[w], sums[6] += y[w] * y[w];
                    }
#pragma unroll
                    for (int i = c + 1; i < rows; ++i) y_m[i] += m[i] * y[w], a_m[i] += m[i] * a[w];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i) partial[(share * SUMS + i) * TOKENS + token] = sums[i];
    }

    // The norm of least cost, from those sums: to the metric, or to the queries that attend.
    __device__ __forceinline__ float norm_of(int t, float size) const {
        const auto quotient = [](float above, float below) { return below > 0.0f ? above / below : 1.0f; };
        float s[SUMS] = {};
#pragma unroll 2
        for (int c = 0; c < SHARES; ++c)
#pragma unroll
            for (int i = 0; i < SUMS; ++i) s[i] += partial[(c * SUMS + i) * TOKENS + t];
        // What reads back is size · y.
        const float cross = s[0] * size, square = s[1] * size * size;
        float ratio = quotient(cross, square);
        if (cost.mean) {
            const float read_mean = s[4] * size, root = sqrtf(float(D));
            const float lean = (s[2] - s[3] * s[3]) / root + s[3];
            const float read_lean = (cross - s[3] * read_mean) / root + read_mean;
            const float plain = quotient(s[5] * size, s[6] * size * size);
            ratio = quotient(cross + lean * read_lean, square + read_lean * read_lean);
            ratio = fminf(fmaxf(ratio, TILT_LOW * plain), TILT_HIGH * plain);
        }
        return fmaxf(ratio * size, 0.0f);
    }
};

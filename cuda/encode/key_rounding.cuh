// Chooses codes and norms of a block of keys. Part of encode_keys.cu.
//
// A row is a token rounded with one of the norms; a warp has 32 rows, two tiles of 16 tokens, in the order in which
// mma.m16n8k16 has its sums: lane 4g + t has, of every group of 8 channels, pair t of rows g and g + 8 of both tiles.
// Channels of a group come in four steps, a pair of all rows in each; in a step a lane rounds that pair of one row, and
// the four lanes with the same g exchange what they have rounded. An error is fed back to later channels by products:
// after each step to its own group, after a group to all later ones. Numbers are in units of a token's rms.
//
// What errors cost follows from the residues: M + ridge · I = (I + F)ᵀ · diagonal · (I + F), so e·Me is a sum over
// pairs of (e + F·e)² in the blocks of the diagonal, less the ridge; e + F·e of a pair is what is left of its target
// when it is rounded. a·Me likewise, with z = a + F·a of the token, which is computed once for all norms.

// Both parts of a lane's row g (h = 0) or g + 8 as an operand A whose columns are 8 high and 8 low parts.
__device__ __forceinline__ void split_rows(unsigned (&a)[4], const float (&x)[4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) split_halves(a[h], a[2 + h], x[2 * h], x[2 * h + 1], 1.0f);
}

// c += rows · a tile of F, both in two parts.
__device__ __forceinline__ void add_product(float (&c)[4], const unsigned (&a)[4], const uint2 &tile) {
    const unsigned high[2] = {tile.x, tile.x}, low[2] = {tile.y, tile.y};
    mma_m16n8k16_f16(c, a, high);
    mma_m16n8k16_f16(c, a, low);
}

// Errors of 32 rows in a group of channels.
struct Errors {
    unsigned a[2][4];

    __device__ __forceinline__ explicit Errors(const float (&errors)[2][4]) {
#pragma unroll
        for (int m = 0; m < 2; ++m) split_rows(a[m], errors[m]);
    }
    __device__ __forceinline__ void feed(float (&targets)[2][4], const uint2 &tile) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) add_product(targets[m], a[m], tile);
    }
};

template <class L, class Codec, class Block>
struct KeyRounder {
    using R = KeyMemory<L, Codec>;
    static constexpr int D = L::D, GROUPS = R::GROUPS, PAIRS = R::PAIRS, ROWS = R::ROWS, SUMS = 5;
    static constexpr int HELD = GROUPS > 8 ? (GROUPS + 1) / 2 : GROUPS;  // groups of targets in registers
    static_assert(D % 8 == 0 && Codec::WIDTH == 2 && L::N % TOKENS == 0 && ROWS >= FACTORS * TOKENS, "");

    unsigned char *shared;
    const Block block;

    // (TOKENS / 16, GROUPS, 32): a lane's four numbers of z; before that, tokens (TOKENS, D); at the end, codes (N,
    // PAIRS) if the block has no more tokens.
    __device__ __forceinline__ float4 *z() const { return area<float4>(shared, 0); }
    // Tiles of F on and above the diagonal, row after row, 32 lanes each: errors of channels 2t, 2t + 1 of one group to
    // channel g of another, high and low parts.
    __device__ __forceinline__ uint2 *tiles(int from, int to) const {
        const int tile = from * GROUPS - from * (from - 1) / 2 + to - from;
        return area<uint2>(shared, R::FEEDBACK) + tile * 32 + threadIdx.x % 32;
    }
    __device__ __forceinline__ float *points() const { return area<float>(shared, R::POINTS); }
    __device__ __forceinline__ float *mean() const { return area<float>(shared, R::MEAN); }      // (D)
    __device__ __forceinline__ float *sizes() const { return area<float>(shared, R::SIZES); }    // (N): rms
    __device__ __forceinline__ float *inverses() const { return sizes() + L::N; }                // (N): 1 / rms, or 0
    __device__ __forceinline__ float *along() const { return sizes() + 2 * L::N; }               // (N): a·μ
    __device__ __forceinline__ float *weight() const { return sizes() + 3 * L::N; }              // (N): a·Ma, over rms²
    __device__ __forceinline__ float *norms() const { return sizes() + 4 * L::N; }               // (N): to be stored
    __device__ __forceinline__ float *factors() const { return sizes() + 5 * L::N; }             // (FACTORS)
    __device__ __forceinline__ float2 *fitted() const { return area<float2>(shared, R::FITTED); }  // (ROWS): norm, cost
    __device__ __forceinline__ typename R::Code *row_codes() const {  // (PAIRS, ROWS)
        return area<typename R::Code>(shared, R::ROW_CODES);
    }
    __device__ __forceinline__ unsigned short *codes() const { return area<unsigned short>(shared, R::CODES); }

    __device__ __forceinline__ float4 residue(int pair) const {
        return __ldg(reinterpret_cast<const float4 *>(at_head(block.side->residues, PAIRS * 4)) + pair);
    }

    __device__ void encode() const {
        load_constants();
        const int warp = threadIdx.x / 32;
        for (int tile = warp; tile < L::N / 16; tile += WARPS) measure(tile);
        __syncthreads();
#pragma unroll 1
        for (int first = 0; first < L::N / 16; first += TOKENS / 16) {
            for (int at = warp; at < TOKENS / 16 * GROUPS; at += WARPS)  // the longest sums first
                add_up(first, at % (TOKENS / 16), GROUPS - 1 - at / (TOKENS / 16));
            __syncthreads();
            if (warp < TOKENS / 16) weigh(first, warp);
            __syncthreads();
            round(first);
            __syncthreads();
            choose(first * 16);
            __syncthreads();
        }
        Codec::pack(block.record(), codes(), norms(), block.side->tables, threadIdx.x, THREADS);
    }

    // The mean of the block, points, and F.
    __device__ __forceinline__ void load_constants() const {
        const float *table = reinterpret_cast<const float *>(block.side->tables + Codec::POINTS_F32);
        for (int i = threadIdx.x; i < Codec::POINTS * 2; i += THREADS) points()[i] = table[i];
        constexpr float all[] = {NORM_FACTORS};
#pragma unroll
        for (int i = 0; i < FACTORS; ++i)
            if (threadIdx.x == 0) factors()[i] = all[i];
        const float *feedback = at_head(block.side->feedback, D * D);
        const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        for (int at = warp; at < GROUPS * GROUPS; at += WARPS) {
            const int from = at / GROUPS, to = at % GROUPS;
            if (to < from) continue;
            const float *f = feedback + (8 * from + 2 * t) * D + 8 * to + g;
            uint2 parts;
            split_halves(parts.x, parts.y, f[0], f[D], 1.0f);
            *tiles(from, to) = parts;
        }
        if constexpr (L::MEAN_BITS != 0) {
            float *x = area<float>(shared, 0);
            for (int first = 0; first < L::N; first += TOKENS) {
                load_tokens<L, D, 1>(x, block.full(), first, TOKENS);
                __syncthreads();
                add_tokens<D, D, 1>(mean(), x, TOKENS, first == 0);
                __syncthreads();
            }
            store_mean<L>(block.record(), mean());
        }
        __syncthreads();
    }

    // Pair t of a group of tokens g and g + 8 of a tile, less the mean, clipped.
    __device__ __forceinline__ void load(float (&x)[4], int tile, int group) const {
        const int chunk = (tile / L::PT * L::TILES + group / 2 * L::PT + tile % L::PT) * 32 + threadIdx.x % 32;
        const unsigned *words = reinterpret_cast<const unsigned *>(block.full()) + 4 * chunk + group % 2;
        float centre[2] = {};
        if constexpr (L::MEAN_BITS != 0) load_cell(centre, mean() + 8 * group + threadIdx.x % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const __half2 pair = as_half2(__ldg(words + 2 * h));
            x[2 * h] = fminf(fmaxf(__low2float(pair) - centre[0], -LARGEST), LARGEST);
            x[2 * h + 1] = fminf(fmaxf(__high2float(pair) - centre[1], -LARGEST), LARGEST);
        }
    }

    // The same in units of the tokens' rms.
    __device__ __forceinline__ void load_units(float (&x)[4], int tile, int group) const {
        load(x, tile, group);
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] *= inverses()[16 * tile + threadIdx.x % 32 / 4 + i / 2 * 8];
    }

    __device__ __forceinline__ void measure(int tile) const {
        const float *query = at_head(block.side->mean_query, D) + threadIdx.x % 4 * 2;
        float squares[2] = {}, products[2] = {};
#pragma unroll 4
        for (int group = 0; group < GROUPS; ++group) {
            float x[4];
            load(x, tile, group);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                squares[i / 2] += x[i] * x[i];
                products[i / 2] += x[i] * query[8 * group + i % 2];
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float size = sqrtf(over_lanes(squares[h]) / D), inverse = size > 0.0f ? 1.0f / size : 0.0f;
            const float product = over_lanes(products[h]);
            const int token = 16 * tile + threadIdx.x % 32 / 4 + 8 * h;
            if (threadIdx.x % 4 == 0) sizes()[token] = size, inverses()[token] = inverse, along()[token] = product;
        }
    }

    // The sum over the four lanes of a row.
    static __device__ __forceinline__ float over_lanes(float x) {
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        return x + __shfl_xor_sync(0xffffffffu, x, 2);
    }

    // z of a group of channels.
    __device__ __forceinline__ void add_up(int first, int tile, int group) const {
        float sum[4];
        load_units(sum, first + tile, group);
#pragma unroll 2
        for (int before = 0; before <= group; ++before) {
            float x[4];
            unsigned a[4];
            load_units(x, first + tile, before);
            split_rows(a, x);
            add_product(sum, a, *tiles(before, group));
        }
        z()[(tile * GROUPS + group) * 32 + threadIdx.x % 32] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }

    __device__ __forceinline__ void weigh(int first, int tile) const {
        const int lane = threadIdx.x % 32;
        float cost[2] = {}, ridge = 0.0f;
#pragma unroll 4
        for (int group = 0; group < GROUPS; ++group) {
            const float4 v = z()[(tile * GROUPS + group) * 32 + lane], d = residue(4 * group + lane % 4);
            cost[0] += v.x * (d.x * v.x + 2.0f * d.y * v.y) + d.z * v.y * v.y;
            cost[1] += v.z * (d.x * v.z + 2.0f * d.y * v.w) + d.z * v.w * v.w;
            ridge = d.w;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int token = 16 * (first + tile) + lane / 4 + 8 * h;
            const float all = over_lanes(cost[h]) - (sizes()[token] > 0.0f ? ridge * D : 0.0f);
            if (lane % 4 == 0) weight()[token] = all;
        }
    }

    // Rounds the rows of this warp. first: the first tile of tokens.
    __device__ __forceinline__ void round(int first) const {
        const int lane = threadIdx.x % 32, t = lane % 4, row = threadIdx.x / 32 * 32 + t * 8 + lane / 4;  // row t of four
        const int token = first * 16 + row % TOKENS;
        const float factor = sizes()[token] > 0.0f ? factors()[min(row / TOKENS, FACTORS - 1)] : 0.0f;
        const float inverse = factor > 0.0f ? 1.0f / factor : 0.0f;
        const Nearest<Codec> nearest{points(), block.side->candidates};

        float sums[4][SUMS] = {};
#pragma unroll 1
        for (int start = 0; start < GROUPS; start += HELD) {
            float targets[HELD][2][4];
#pragma unroll
            for (int held = 0; held < HELD; ++held)
                if (start + held < GROUPS) load_rows(targets[held], first, start + held);
            __syncwarp();  // codes of earlier groups are there
#pragma unroll 1
            for (int before = 0; before < start; ++before) {
                float errors[2][4];
                read_errors(errors, first, before, factor);
                const Errors operand(errors);
#pragma unroll
                for (int held = 0; held < HELD; ++held)
                    if (start + held < GROUPS) operand.feed(targets[held], *tiles(before, start + held));
            }
#pragma unroll 1
            for (int group = start; group < min(start + HELD, GROUPS); ++group) {
                float x[2][4], errors[2][4] = {};
                load_rows(x, first, group);
                round_group(errors, targets[0], x, group, nearest, row, factor, inverse);
                add_costs(sums, errors, targets[0], x, group);
                const Errors operand(errors);
                // Targets move up by a group, so that the loop finds its own at 0.
#pragma unroll
                for (int ahead = 1; ahead < HELD; ++ahead) {
                    if (group + ahead >= min(start + HELD, GROUPS)) break;
#pragma unroll
                    for (int i = 0; i < 8; ++i) targets[ahead - 1][i / 4][i % 4] = targets[ahead][i / 4][i % 4];
                    operand.feed(targets[ahead - 1], *tiles(group, group + ahead));
                }
            }
        }
        fit(sums, row, token, factor);
    }

    // A group of channels of the warp's rows.
    __device__ __forceinline__ void load_rows(float (&x)[2][4], int first, int group) const {
#pragma unroll
        for (int m = 0; m < 2; ++m) load_units(x[m], first + tile_of(m), group);
    }

    // The errors of a group of channels that the warp has rounded.
    __device__ __forceinline__ void read_errors(float (&errors)[2][4], int first, int group, float factor) const {
        const int lane = threadIdx.x % 32, t = lane % 4;
        load_rows(errors, first, group);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float of_row = __shfl_sync(0xffffffffu, factor, lane - t + r);
            const int row = threadIdx.x / 32 * 32 + 8 * r + lane / 4;
            const float *point = points() + 2 * row_codes()[(4 * group + t) * ROWS + row];
#pragma unroll
            for (int w = 0; w < 2; ++w) errors[r / 2][r % 2 * 2 + w] -= point[w] * of_row;
        }
    }

    // The warp's tile m of tokens, in those of a pass.
    static __device__ __forceinline__ int tile_of(int m) { return (threadIdx.x / 32 * 2 + m) % (TOKENS / 16); }

    // Rounds the four pairs of a group one after the other.
    __device__ __forceinline__ void round_group(float (&errors)[2][4], float (&target)[2][4], const float (&x)[2][4],
                                                int group, const Nearest<Codec> &nearest, int row, float factor,
                                                float inverse) const {
        const int t = threadIdx.x % 4, four = threadIdx.x % 32 - t;
        const uint2 inside = *tiles(group, group);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            float unit[2] = {}, rounded[2];
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    const float aim = __shfl_sync(0xffffffffu, target[r / 2][r % 2 * 2 + w], four + step);
                    if (t == r) unit[w] = aim * inverse;
                }
            const unsigned code = nearest(unit);
            row_codes()[(4 * group + step) * ROWS + row] = static_cast<typename R::Code>(code);
            load_cell(rounded, points() + 2 * code);
            float fresh[2][4];
#pragma unroll
            for (int r = 0; r < 4; ++r)
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    const float value = __shfl_sync(0xffffffffu, rounded[w] * factor, four + r);
                    float &error = fresh[r / 2][r % 2 * 2 + w];
                    error = t == step ? x[r / 2][r % 2 * 2 + w] - value : 0.0f;
                    errors[r / 2][r % 2 * 2 + w] += error;
                }
            if (step < 3) Errors(fresh).feed(target, inside);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) target[m][i] -= x[m][i] - errors[m][i];  // the residues
    }

    // Adds up, of each row: costs of its error, of its error and the token, both without a metric, and of its error for
    // the mean query.
    __device__ __forceinline__ void add_costs(float (&sums)[4][SUMS], const float (&errors)[2][4],
                                              const float (&residues)[2][4], const float (&x)[2][4],
                                              int group) const {
        const int lane = threadIdx.x % 32, pair = 4 * group + lane % 4;
        const float4 d = residue(pair);
        float query[2];
        load_cell(query, at_head(block.side->mean_query, D) + 2 * pair);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            const float4 v = z()[(tile_of(m) * GROUPS + group) * 32 + lane];
            const float of_token[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float *a = x[m] + 2 * h, *e = errors[m] + 2 * h, *r = residues[m] + 2 * h;
                const float r0 = d.x * r[0] + d.y * r[1], r1 = d.y * r[0] + d.z * r[1];
                float(&sum)[SUMS] = sums[2 * m + h];
                sum[0] += r0 * r[0] + r1 * r[1], sum[1] += r0 * of_token[2 * h] + r1 * of_token[2 * h + 1];
                sum[2] += e[0] * e[0] + e[1] * e[1], sum[3] += e[0] * a[0] + e[1] * a[1];
                sum[4] += e[0] * query[0] + e[1] * query[1];
            }
        }
    }

    // The norm of each row, and what it costs.
    __device__ __forceinline__ void fit(const float (&sums)[4][SUMS], int row, int token, float factor) const {
        float own[SUMS];
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float sum = over_lanes(sums[r][i]);
                if (r == 0 || threadIdx.x % 4 == r) own[i] = sum;
            }
        const float size = sizes()[token], square = size * size, ridge = residue(0).w, all = size > 0.0f ? D : 0.0f;
        const float ee = own[0] - ridge * own[2], ae = own[1] - ridge * own[3];
        const float plain = quotient(all - own[3], all - 2.0f * own[3] + own[2]);
        const Fitted best = tilted(weight()[token] * square, ae * square, ee * square, along()[token],
                                   own[4] * size, plain, sqrtf(float(D)), factor * size);
        fitted()[row] = make_float2(best.norm, best.cost);
    }

    // Keeps the codes and the norm of least cost of each token of a pass; of equal costs the first one counts.
    __device__ __forceinline__ void choose(int first) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
            const int t = i % TOKENS, pair = i / TOKENS;
            float2 best = fitted()[t];
            int row = t;
#pragma unroll
            for (int number = 1; number < FACTORS; ++number) {
                const float2 other = fitted()[number * TOKENS + t];
                if (other.y < best.y) best = other, row = number * TOKENS + t;
            }
            codes()[(first + t) * PAIRS + pair] = row_codes()[pair * ROWS + row];
            if (pair == 0) norms()[first + t] = best.x;
        }
    }
};

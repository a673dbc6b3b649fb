// Chooses codes and norms of a block of keys. Part of encode_keys.cu.
//
// A row is a token rounded with one of the norms, or not at all: number 0. A warp has 32 rows, two tiles of 16 tokens,
// as mma.m16n8k16 has its sums: lane 4g + t has, of each group of 8 channels, pair t of rows g and g + 8 of both tiles.
// The pairs of a group come one after the other. In a step a lane rounds one pair, of row t of its four, and the four
// lanes with the same g exchange what they have rounded. Products feed errors back: after each step to the same group,
// after a group to all later ones. Numbers are in units of a token's rms.
//
// What errors cost follows from the residues r = e + F·e, which are what is left of targets when they are rounded: M +
// ridge · I is (I + F)ᵀ · diagonal · (I + F), so a·Me is a sum over pairs of the residues of a and of e, in the blocks
// of the diagonal, less the ridge. The token itself is the error of number 0.

constexpr float ALL_FACTORS[] = {NORM_FACTORS};
constexpr int NUMBERS = 1 + sizeof ALL_FACTORS / sizeof *ALL_FACTORS;

template <bool BYTES>
struct RowCode {
    using Type = unsigned short;
};
template <>
struct RowCode<true> {
    using Type = unsigned char;
};

// Shared memory.
template <class L, class Codec>
struct KeyArrays {
    static constexpr int GROUPS = L::D / 8, PAIRS = L::D / 2, ROWS = WARPS * 32, STRIDE = TOKENS + 4;

    float4 residues[2][TOKENS / 16][32];  // of the tokens, of this group and the one before
    float4 tokens[TOKENS];                // a·Ma and a·a, over rms², and a·mean_query
    union {
        float x[L::D * STRIDE];
        struct {
            // Tiles of F on and above the diagonal, row after row, in high and low parts: from channels 2t, 2t + 1 of a
            // group to channel g of another one.
            uint2 feedback[GROUPS * (GROUPS + 1) / 2][32];
            typename RowCode<Codec::POINTS <= 256>::Type codes[PAIRS][ROWS];
        } rows;
    };
    float2 points[Codec::POINTS], fitted[ROWS];  // fitted: norm, cost
    float mean[L::D], sizes[L::N], inverses[L::N], norms[L::N], factors[(NUMBERS + 3) / 4 * 4];
    unsigned short codes[L::N * PAIRS];
};

// Numbers of 32 rows in a group of channels as operands A, whose columns are 8 high and 8 low parts.
struct Split {
    unsigned a[2][4];

    __device__ __forceinline__ explicit Split(const float (&x)[2][4]) {
#pragma unroll
        for (int r = 0; r < 4; ++r)
            split_halves(a[r / 2][r % 2], a[r / 2][r % 2 + 2], x[r / 2][r % 2 * 2], x[r / 2][r % 2 * 2 + 1], 1.0f);
    }
    // targets += these numbers · a tile of F.
    __device__ __forceinline__ void feed(float (&targets)[2][4], const uint2 &tile) const {
        const unsigned high[2] = {tile.x, tile.x}, low[2] = {tile.y, tile.y};
#pragma unroll
        for (int m = 0; m < 2; ++m) mma_m16n8k16_f16(targets[m], a[m], high), mma_m16n8k16_f16(targets[m], a[m], low);
    }
};

template <class L, class Codec, class Block>
struct KeyRounder {
    using Arrays = KeyArrays<L, Codec>;
    static constexpr int D = L::D, GROUPS = Arrays::GROUPS, PAIRS = Arrays::PAIRS, SUMS = 5;
    static constexpr int HELD = GROUPS > 8 ? (GROUPS + 1) / 2 : GROUPS;  // groups of targets in registers
    static_assert(Codec::WIDTH == 2 && Arrays::ROWS >= NUMBERS * TOKENS, "");

    Arrays &arrays;
    const Block block;
    const int lane, t, four;           // four: the first of the lanes with the same g
    const int row;                     // of the four rows of the lane, the one that it rounds
    int first;                         // token of a pass
    float factor, inverse, sums[4][SUMS];

    __device__ __forceinline__ KeyRounder(unsigned char *shared, const Block &block)
        : arrays(*reinterpret_cast<Arrays *>(shared)), block(block), lane(threadIdx.x % 32), t(lane % 4),
          four(lane - t), row(threadIdx.x / 32 * 32 + t * 8 + lane / 4) {}

    __device__ __forceinline__ void encode() {
        prepare();
#pragma unroll 1
        for (first = 0; first < L::N; first += TOKENS) {
            const bool is_zero = arrays.sizes[first + row % TOKENS] == 0.0f;
            factor = is_zero ? 0.0f : arrays.factors[min(row / TOKENS, NUMBERS - 1)];
            inverse = factor > 0.0f ? 1.0f / factor : 0.0f;
            round();
            fit();
            __syncthreads();
            choose();
            __syncthreads();
        }
        Codec::pack(block.record(), arrays.codes, arrays.norms, block.side->tables, threadIdx.x, THREADS);
    }

    // The mean of the block, the rms of its tokens, points, and F.
    __device__ __forceinline__ void prepare() {
        if constexpr (L::MEAN_BITS != 0) mean_of_block<L, Arrays::STRIDE>(arrays.mean, arrays.x, block, TOKENS);
        for (int token = 0; token < L::N; token += TOKENS) {
            load_tokens<L, 1, Arrays::STRIDE>(arrays.x, block.full(), token, TOKENS);
            __syncthreads();
            measure<L, Arrays::STRIDE>(arrays.sizes + token, arrays.x, arrays.mean, TOKENS, 1.0f, true);
            __syncthreads();
        }
        const float2 *table = reinterpret_cast<const float2 *>(block.side->tables + Codec::POINTS_F32);
        for (int i = threadIdx.x; i < Codec::POINTS; i += THREADS) arrays.points[i] = table[i];
        for (int i = threadIdx.x; i < L::N; i += THREADS)
            arrays.inverses[i] = arrays.sizes[i] > 0.0f ? 1.0f / arrays.sizes[i] : 0.0f;
        constexpr float factors[] = {0.0f, NORM_FACTORS};
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i)
            if (threadIdx.x == 0) arrays.factors[i] = factors[i];
        for (int at = threadIdx.x / 32; at < GROUPS * GROUPS; at += WARPS) {
            const int from = at / GROUPS, to = at % GROUPS;
            if (to < from) continue;
            const float *f = at_head(block.side->feedback, D * D) + (8 * from + 2 * t) * D + 8 * to + lane / 4;
            split_halves(tile(from, to).x, tile(from, to).y, f[0], f[D], 1.0f);
        }
        __syncthreads();
    }

    __device__ __forceinline__ uint2 &tile(int from, int to) const {
        return arrays.rows.feedback[from * GROUPS - from * (from - 1) / 2 + to - from][lane];
    }

    // The number of the rows of the warp's tile m, and its place among the tiles of a pass.
    static __device__ __forceinline__ int number_of(int m) { return (threadIdx.x / 32 * 2 + m) / (TOKENS / 16); }
    static __device__ __forceinline__ int place_of(int m) { return (threadIdx.x / 32 * 2 + m) % (TOKENS / 16); }

    // The lane's pairs of a group of channels, less the mean, clipped, over the rms.
    __device__ __forceinline__ void load(float (&x)[2][4], int group) const {
        float mean[2] = {};
        if constexpr (L::MEAN_BITS != 0) load_cell(mean, arrays.mean + 8 * group + 2 * t);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int i = first / 16 + place_of(r / 2), chunk = i / L::PT * L::TILES + group / 2 * L::PT + i % L::PT;
            const float over_rms = arrays.inverses[16 * i + lane / 4 + r % 2 * 8];
            const unsigned *words = reinterpret_cast<const unsigned *>(block.full()) + (chunk * 32 + lane) * 4;
            const __half2 pair = as_half2(__ldg(words + group % 2 + r % 2 * 2));
            x[r / 2][r % 2 * 2] = fminf(fmaxf(__low2float(pair) - mean[0], -LARGEST), LARGEST) * over_rms;
            x[r / 2][r % 2 * 2 + 1] = fminf(fmaxf(__high2float(pair) - mean[1], -LARGEST), LARGEST) * over_rms;
        }
    }

    // Rounds the rows of this warp. Registers hold the targets of some groups at a time: first they get the feedback
    // of all groups before.
    __device__ __forceinline__ void round() {
#pragma unroll
        for (int i = 0; i < 4 * SUMS; ++i) sums[i / SUMS][i % SUMS] = 0.0f;
#pragma unroll 1
        for (int start = 0; start < GROUPS; start += HELD) {
            const int count = min(HELD, GROUPS - start);
            float targets[HELD][2][4];
#pragma unroll
            for (int held = 0; held < HELD; ++held)
                if (held < count) load(targets[held], start + held);
#pragma unroll 1
            for (int before = 0; before < start; ++before) {
                const Split errors = errors_of(before);
#pragma unroll
                for (int held = 0; held < HELD; ++held)
                    if (held < count) errors.feed(targets[held], tile(before, start + held));
            }
#pragma unroll 1
            for (int done = 0; done < count; ++done) {
                const Split errors = round_group(targets[0], start + done);
                // Targets move up by a group, so that the loop finds its own at 0.
#pragma unroll
                for (int held = 1; held < HELD; ++held) {
                    if (held >= count - done) break;
#pragma unroll
                    for (int i = 0; i < 8; ++i) targets[held - 1][i / 4][i % 4] = targets[held][i / 4][i % 4];
                    errors.feed(targets[held - 1], tile(start + done, start + done + held));
                }
            }
        }
    }

    // The errors of a group that is rounded.
    __device__ __forceinline__ Split errors_of(int group) const {
        float errors[2][4];
        load(errors, group);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float2 point = arrays.points[arrays.rows.codes[4 * group + t][row + 8 * (r - t)]];
            const float norm = __shfl_sync(0xffffffffu, factor, four + r);
            errors[r / 2][r % 2 * 2] -= point.x * norm, errors[r / 2][r % 2 * 2 + 1] -= point.y * norm;
        }
        return Split(errors);
    }

    // Rounds the four pairs of a group, and adds up what their errors cost.
    __device__ __forceinline__ Split round_group(float (&target)[2][4], int group) {
        const Nearest<Codec> nearest{&arrays.points->x, block.side->candidates};
        float x[2][4], errors[2][4] = {};
        load(x, group);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            float unit[2] = {}, fresh[2][4];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float aim = __shfl_sync(0xffffffffu, target[i / 4][i % 4], four + step);
                if (t == i / 2) unit[i % 2] = aim * inverse;
            }
            const unsigned code = nearest(unit);
            arrays.rows.codes[4 * group + step][row] = code;
            const float2 point = arrays.points[code];
            const float rounded[2] = {point.x * factor, point.y * factor};
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float value = __shfl_sync(0xffffffffu, rounded[i % 2], four + i / 2);
                fresh[i / 4][i % 4] = t == step ? x[i / 4][i % 4] - value : 0.0f;
                errors[i / 4][i % 4] += fresh[i / 4][i % 4];
            }
            if (step < 3) Split(fresh).feed(target, tile(group, group));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) target[i / 4][i % 4] -= x[i / 4][i % 4] - errors[i / 4][i % 4];  // the residues
        add_costs(errors, target, x, group);
        return Split(errors);
    }

    // Adds up for each row: e·Me and a·Me, with the ridge; e·e, a·e, e·mean_query.
    __device__ __forceinline__ void add_costs(const float (&errors)[2][4], const float (&residues)[2][4],
                                              const float (&x)[2][4], int group) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
            if (number_of(m) == 0)
                arrays.residues[group % 2][place_of(m)][lane] =
                    make_float4(residues[m][0], residues[m][1], residues[m][2], residues[m][3]);
        __syncthreads();
        const int pair = 4 * group + t;
        const float4 cost = reinterpret_cast<const float4 *>(at_head(block.side->residues, PAIRS * 4))[pair];
        float query[2];
        load_cell(query, at_head(block.side->mean_query, D) + 2 * pair);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float *a = x[r / 2] + r % 2 * 2, *e = errors[r / 2] + r % 2 * 2, *left = residues[r / 2] + r % 2 * 2;
            const float4 both = arrays.residues[group % 2][place_of(r / 2)][lane];
            const float weighted[2] = {cost.x * left[0] + cost.y * left[1], cost.y * left[0] + cost.z * left[1]};
            sums[r][0] += weighted[0] * left[0] + weighted[1] * left[1];
            sums[r][1] += weighted[0] * (r % 2 ? both.z : both.x) + weighted[1] * (r % 2 ? both.w : both.y);
            sums[r][2] += e[0] * e[0] + e[1] * e[1], sums[r][3] += e[0] * a[0] + e[1] * a[1];
            sums[r][4] += e[0] * query[0] + e[1] * query[1];
        }
    }

    // The norm of each row, and what it costs.
    __device__ __forceinline__ void fit() {
        float own[SUMS];
#pragma unroll
        for (int i = 0; i < 4 * SUMS; ++i) {
            float sum = sums[i / SUMS][i % SUMS];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (i < SUMS || t == i / SUMS) own[i % SUMS] = sum;
        }
        const float size = arrays.sizes[first + row % TOKENS], square = size * size;
        const float ridge = reinterpret_cast<const float4 *>(at_head(block.side->residues, PAIRS * 4))->w;
        const float ee = own[0] - ridge * own[2], ae = own[1] - ridge * own[3];
        if (row < TOKENS) arrays.tokens[row] = make_float4(ee, own[2], own[4] * size, 0.0f);
        __syncthreads();
        const float4 a = arrays.tokens[row % TOKENS];
        const float plain = quotient(a.y - own[3], a.y - 2.0f * own[3] + own[2]);
        const Fitted best = tilted(a.x * square, ae * square, ee * square, a.z, own[4] * size, plain, sqrtf(float(D)),
                                   factor * size);
        arrays.fitted[row] = make_float2(best.norm, best.cost);
    }

    // Keeps the codes and the norm of least cost of each token of a pass; of equal costs the first one counts.
    __device__ __forceinline__ void choose() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < TOKENS * PAIRS; i += THREADS) {
            int best = TOKENS + i % TOKENS;
#pragma unroll
            for (int other = best + TOKENS; other < NUMBERS * TOKENS; other += TOKENS)
                if (arrays.fitted[other].y < arrays.fitted[best].y) best = other;
            arrays.codes[(first + i % TOKENS) * PAIRS + i / TOKENS] = arrays.rows.codes[i / TOKENS][best];
            if (i < TOKENS) arrays.norms[first + i] = arrays.fitted[best].x;
        }
    }
};

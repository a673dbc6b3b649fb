// Part of the op `encode_blocks`: keys or values with a metric, with one norm or the best of several, on tensor cores.
// Codes are chosen as in engine/quantization/encode.py; encode_blocks.cu takes what has no metric.
//
// sides, jobs: as encode_blocks.cu lists them, of one side alone. Arrays of a metric, from engine.quantization.metric:
//   mean_query (K, D)                            by which norms are tilted; null if TILTED is 0
//   feedback __half (K, D / 8, D / 8, 32, 2, 2)  F in tiles of 8 × 8: those from group i of channels to group j. Lane
//                                                4g + t has the weights from channels 2t, 2t + 1 to channel g, high
//                                                parts, then low ones
//   residues (K, D / 2, 4)                       of two channels: what the residue of the first one costs, both
//                                                together, the second one; the ridge, which these costs contain,
//                                                negative (or −0) if errors are not fed back
//
// A row is a token rounded with one of the norms, or not at all: number 0. A warp has 32 rows, two tiles of 16 tokens,
// as mma.m16n8k16 has its sums: lane 4g + t has, of each group of 8 channels, pair t of rows g and g + 8 of both tiles.
// The pairs of a group come one after the other. In a step a lane rounds one pair, of row t of its four, and the four
// lanes with the same g exchange what they have rounded. Products feed errors back: after each step to the same group,
// after a group to all later ones. Numbers are in units of a token's rms.
//
// The cost of errors follows from the residues r = e + F·e, the differences of targets and rounded values: M +
// ridge · I is (I + F)ᵀ · diagonal · (I + F), so a·Me is a sum over pairs of the residues of a and of e, in the blocks
// of the diagonal, less the ridge. The token itself is the error of number 0. Without a tilt there is no ridge, and the
// norm of least cost is a·My / y·My, y = a − e.
//
// Grid (count, K), block WARPS · 32, dynamic shared memory SHARED, sizeof(RowArrays).
// DEFINES: LARGEST as encode_blocks.cu; SIDE, KeyLayout or ValueLayout, CODEC and FULL, the codec and the layout of its
// full-precision records; TILTED, whether norms are; TILT_LOW, TILT_HIGH, least and largest ratio of a tilted norm to
// the norm of least squares; NORM_FACTORS, a list of floats, the norms to round with, over the rms: if TILTED all are
// tried, else the first one; TOKENS, 16, 32 or 64, a divisor of N; WARPS · 32 >= TOKENS · (1 + the number of norms);
// SHARED.
// PRECOND: D a multiple of 8; as encode_blocks.cu.
// JOINS: full_block.cuh, nearest.cuh, fitting.cuh.

constexpr float ALL_FACTORS[] = {NORM_FACTORS};
constexpr int NUMBERS = 1 + (TILTED ? sizeof ALL_FACTORS / sizeof *ALL_FACTORS : 1);

// Shared memory.
template <class L, class Codec>
struct RowArrays {
    static constexpr int CODES = L::D / Codec::WIDTH, ROWS = WARPS * 32, STRIDE = TOKENS + 4;

    float4 residues[2][TOKENS / 16][32];  // a token's, in this group of channels and the one before
    float4 tokens[TOKENS];                // a·Ma and a·a, over rms², and a·mean_query
    union {
        float x[L::D * STRIDE];
        typename CodeOf<Codec::POINTS <= 256>::Type row_codes[CODES][ROWS];
    };
    float points[Codec::POINTS * Codec::WIDTH];
    float2 fitted[ROWS];  // norm, cost
    float mean[L::D], sizes[L::N], inverses[L::N], norms[L::N], factors[(NUMBERS + 3) / 4 * 4];
    unsigned short codes[L::N * CODES];
};
static_assert(SHARED == sizeof(RowArrays<SIDE, CODEC>), "as named above");

// The KV head's part of an array.
__device__ __forceinline__ const float *at_head(const float *all, int size) { return all + blockIdx.y * size; }

template <int W>
__device__ __forceinline__ void load_cell(float (&v)[W], const float *p) {
    if constexpr (W == 1) {
        v[0] = *p;
    } else {
        const float2 pair = *reinterpret_cast<const float2 *>(p);
        v[0] = pair.x, v[1] = pair.y;
    }
}

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
struct RowRounder {
    using Arrays = RowArrays<L, Codec>;
    static constexpr int D = L::D, W = Codec::WIDTH, GROUPS = D / 8, SUMS = TILTED ? 5 : 2;
    // Groups of targets in registers: at most 8, of single values, whose rounding needs more of them, at most 6.
    static constexpr int MOST = W == 2 ? 8 : 6, PARTS = (GROUPS + MOST - 1) / MOST, HELD = (GROUPS + PARTS - 1) / PARTS;
    static_assert(Arrays::ROWS >= NUMBERS * TOKENS, "");

    Arrays &arrays;
    const Block block;
    const int lane, t, four, row;  // four: the first of the lanes with the same g; row: the one that the lane rounds
    int first;                     // the first token of a pass
    float factor, inverse;         // the norm that the row is rounded with, over the token's rms
    float sums[4][SUMS];           // see add_costs

    __device__ __forceinline__ RowRounder(unsigned char *shared, const Block &block)
        : arrays(*reinterpret_cast<Arrays *>(shared)), block(block), lane(threadIdx.x % 32), t(lane % 4),
          four(lane - t), row(threadIdx.x / 32 * 32 + t * 8 + lane / 4) {}

    __device__ __forceinline__ void encode() {
        measure_block<L, Codec, TOKENS>(arrays, block);
        constexpr float factors[] = {0.0f, NORM_FACTORS};
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i)
            if (threadIdx.x == 0) arrays.factors[i] = factors[i];
        __syncthreads();
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

    __device__ __forceinline__ uint2 tile(int from, int to) const {
        const uint2 *tiles = reinterpret_cast<const uint2 *>(at_head(block.side->feedback, D * D));
        return __ldg(tiles + (from * GROUPS + to) * 32 + lane);
    }
    __device__ __forceinline__ float4 cost_at(int pair) const {
        return __ldg(reinterpret_cast<const float4 *>(at_head(block.side->residues, D * 2)) + pair);
    }

    // The number of the rows of the warp's tile m, its place among the tiles of a pass, and whether the warp has rows
    // of other numbers than 0.
    static __device__ __forceinline__ int number_of(int m) { return (threadIdx.x / 32 * 2 + m) / (TOKENS / 16); }
    static __device__ __forceinline__ int place_of(int m) { return (threadIdx.x / 32 * 2 + m) % (TOKENS / 16); }
    static __device__ __forceinline__ bool rounds() { return number_of(1) > 0; }

    // The lane's pairs of a group of channels, less the mean, clipped, over the rms.
    __device__ __forceinline__ void load(float (&x)[2][4], int group) const {
        float mean[2] = {};
        if constexpr (L::MEAN_BITS != 0) load_cell(mean, arrays.mean + 8 * group + 2 * t);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int i = first / 16 + place_of(r / 2), token = 16 * i + lane / 4 + r % 2 * 8;
            float pair[2];
            if constexpr (L::VALUES) {
#pragma unroll
                for (int c = 0; c < 2; ++c) pair[c] = full_value<L>(block.full(), token, 8 * group + 2 * t + c);
            } else {
                const int chunk = i / L::PT * L::TILES + group / 2 * L::PT + i % L::PT;
                const unsigned *words = reinterpret_cast<const unsigned *>(block.full()) + (chunk * 32 + lane) * 4;
                const __half2 both = as_half2(__ldg(words + group % 2 + r % 2 * 2));
                pair[0] = __low2float(both), pair[1] = __high2float(both);
            }
#pragma unroll
            for (int c = 0; c < 2; ++c)
                x[r / 2][r % 2 * 2 + c] =
                    fminf(fmaxf(pair[c] - mean[c], -LARGEST), LARGEST) * arrays.inverses[token];
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
            for (int earlier = 0; earlier < start; ++earlier) {
                const Split errors = errors_of(earlier);
#pragma unroll
                for (int held = 0; held < HELD; ++held)
                    if (held < count) errors.feed(targets[held], tile(earlier, start + held));
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
        for (int i = 0; i < 8; ++i) {
            if (!rounds()) break;
            const int channel = 8 * group + 2 * t + i % 2, code = arrays.row_codes[channel / W][row + 8 * (i / 2 - t)];
            const float norm = __shfl_sync(0xffffffffu, factor, four + i / 2);
            errors[i / 4][i % 4] -= arrays.points[code * W + channel % W] * norm;
        }
        return Split(errors);
    }

    // Rounds the pairs, or values, of a group, and adds up what their errors cost.
    __device__ __forceinline__ Split round_group(float (&target)[2][4], int group) {
        const Nearest<Codec> nearest{arrays.points, block.side->candidates};
        const bool is_fed_back = __float_as_uint(cost_at(0).w) >> 31 == 0;
        const uint2 inside = tile(group, group);
        float x[2][4], errors[2][4];
        load(x, group);
#pragma unroll
        for (int i = 0; i < 8; ++i) errors[i / 4][i % 4] = x[i / 4][i % 4];
        if (!rounds()) Split(errors).feed(target, inside);
#pragma unroll
        for (int step = 0; step < 8 / W; ++step) {
            if (!rounds()) break;
            float unit[W] = {}, rounded[W], fresh[2][4] = {};
#pragma unroll
            for (int i = step % (2 / W); i < 8; i += 2 / W) {
                const float aim = is_fed_back ? target[i / 4][i % 4] : x[i / 4][i % 4];
                const float step_aim = __shfl_sync(0xffffffffu, aim, four + step * W / 2);
                if (t == i / 2) unit[i % W] = step_aim * inverse;
            }
            const unsigned code = nearest(unit);
            arrays.row_codes[8 / W * group + step][row] = code;
            load_cell(rounded, arrays.points + code * W);
#pragma unroll
            for (int i = step % (2 / W); i < 8; i += 2 / W) {
                const float value = __shfl_sync(0xffffffffu, rounded[i % W] * factor, four + i / 2);
                if (t == step * W / 2) errors[i / 4][i % 4] = fresh[i / 4][i % 4] = x[i / 4][i % 4] - value;
            }
            if (step < 8 / W - 1) Split(fresh).feed(target, inside);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) target[i / 4][i % 4] -= x[i / 4][i % 4] - errors[i / 4][i % 4];  // the residues
        add_costs(errors, target, x, group);
        return Split(errors);
    }

    // Adds up for each row: where norms are tilted e·Me and a·Me, with the ridge; e·e, a·e, e·mean_query. Else y·My and
    // a·My, y the points.
    __device__ __forceinline__ void add_costs(const float (&errors)[2][4], const float (&residues)[2][4],
                                              const float (&x)[2][4], int group) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
            if (number_of(m) == 0)
                arrays.residues[group % 2][place_of(m)][lane] =
                    make_float4(residues[m][0], residues[m][1], residues[m][2], residues[m][3]);
        __syncthreads();
        const int pair = 4 * group + t;
        const float4 cost = cost_at(pair);
        float query[2] = {};
        if constexpr (TILTED) load_cell(query, at_head(block.side->mean_query, D) + 2 * pair);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const float *a = x[r / 2] + r % 2 * 2, *e = errors[r / 2] + r % 2 * 2;
            const float4 both = arrays.residues[group % 2][place_of(r / 2)][lane];
            const float of_token[2] = {r % 2 ? both.z : both.x, r % 2 ? both.w : both.y};
            float left[2] = {residues[r / 2][r % 2 * 2], residues[r / 2][r % 2 * 2 + 1]};
            if constexpr (!TILTED) left[0] = of_token[0] - left[0], left[1] = of_token[1] - left[1];
            const float weighted[2] = {cost.x * left[0] + cost.y * left[1], cost.y * left[0] + cost.z * left[1]};
            sums[r][0] += weighted[0] * left[0] + weighted[1] * left[1];
            sums[r][1] += weighted[0] * of_token[0] + weighted[1] * of_token[1];
            if constexpr (TILTED) {
                sums[r][2] += e[0] * e[0] + e[1] * e[1], sums[r][3] += e[0] * a[0] + e[1] * a[1];
                sums[r][4] += e[0] * query[0] + e[1] * query[1];
            }
        }
    }

    // The norm of each row, and what it costs.
    __device__ __forceinline__ void fit() {
        float row_sums[SUMS];
#pragma unroll
        for (int i = 0; i < 4 * SUMS; ++i) {
            float sum = sums[i / SUMS][i % SUMS];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1), sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (i < SUMS || t == i / SUMS) row_sums[i % SUMS] = sum;
        }
        const float size = arrays.sizes[first + row % TOKENS];
        if constexpr (TILTED) {
            const float square = size * size, ridge = fabsf(cost_at(0).w);
            const float ee = row_sums[0] - ridge * row_sums[2], ae = row_sums[1] - ridge * row_sums[3];
            if (row < TOKENS) arrays.tokens[row] = make_float4(ee, row_sums[2], row_sums[4] * size, 0.0f);
            __syncthreads();
            const float4 a = arrays.tokens[row % TOKENS];
            const float plain = quotient(a.y - row_sums[3], a.y - 2.0f * row_sums[3] + row_sums[2]);
            const Fitted best = tilted(a.x * square, ae * square, ee * square, a.z, row_sums[4] * size, plain,
                                       sqrtf(float(D)), factor * size);
            arrays.fitted[row] = make_float2(best.norm, best.cost);
        } else {
            arrays.fitted[row] = make_float2(fmaxf(quotient(row_sums[1], row_sums[0]) * factor * size, 0.0f), 0.0f);
        }
    }

    // Keeps the codes and the norm of least cost of each token of a pass; of equal costs the first one counts.
    __device__ __forceinline__ void choose() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < TOKENS * Arrays::CODES; i += THREADS) {
            int best = TOKENS + i % TOKENS;
#pragma unroll
            for (int other = best + TOKENS; other < NUMBERS * TOKENS; other += TOKENS)
                if (arrays.fitted[other].y < arrays.fitted[best].y) best = other;
            arrays.codes[(first + i % TOKENS) * Arrays::CODES + i / TOKENS] = arrays.row_codes[i / TOKENS][best];
            if (i < TOKENS) arrays.norms[first + i] = arrays.fitted[best].x;
        }
    }
};

// Where two CTAs have no room in the 99 KB of shared memory that many GPUs have, one may take all registers.
extern "C" __global__ void __launch_bounds__(WARPS * 32, SHARED > 49664 ? 1 : 12 / WARPS)
encode_rows_kernel(const unsigned long long *sides, const int *jobs, int kv_heads) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int *job = jobs + 3 * blockIdx.x;
    const SideArrays *side = reinterpret_cast<const SideArrays *>(sides) + job[0];
    RowRounder<SIDE, CODEC, Move<SIDE, FULL>>(shared, {side, job, kv_heads}).encode();
}

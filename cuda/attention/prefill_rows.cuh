// Part of prefill_attention.cu, which explains letters and DEFINES: how a CTA fetches parts of blocks into shared
// memory, where full-precision parts are copied and quantized parts decoded; then the rows of a warp: queries, scores,
// online softmax.

constexpr int MT = WARP_ROWS / 16;  // tiles of rows of a warp

constexpr int KEYS = Tables::BYTES;  // the tables begin at 0
constexpr int VALUES = KEYS + PART_BYTES;
constexpr int QUERIES = VALUES + PART_BYTES;
constexpr bool QUERIES_SHARED = MT > 1 && DP > 64;  // registers are needed for sums
static_assert(SHARED == QUERIES + (QUERIES_SHARED ? WARPS * WARP_ROWS * DP * 2 : 0),
              "tables, a part, and queries");

// Starts the asynchronous copy of a full-precision part.
__device__ __forceinline__ void copy_part(unsigned char *to, const unsigned char *from) {
    const int own = threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < PART_BYTES; i += WARPS * 512)
        if (i + WARPS * 512 <= PART_BYTES || i + own < PART_BYTES) cp_async<16>(to + own + i, from + own + i);
    cp_async_commit();
}

// Clears the values of tokens after `newest`, which have weight 0 but may be NaN; each thread clears what it copied.
__device__ __forceinline__ void clear_values(unsigned char *values, int start, int newest) {
    for (int i = threadIdx.x; i < PART_BYTES / 16; i += WARPS * 32) {
        unsigned *const a = reinterpret_cast<unsigned *>(values) + i * 4;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int token = start + i / 32 / STEPS * 16 + f16_order(r) / 2 * 8 + i % 4 * 2;
            if (token > newest) a[r] = 0;
            else if (token == newest) a[r] &= 0xffffu;
        }
    }
}

// Fetches one side of a part into shared memory: copies it, or calls decode(record) if it is quantized.
// IS_FULL: all records of this side are full-precision ones.
template <bool IS_FULL, class Layout, class Decode>
__device__ __forceinline__ void fetch(unsigned char *to, const Part &part, const SidePools &pools,
                                      const Decode &decode) {
    if constexpr (!IS_FULL) {
        if (part.region == Region::QUANTIZED) return decode(pools.record<Layout::NBYTES>(pools.quantized, part.block));
    }
    copy_part(to, part.full(pools));
}

// The rows of one warp: row i is token (first + i) / GROUP of the launch; rows after `last` repeat the last one.
struct Rows {
    int first, last;  // among all T · GROUP rows of the KV head
    int position;     // position of token 0
    int sees;         // position up to which all rows see

    __device__ bool any() const { return first <= last; }
    __device__ int row(int i) const { return min(first + i, last); }
    __device__ int at(int i) const { return position + row(i) / GROUP; }
    __device__ int oldest() const { return at(0); }
    __device__ int newest() const { return at(WARP_ROWS - 1); }
    // Whether any of the rows sees any of the PART tokens from `start` on.
    __device__ bool see_any(int start, int window) const {
        return any() && start <= max(newest(), sees) && (window == 0 || start + PART - 1 > oldest() - window);
    }
};

// The rows' queries as A operands, in registers or in shared memory, where each lane reads what it has written.
struct Queries {
    unsigned registers[QUERIES_SHARED ? 1 : MT][QUERIES_SHARED ? 1 : STEPS][4];
    uint4 *shared;

    // q: the KV head's first query of token 0. factor: scale · log₂e, so that weights are 2^score.
    __device__ __forceinline__ Queries(const float *q, long long q_stride, const Rows &rows, float factor,
                                       unsigned char *shared_bytes, int lane)
        : shared(reinterpret_cast<uint4 *>(shared_bytes) + lane) {
        const int g = lane / 4, tg = lane % 4;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const int low = rows.row(16 * m + g), high = rows.row(16 * m + g + 8);
            const float *const x[2] = {q + low / GROUP * q_stride + low % GROUP * D,
                                       q + high / GROUP * q_stride + high % GROUP * D};
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                unsigned a[4];
#pragma unroll
                for (int r = 0; r < 4; ++r) {
                    const int channel = 16 * s + r / 2 * 8 + 2 * tg;
                    float2 v = make_float2(0.0f, 0.0f);
                    if (channel < D) v = *reinterpret_cast<const float2 *>(x[r % 2] + channel);
                    a[r] = halves_within(v.x * factor, v.y * factor);
                }
                if constexpr (QUERIES_SHARED) {
                    shared[(m * STEPS + s) * 32] = make_uint4(a[0], a[1], a[2], a[3]);
                } else {
#pragma unroll
                    for (int r = 0; r < 4; ++r) registers[m][s][r] = a[r];
                }
            }
        }
    }

    __device__ __forceinline__ void tile(unsigned (&a)[4], int m, int s) const {
        if constexpr (QUERIES_SHARED) {
            const uint4 v = shared[(m * STEPS + s) * 32];
            a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
        } else {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[r] = registers[m][s][r];
        }
    }
};

// Multiplies MT row tiles by one tile of shared memory, two B operands: into d[m][at] and d[m][at + 1]. An operand is
// two neighbouring registers of one load, which need no copies.
template <int COUNT>
__device__ __forceinline__ void multiply(float (&d)[MT][COUNT][4], int at, const unsigned (&a)[MT][4],
                                         const uint4 &tile) {
    const unsigned low[2] = {tile.x, tile.y}, high[2] = {tile.z, tile.w};
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        mma_m16n8k16_f16(d[m][at], a[m], low);
        mma_m16n8k16_f16(d[m][at + 1], a[m], high);
    }
}

// Scores of a part: [m][2i + c] is of rows 16m + g and + 8, tokens 16i + 8c + 2tg and + 1.
using Scores = float[MT][2 * PT][4];

__device__ __forceinline__ void score(Scores &scores, const Queries &queries, const unsigned char *keys, int lane) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 2 * PT; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) scores[m][i][c] = 0.0f;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        unsigned a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) queries.tile(a[m], m, s);
#pragma unroll
        for (int i = 0; i < PT; ++i)
            multiply(scores, 2 * i, a, reinterpret_cast<const uint4 *>(keys)[(s * PT + i) * 32 + lane]);
    }
}

// Sets the scores of tokens that a row does not see to −inf; start: the part's first position.
__device__ __forceinline__ void mask_scores(Scores &scores, const Rows &rows, int start, int window, int lane) {
    const bool newer = start + PART - 1 > max(rows.oldest(), rows.sees);
    const bool older = window > 0 && start <= rows.newest() - window;
    if (!newer && !older) return;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = rows.at(16 * m + 8 * h + lane / 4) - start, newest = max(own, rows.sees - start);
            const int oldest = window > 0 ? own - window + 1 : -start;
#pragma unroll
            for (int i = 0; i < 2 * PT; ++i)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int token = 8 * i + lane % 4 * 2 + c;
                    if (token > newest || token < oldest) scores[m][i][2 * h + c] = NEGATIVE_INFINITY;
                }
        }
}

// The online softmax of a warp's rows.
struct RowState {
    float acc[MT][2 * STEPS][4];         // [m][2j + c]: rows 16m + g and + 8, channels 16j + 4tg + c and + 2
    float top[MT][2], sum[MT][2];      // for rows g and g + 8; totals are over this lane's tokens
    unsigned weights[MT][PT][4];         // for the part at hand, A operands

    __device__ __forceinline__ RowState() {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            top[m][0] = top[m][1] = LOWEST;
            sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < 2 * STEPS; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c) acc[m][j][c] = 0.0f;
        }
    }

    // Computes the weights of a part's tokens, and scales acc and sum to the new maximum.
    __device__ __forceinline__ void add_keys(const Queries &queries, const unsigned char *keys, const Rows &rows,
                                          int start, int window, int lane) {
        Scores scores;
        score(scores, queries, keys, lane);
#pragma unroll
        for (int m = 0; m < MT; ++m) cap_scores(scores[m]);
        mask_scores(scores, rows, start, window, lane);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            raise_maximum(scores[m], top[m], sum[m], acc[m]);
#pragma unroll
            for (int i = 0; i < 2 * PT; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    scores[m][i][c] = exp2_fast(scores[m][i][c] - top[m][c / 2]);
                    sum[m][c / 2] += scores[m][i][c];
                }
                weights[m][i / 2][i % 2 * 2] = as_bits(__floats2half2_rn(scores[m][i][0], scores[m][i][1]));
                weights[m][i / 2][i % 2 * 2 + 1] = as_bits(__floats2half2_rn(scores[m][i][2], scores[m][i][3]));
            }
        }
    }

    static __device__ __forceinline__ void raise_maximum(const float (&scores)[2 * PT][4], float (&top)[2],
                                                         float (&sum)[2], float (&acc)[2 * STEPS][4]) {
        float next[2] = {top[0], top[1]};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 0; i < 2 * PT; ++i) next[h] = fmaxf(next[h], fmaxf(scores[i][2 * h], scores[i][2 * h + 1]));
            next[h] = fmaxf(next[h], __shfl_xor_sync(ALL_LANES, next[h], 1));
            next[h] = fmaxf(next[h], __shfl_xor_sync(ALL_LANES, next[h], 2));
        }
        if (!__any_sync(ALL_LANES, next[0] > top[0] || next[1] > top[1])) return;  // rare after the first parts
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float rescale = exp2_fast(top[h] - next[h]);
            top[h] = next[h];
            sum[h] *= rescale;
#pragma unroll
            for (int j = 0; j < 2 * STEPS; ++j) acc[j][2 * h] *= rescale, acc[j][2 * h + 1] *= rescale;
        }
    }

    __device__ __forceinline__ void add_values(const unsigned char *values, int lane) {
#pragma unroll
        for (int u = 0; u < PT; ++u) {
            unsigned a[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int r = 0; r < 4; ++r) a[m][r] = weights[m][u][r];
#pragma unroll
            for (int j = 0; j < STEPS; ++j)
                multiply(acc, 2 * j, a, reinterpret_cast<const uint4 *>(values)[(u * STEPS + j) * 32 + lane]);
        }
    }

    // Writes the rows. out: the KV head's first vector of token 0. scale: a factor of all results. sink_scores: of the
    // KV head's query heads.
    __device__ __forceinline__ void write(float *out, int heads, const Rows &rows, float scale,
                                          const float *sink_scores, int lane) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float row_sum = sum[m][h];
                row_sum += __shfl_xor_sync(ALL_LANES, row_sum, 1);
                row_sum += __shfl_xor_sync(ALL_LANES, row_sum, 2);
                const int row = rows.first + 16 * m + 8 * h + lane / 4;
                float *const to = out + ((long long)(row / GROUP) * heads + row % GROUP) * D + lane % 4 * 4;
                float factor = scale / row_sum;
                if constexpr (SINK_SCORES)
                    factor = scale * share_with_sink(sink_scores[row % GROUP], top[m][h], row_sum);
#pragma unroll
                for (int j = 0; j < STEPS; ++j)
                    if (row <= rows.last && 16 * j + lane % 4 * 4 < D)
                        *reinterpret_cast<float4 *>(to + 16 * j) =
                            make_float4(acc[m][2 * j][2 * h] * factor, acc[m][2 * j + 1][2 * h] * factor,
                                        acc[m][2 * j][2 * h + 1] * factor, acc[m][2 * j + 1][2 * h + 1] * factor);
            }
    }
};

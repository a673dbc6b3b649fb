// The op `attention` where values are keys, which one KV head has: causal attention of the new rows of each sequence,
// of prompts or of a step, over its records, [sink | quantized blocks | full precision].
//
// out float (T, H, D): Σ softmax(scale · q·k) k for every row and head, k as stored, times the head's factor. factors
// (H), or null for ones. q float: H vectors of D at q + r · q_stride for row r, transformed as the keys are. keys
// (blocks, bytes): quantized records; full (slots, bytes): the sink's records, and a step's new ones; current (records,
// bytes): the new rows' records. spans: a Span for each sequence. tiles (tiles, 2): the index of a span, and the first
// of its rows · H rows of scores that a CTA has; null in a step, where CTAs b · chunks … b · chunks + chunks − 1 have
// those of span b. A row at position p sees tokens 0 … p, or up to its span's `sees`, if that is later.
// acc (T, H, splits, DP), ml (T, H, splits, 2): with more than one split, the sum of weighted keys over the parts of a
// split, the maximum of its scores and the sum of its weights, which latent_sums.cu adds up; there is no `out` then.
// Grid (tiles or B · chunks, 1, splits), block WARPS · 32. DEFINES: GROUP (H), WARPS (a divisor of DP / 16), SHARED
// (bytes of dynamic shared memory): tables, then scores of all warps, weights, factors and sums.
// PRECOND: the new rows are in their records; q aligned to 8 bytes, q_stride even. After the newest token a
// full-precision record may hold anything, also NaN.
//
// A CTA has up to 16 rows of scores, as columns: Sᵀ = K · qᵀ and Oᵀ = Kᵀ · Pᵀ. Its warps share the channels: each
// decodes its own channels of a part once and multiplies them by its channels of the queries. The sums over all warps
// are the scores; NT warps make weights of them. Then each warp transposes its tiles in registers and adds them,
// weighted, to its channels of the result.
// JOINS: attention.cuh, visible_parts.cuh, decode_parts.cuh, latent_tiles.cuh.


constexpr int NT = 2, COLUMNS = 8 * NT;             // tiles of columns of a CTA
constexpr int TURNS = (NT + WARPS - 1) / WARPS;     // tiles of columns that a warp makes weights for
constexpr int SCORES = Tables::BYTES, WEIGHTS = SCORES + WARPS * PT * NT * 512;
constexpr int RESCALE = WEIGHTS + NT * PT * 256, SUMS = RESCALE + COLUMNS * 4;
static_assert(SHARED == SUMS + COLUMNS * 8, "tables, scores, weights, factors, sums");

// The largest of, or the sum over, the eight lanes that have the same column.
template <class Join>
__device__ __forceinline__ float over_tokens(float x, const Join &join) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
latent_attention_kernel(float *out, float *acc, float *ml, const float *q, const unsigned char *keys,
                        const unsigned char *full, const unsigned char *current, const int *spans, const int *tiles,
                        const unsigned char *tables, const float *factors, int span_stride, int chunks,
                        long long q_stride, float scale
) {
    let_next_begin();
    wait_for_previous();
    DYNAMIC_SHARED(unsigned char, shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tg = lane % 4;
    const Span &span = span_at(spans, span_stride, tiles ? tiles[2 * blockIdx.x] : int(blockIdx.x) / chunks);
    const int first = tiles ? tiles[2 * blockIdx.x + 1] : int(blockIdx.x) % chunks * COLUMNS;
    if (first >= span.rows * GROUP) return;
    const int last = min(first + COLUMNS, span.rows * GROUP) - 1, newest = span.position + span.rows - 1;
    const VisibleParts parts(span, span.position, max(span.position + last / GROUP, span.sees), 0);
    const SidePools pools = {keys, full, current, 1};
    const int begin = parts.count() * blockIdx.z / gridDim.z, end = parts.count() * (blockIdx.z + 1) / gridDim.z;

    unsigned queries[OWN][NT][2];
#pragma unroll
    for (int j = 0; j < NT; ++j) {
        const int row = min(first + 8 * j + g, last);
        const float *const x = q + (span.first_row + row / GROUP) * q_stride + row % GROUP * D;
#pragma unroll
        for (int s = 0; s < OWN; ++s)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int channel = 16 * (warp * OWN + s) + 8 * h + 2 * tg;
                float2 v = make_float2(0.0f, 0.0f);
                if (channel < D) v = *reinterpret_cast<const float2 *>(x + channel);
                queries[s][j][h] = halves_within(v.x * (scale * LOG2_E), v.y * (scale * LOG2_E));
            }
    }

    float sums[OWN][NT][4] = {};  // the warp's channels 16s + g and + 8, columns 8j + 2tg and + 1
    float top[TURNS][2], total[TURNS][2] = {};  // of columns 8j + 2tg and + 1, where j is `warp` + turn · WARPS
    for (int turn = 0; turn < TURNS; ++turn) top[turn][0] = top[turn][1] = LOWEST;
    float *const rescale = reinterpret_cast<float *>(shared + RESCALE);
    float4 *const scores = reinterpret_cast<float4 *>(shared + SCORES);
    uint2 *const weights = reinterpret_cast<uint2 *>(shared + WEIGHTS);
    bool has_tables = false;
#pragma unroll 1
    for (int n = begin; n < end; ++n) {
        Part part = parts.at(n);
        if (part.region == Region::CURRENT) part.block = span.record(part.start / N);
        OwnTiles own;
        if (part.region == Region::QUANTIZED) {
            if (!has_tables) {
                LoadedRows<KeyCodec, WARPS * 32>(tables).store(Tables::keys(shared));
                has_tables = true;
                __syncthreads();
            }
            decode_own(own, pools.record<KeyLayout::NBYTES>(keys, part.block), part.number, Tables::keys(shared), warp,
                       lane);
        } else {
            load_own(own, part.full(pools), part.start, newest, warp, lane);
        }

        float partial[PT][NT][4] = {};
#pragma unroll
        for (int t = 0; t < OWN * PT; ++t)
#pragma unroll
            for (int j = 0; j < NT; ++j) mma_m16n8k16_f16(partial[t % PT][j], own[t], queries[t / PT][j]);
#pragma unroll
        for (int i = 0; i < PT; ++i)
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const float(&x)[4] = partial[i][j];
                scores[((warp * PT + i) * NT + j) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
            }
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int j = warp + turn * WARPS;
            if (j >= NT) break;
            float score[PT][4], next[2] = {top[turn][0], top[turn][1]};
#pragma unroll
            for (int i = 0; i < PT; ++i) {
                float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                for (int other = 0; other < WARPS; ++other) {
                    const float4 x = scores[((other * PT + i) * NT + j) * 32 + lane];
                    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
                }
                score[i][0] = sum.x, score[i][1] = sum.y, score[i][2] = sum.z, score[i][3] = sum.w;
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int row = min(first + 8 * j + 2 * tg + c % 2, last);
                    const int token = part.start + 16 * i + c / 2 * 8 + g, own = span.position + row / GROUP;
                    if (token > max(own, span.sees)) score[i][c] = NEGATIVE_INFINITY;
                    next[c % 2] = fmaxf(next[c % 2], score[i][c]);
                }
            }
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                next[c] = over_tokens(next[c], [](float a, float b) { return fmaxf(a, b); });
                const float factor = exp2_fast(top[turn][c] - next[c]);
                if (g == 0) rescale[8 * j + 2 * tg + c] = factor;
                total[turn][c] *= factor, top[turn][c] = next[c];
            }
#pragma unroll
            for (int i = 0; i < PT; ++i) {
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    score[i][c] = exp2_fast(score[i][c] - next[c % 2]);
                    total[turn][c % 2] += score[i][c];
                }
                const unsigned low = movmatrix_transposed(as_bits(__floats2half2_rn(score[i][0], score[i][1])));
                const unsigned high = movmatrix_transposed(as_bits(__floats2half2_rn(score[i][2], score[i][3])));
                weights[(j * PT + i) * 32 + lane] = make_uint2(low, high);
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c)
#pragma unroll
                for (int s = 0; s < OWN; ++s) sums[s][j][c] *= rescale[8 * j + 2 * tg + c % 2];
#pragma unroll
        for (int t = 0; t < OWN * PT; ++t) {
            unsigned transposed[4];  // channels become rows, so that registers 1 and 2 change places
#pragma unroll
            for (int r = 0; r < 4; ++r) transposed[f16_order(r)] = movmatrix_transposed(own[t][r]);
#pragma unroll
            for (int j = 0; j < NT; ++j) {
                const uint2 p = weights[(j * PT + t % PT) * 32 + lane];
                const unsigned operand[2] = {p.x, p.y};
                mma_m16n8k16_f16(sums[t / PT][j], transposed, operand);
            }
        }
    }

    float2 *const column_sums = reinterpret_cast<float2 *>(shared + SUMS);  // maximum, sum of weights
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int j = warp + turn * WARPS;
            const float sum = over_tokens(total[turn][c], [](float a, float b) { return a + b; });
            if (j < NT && g == 0) column_sums[8 * j + 2 * tg + c] = make_float2(top[turn][c], sum);
        }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int column = 8 * j + 2 * tg + c % 2, row = first + column;
            if (row > last) continue;
            const long long vector = (long long)span.first_row * GROUP + row, part = vector * gridDim.z + blockIdx.z;
            const float2 own = column_sums[column];
            const float factor = factors ? factors[row % GROUP] / own.y : 1.0f / own.y;
#pragma unroll
            for (int s = 0; s < OWN; ++s) {
                const int channel = 16 * (warp * OWN + s) + c / 2 * 8 + g;
                if (gridDim.z > 1) acc[part * DP + channel] = sums[s][j][c];
                else if (channel < D) out[vector * D + channel] = sums[s][j][c] * factor;
            }
            if (gridDim.z > 1 && warp == 0 && g == 0 && c < 2) reinterpret_cast<float2 *>(ml)[part] = own;
        }
}

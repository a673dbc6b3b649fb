// Part of the op `encode_blocks`: values with a metric, and keys with norms that are not tilted, on tensor cores. Codes
// are chosen as in engine/quantization/encode.py, with error feedback between pairs and, for values, between tokens.
// encode_keys.cu takes the other keys with a metric, encode_blocks.cu all without one.
//
// sides, jobs: as encode_blocks.cu lists them, of one side alone. It reads of the arrays of a metric: feedback, also
// where errors are not fed back, for what residues cost; token_feedback; and
//   residues (K, D / 2, 4)   as in encode_keys.cu, but without a ridge: the last number is 0, or −0 if errors are not
//                            fed back between pairs
//
// A tile is 16 tokens × 16 channels. A warp has 16 tokens and goes through their tiles; warp w is at tile j on front
// w + j, so the tiles above it and to its left are done. Products bring their errors to it: errors of channels times F,
// feedback, and errors of tokens times B, token_feedback. Within a tile cells (token, pair) are rounded in wavefronts,
// 16 + CELLS − 1 steps, and the errors of a step go to the lanes that need them by shuffles, in float32. A block of
// 64 × 128 has 11 fronts of 23 steps; tiles of 8 channels would have 19 of 19.
//
// Lane 4g + t has channels 4t … 4t + 3 of rows g and g + 8. Number [c % 2][2h + c / 2] of an array is channel 4t + c of
// row g + 8h: so mma.m16n8k16 has the sums of two products, one for even and one for odd channels, and operands A come
// from them without a shuffle. Operands are sums of two halves, and their products lack low · low. Operands B are
// made from float32 where they are needed: that is less than two steps, and no other thread has to be waited for.
//
// Points and the errors of tokens are in units of a token's rms, so they are at most √D + 4. Targets and errors against
// targets are in units of the larger of the rms and of what such errors of earlier tokens may add: halves are enough
// next to a token that is 10^12 times as long.
//
// The norm follows from residues r = e + F·e, e the error against the target, and s = y + F·y, y the points. M is
// (I + F)ᵀ · diagonal · (I + F), so for the target a = e + n·y the norm of least cost, a·My / y·My, is
// n + (r · diagonal · s) / (s · diagonal · s).
//
// Grid (count, K), block WARPS · 32, dynamic shared memory sizeof(TileArrays).
// DEFINES: as encode_blocks.cu; SIDE, KeyLayout or ValueLayout, CODEC and FULL, the codec and the layout of its
// full-precision records; WARPS, a divisor of N / 16: the tokens of a block are rounded WARPS · 16 at a time.
// PRECOND: D a multiple of 8; as encode_blocks.cu.
// JOINS: full_block.cuh, nearest.cuh.

// Shared memory.
template <class L, class Codec>
struct TileArrays {
    static constexpr int CODES = L::D / Codec::WIDTH, TILES = (L::D + 15) / 16, STRIDE = 20, PASS = WARPS * 16;

    union {
        uint4 errors[WARPS][TILES][2][32];  // operands A, high and low parts: errors against targets
        float x[L::D * STRIDE];
    };
    float inside[PASS][17];  // B within a tile, from units of rms to those of targets; then 0
    float points[Codec::POINTS * Codec::WIDTH];
    float mean[L::D], sizes[L::N], inverses[L::N], units[L::N], norms[L::N];  // rms, 1 / rms, unit of a target
    unsigned short codes[L::N * CODES];
};

// Operand A in two parts.
struct Rows {
    unsigned high[4], low[4];

    __device__ __forceinline__ Rows() {}
    __device__ __forceinline__ explicit Rows(const float (&x)[2][4]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            split_halves(high[i], low[i], x[0][i % 2 * 2 + i / 2], x[1][i % 2 * 2 + i / 2], 1.0f);
    }
};

// Operands B, for even and for odd channels, in two parts.
struct Columns {
    unsigned high[2][2], low[2][2];

    // x: rows 2t, 2t + 1, 2t + 8, 2t + 9 of B, each for an even and an odd channel.
    __device__ __forceinline__ explicit Columns(const float (&x)[4][2]) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            split_halves(high[i % 2][i / 2], low[i % 2][i / 2], x[i / 2 * 2][i % 2], x[i / 2 * 2 + 1][i % 2], 1.0f);
    }
    // sums += a · these.
    __device__ __forceinline__ void multiply(float (&sums)[2][4], const Rows &a) const {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            mma_m16n8k16_f16(sums[odd], a.high, high[odd]);
            mma_m16n8k16_f16(sums[odd], a.low, high[odd]);
            mma_m16n8k16_f16(sums[odd], a.high, low[odd]);
        }
    }
};

template <class L, class Codec, class Block>
struct TileRounder {
    using Arrays = TileArrays<L, Codec>;
    static constexpr int D = L::D, W = Codec::WIDTH, CELLS = 16 / W, OF_LANE = 4 / W;  // cells of a row, of its lanes
    static constexpr bool WHOLE = D % 16 == 0;

    Arrays &arrays;
    const Block block;
    const float *feedback, *along;
    const int lane, g, t, warp;
    bool is_fed_back;
    int first;                              // the first token of the warp
    float over_unit[2], share[2], back[2];  // for both rows: 1 / unit, rms / unit, unit / rms
    float sums[2][2];                       // for both rows: r · diagonal · s, s · diagonal · s

    __device__ __forceinline__ TileRounder(unsigned char *shared, const Block &block)
        : arrays(*reinterpret_cast<Arrays *>(shared)), block(block), feedback(at_head(block.side->feedback, D * D)),
          along(L::VALUES ? block.side->token_feedback : nullptr), lane(threadIdx.x % 32), g(lane / 4), t(lane % 4),
          warp(threadIdx.x / 32) {}

    __device__ __forceinline__ void encode() {
        measure_block<L, Codec, 16>(arrays, block);
        __syncthreads();
        is_fed_back = __float_as_uint(cost_at(0).w) >> 31 == 0;
#pragma unroll 1
        for (int pass = 0; pass < L::N; pass += Arrays::PASS) {
            first = pass + 16 * warp;
            weigh();
            __syncthreads();
#pragma unroll 1
            for (int front = 0; front < Arrays::TILES + WARPS - 1; ++front) {
                if (front >= warp && front < warp + Arrays::TILES) round_tile(front - warp);
                __syncthreads();
            }
            fit();
        }
        __syncthreads();
        Codec::pack(block.record(), arrays.codes, arrays.norms, block.side->tables, threadIdx.x, THREADS);
    }

    // Units of the warp's tokens, and the weights within its tiles. Two lanes share a token.
    __device__ __forceinline__ void weigh() {
        const int token = first + lane % 16;
        float reach = 0.0f;
        if (along)
            for (int from = lane / 16; from < token; from += 2)
                reach += fabsf(along[from * L::N + token]) * arrays.sizes[from];
        const float unit = fmaxf(reach + __shfl_xor_sync(0xffffffffu, reach, 16), arrays.sizes[token]);
        const float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
        for (int i = lane / 16; i < 17; i += 2)
            arrays.inside[16 * warp + lane % 16][i] =
                along && i < 16 ? along[(first + i) * L::N + token] * arrays.sizes[first + i] * inverse : 0.0f;
        if (lane < 16) arrays.units[token] = unit;
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first + g + 8 * h;
            over_unit[h] = arrays.units[row] > 0.0f ? 1.0f / arrays.units[row] : 0.0f;
            share[h] = arrays.sizes[row] * over_unit[h];
            back[h] = arrays.units[row] * arrays.inverses[row];
            sums[h][0] = sums[h][1] = 0.0f;
        }
    }

    __device__ __forceinline__ float4 cost_at(int pair) const {
        if (!WHOLE && pair >= D / 2) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        return __ldg(reinterpret_cast<const float4 *>(at_head(block.side->residues, D * 2)) + pair);
    }
    // The points of two channels of a token.
    __device__ __forceinline__ void read_point(float (&y)[2], int token, int pair) const {
        y[0] = y[1] = 0.0f;
        if (!WHOLE && pair >= D / 2) return;
        const unsigned short *code = arrays.codes + token * Arrays::CODES + pair * 2 / W;
        if constexpr (W == 2) load_cell(y, arrays.points + *code * 2);
        else y[0] = arrays.points[code[0]], y[1] = arrays.points[code[1]];
    }
    // The lane's points of a tile that is rounded.
    __device__ __forceinline__ void read_points(float (&y)[2][4], int tile) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float pair[2];
            read_point(pair, first + g + i / 2 * 8, 8 * tile + 2 * t + i % 2);
            y[0][i] = pair[0], y[1][i] = pair[1];
        }
    }
    // F from a tile of channels to another: operands whose rows are in the order in which lanes have channels.
    __device__ __forceinline__ Columns feedback_of(int from, int to) const {
        float weights[4][2] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (WHOLE || (16 * from + 4 * t < D && 16 * to + 2 * g < D))
                load_cell(weights[i], feedback + (16 * from + 4 * t + i) * D + 16 * to + 2 * g);
        return Columns(weights);
    }

    // Adds to targets of a tile the errors of 16 tokens, from `earlier` on, times B.
    __device__ __forceinline__ void feed_tokens(float (&target)[2][4], int tile, int earlier) const {
        const int at = earlier / L::PART * L::TILES + earlier % L::PART / 16 * L::STEPS + tile;
        const uint4 chunk = __ldg(reinterpret_cast<const uint4 *>(block.full()) + at * 32 + lane);
        const unsigned words[2][2] = {{chunk.x, chunk.y}, {chunk.z, chunk.w}};  // of even and odd channels
        float errors[4][2], weights[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = earlier + i / 2 * 8 + 2 * t + i % 2;
            float y[2];
            read_point(y, token, 8 * tile + g);
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                const __half2 both = as_half2(words[odd][i / 2]);
                errors[i][odd] = (i % 2 ? __high2float(both) : __low2float(both)) * arrays.inverses[token] - y[odd];
            }
#pragma unroll
            for (int h = 0; h < 2; ++h)
                weights[i % 2][2 * h + i / 2] =
                    __ldg(along + token * L::N + first + g + 8 * h) * arrays.sizes[token] * over_unit[h];
        }
        Columns(errors).multiply(target, Rows(weights));
    }

    __device__ __forceinline__ void round_tile(int tile) {
        float x[2][4], target[2][4], fed[2][4] = {}, s[2][4] = {}, y[2][4];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int token = first + g + i % 4 / 2 * 8, channel = 16 * tile + 4 * t + i % 2 * 2 + i / 4;
            float value = full_value<L>(block.full(), token, channel);
            if (L::MEAN_BITS != 0 && (WHOLE || channel < D)) value -= arrays.mean[channel];
            x[i / 4][i % 4] = fminf(fmaxf(value, -LARGEST), LARGEST) * arrays.inverses[token];
            target[i / 4][i % 4] = x[i / 4][i % 4] * share[i % 4 / 2];
        }
        if (along)
#pragma unroll 1
            for (int earlier = 0; earlier < first; earlier += 16) feed_tokens(target, tile, earlier);
#pragma unroll 1
        for (int earlier = 0; earlier < tile; ++earlier) {
            const Columns weights = feedback_of(earlier, tile);
            Rows errors;
            const uint4 *parts = &arrays.errors[warp][earlier][0][lane];
            memcpy(errors.high, parts, 16), memcpy(errors.low, parts + 32, 16);
            weights.multiply(fed, errors);
            read_points(y, earlier);
            weights.multiply(s, Rows(y));
        }
        round_cells(target, fed, x, tile);
        const Rows errors(target);
        memcpy(&arrays.errors[warp][tile][0][lane], errors.high, 16);
        memcpy(&arrays.errors[warp][tile][1][lane], errors.low, 16);
        read_points(y, tile);
        feedback_of(tile, tile).multiply(s, Rows(y));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 cost = cost_at(8 * tile + 2 * t + i % 2);
            const float even = s[0][i] + y[0][i], odd = s[1][i] + y[1][i];
            const float weighted[2] = {cost.x * even + cost.y * odd, cost.y * even + cost.z * odd};
            sums[i / 2][0] += weighted[0] * fed[0][i] + weighted[1] * fed[1][i];
            sums[i / 2][1] += weighted[0] * even + weighted[1] * odd;
        }
    }

    // Rounds the cells of a tile in wavefronts: token + cell is the number of the step. Of a lane's cells at most one
    // has its turn. Errors replace targets, residues replace what is fed back.
    __device__ __forceinline__ void round_cells(float (&target)[2][4], float (&fed)[2][4], const float (&x)[2][4],
                                                int tile) const {
        const Nearest<Codec> nearest{arrays.points, block.side->candidates};
        const bool is_there = WHOLE || 16 * tile + 4 * t < D;
        const float4 *f = reinterpret_cast<const float4 *>(feedback + 16 * tile * (D + 1)) + t;
        unsigned short *codes = arrays.codes + (first + g) * Arrays::CODES + CELLS * tile + OF_LANE * t;
#pragma unroll 1
        for (int step = 0; step < 16 + CELLS - 1; ++step) {
            const int turn = step - OF_LANE * t - g, cell = turn & 7, half = turn >> 3;
            const bool is_turn = is_there && (half == 0 || half == 1) && cell < OF_LANE;
            float unit[W], y[W], token_error[W], target_error[W], residue[W];
            pick(target_error, target, half, cell), pick(residue, fed, half, cell), pick(token_error, x, half, cell);
#pragma unroll
            for (int w = 0; w < W; ++w)
                // The other lanes' numbers may be far from all points, and their searches would be waited for.
                unit[w] = is_turn ? (target_error[w] + (is_fed_back ? residue[w] : 0.0f)) * (half ? back[1] : back[0])
                                  : 0.0f;
            const unsigned code = nearest(unit);
            if (is_turn) codes[half * 8 * Arrays::CODES + cell] = static_cast<unsigned short>(code);
            load_cell(y, arrays.points + code * W);
#pragma unroll
            for (int w = 0; w < W; ++w) {
                token_error[w] -= y[w], target_error[w] -= y[w] * (half == 0 ? share[0] : share[1]);
                residue[w] += target_error[w];
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int c = i % 4, at = i / 4 * 2 + c / 2;
                const bool is_this = is_turn && half == i / 4 && cell == c / W;
                target[c % 2][at] = is_this ? target_error[c % W] : target[c % 2][at];
                fed[c % 2][at] = is_this ? residue[c % W] : fed[c % 2][at];
            }
            if (along) feed_rows(target, token_error, step);
            feed_cells(fed, target_error, f, step, D - 16 * tile);
        }
    }

    // The numbers of a cell of one of the lane's rows.
    static __device__ __forceinline__ void pick(float (&picked)[W], const float (&x)[2][4], int half, int cell) {
        float row[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) row[c] = half == 0 ? x[c % 2][c / 2] : x[c % 2][2 + c / 2];
#pragma unroll
        for (int w = 0; w < W; ++w) {
            picked[w] = row[w];
#pragma unroll
            for (int other = 1; other < OF_LANE; ++other) picked[w] = cell == other ? row[other * W + w] : picked[w];
        }
    }

    // Feeds the errors of a step to the same cells of later tokens.
    __device__ __forceinline__ void feed_rows(float (&target)[2][4], const float (&errors)[W], int step) const {
#pragma unroll
        for (int cell = 0; cell < OF_LANE; ++cell) {
            const int from = step - OF_LANE * t - cell;
            const float *b = arrays.inside[16 * warp + g] + min(unsigned(from), 16u);
            const float weights[2] = {b[0], b[8 * 17]};
#pragma unroll
            for (int w = 0; w < W; ++w) {
                const int c = cell * W + w;
                const float error = __shfl_sync(0xffffffffu, errors[w], 4 * from + t);  // modulo 32
                target[c % 2][c / 2] += weights[0] * error, target[c % 2][2 + c / 2] += weights[1] * error;
            }
        }
    }

    // Feeds the errors of a step to later cells of the same tokens. Two single values of a lane's rows may have their
    // turn in a step, but only one pair. f: F from the tile's first channel to the lane's.
    __device__ __forceinline__ void feed_cells(float (&fed)[2][4], const float (&errors)[W], const float4 *f, int step,
                                               int channels) const {
#pragma unroll
        for (int row = 0; row < 2 / W; ++row) {
            const int turn = step - g - 8 * row, half = W == 2 ? turn >> 3 : turn >> 4 ? -1 : row;
            const unsigned cell = turn & (CELLS - 1);
            const bool is_there = WHOLE || (int(cell * W) < channels && 4 * t < channels);
#pragma unroll
            for (int w = 0; w < W; ++w) {
                const float error = __shfl_sync(0xffffffffu, errors[w], 4 * g + cell / OF_LANE);
                float4 four = {};
                if (is_there) four = __ldg(f + (cell * W + w) * (D / 4));
                const float weights[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float row_error = half == h ? error : 0.0f;
#pragma unroll
                    for (int c = 0; c < 4; ++c) fed[c % 2][2 * h + c / 2] += weights[c] * row_error;
                }
            }
        }
    }

    __device__ __forceinline__ void fit() const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float numerator = sums[h][0], denominator = sums[h][1];
            numerator += __shfl_xor_sync(0xffffffffu, numerator, 1);
            numerator += __shfl_xor_sync(0xffffffffu, numerator, 2);
            denominator += __shfl_xor_sync(0xffffffffu, denominator, 1);
            denominator += __shfl_xor_sync(0xffffffffu, denominator, 2);
            const int token = first + g + 8 * h;
            const float change = denominator > 0.0f ? numerator / denominator : 0.0f;
            if (t == 0) arrays.norms[token] = fmaxf(arrays.sizes[token] + change * arrays.units[token], 0.0f);
        }
    }
};

// Warps of a multiprocessor: single values take a few more registers than 16 warps can have.
constexpr int RESIDENT = CODEC::WIDTH == 2 ? 16 : 12;

extern "C" __global__ void __launch_bounds__(WARPS * 32, RESIDENT / WARPS)
encode_tiles_kernel(const unsigned long long *sides, const int *jobs, int kv_heads) {
    DYNAMIC_SHARED(unsigned char, shared);
    const int *job = jobs + 3 * blockIdx.x;
    const SideArrays *side = reinterpret_cast<const SideArrays *>(sides) + job[0];
    TileRounder<SIDE, CODEC, Move<SIDE, FULL>>(shared, {side, job, kv_heads}).encode();
}

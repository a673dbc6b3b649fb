// The op `linear` for three rows and more on tensor cores, with the residual sum after it: y = x @ weightᵀ + bias.
//
// y: rows of `out` numbers, `pitch` numbers apart; x (rows, in) of the format's Product, from `narrow`; weight (out,
// in), bias (out) float or null. Packed weights are rounded to half precision; sums are float. With ADD, y += instead
// of y =. With an ACTIVATION (GATED), weight and bias are [gate | up], 2 · out rows, and y is ACTIVATION(gate, up).
//
// A block multiplies TILE = 32 · WARPS_OUT rows of weights by ROWS rows of x, a warp 32 of them by all of these: each
// weight is unpacked once. The 32 rows are neighbours; with GATED they are 16 rows of gate and the 16 matching ones of
// up, whose sums a thread has side by side. Weights and x come by cp.async, STAGES − 1 stages of INPUTS inputs ahead: a
// warp copies its own rows of weights, and all warps copy x, in the order of B operands: 16 bytes for a lane, its share
// of two products of mma.m16n8k16, which are 8 neighbouring inputs. While tensor cores multiply 32 inputs, a warp
// unpacks the weights of the next 32: two warps of a scheduler, which barriers keep in step, would otherwise unpack at
// the same time, and then multiply at the same time. With WARPS_K = 2, for small matrices, two warps have the same rows
// of weights and take turns at 32 inputs; their sums are added in shared memory.
// A warp's sums run over `in` in order, so a row's are the same to the bit for any number of rows. With parts, blocks
// of equal blockIdx.y take one part of `in`, whole UNITs of 256 inputs, and write their sums to y (parts, rows, pitch),
// for add_parts.cu.
// Grid (tiles · ceil(rows / ROWS), parts), 32 · WARPS_OUT · WARPS_K threads; blocks of neighbouring rows of x are
// neighbours, so that they find the weights in the L2 cache. With SECOND it has more tiles and arguments:
// output_tile.cuh. With EXPERTS (0 or 1, default 0) it has (tiles, 1, groups of rows), and more arguments:
// expert_group.cuh.
// DEFINES: WEIGHT (a weight format), ROWS (8, 16, 32, 48, 64), WARPS_OUT, WARPS_K (1, 2), INPUTS (64, 128), STAGES (at
// least 3), RESIDENT (blocks of a multiprocessor), SHARED (bytes of dynamic shared memory), ADD (0 or 1), ACTIVATION (a
// function of activation.cuh, or not defined), TO (type of y, see output_tile.cuh), SECOND.
// JOINS: activation.cuh, output_tile.cuh, expert_group.cuh, wide_weights.cuh.
// Cost: bytes of the weights; products; x from L2 once for each block: rows / TILE times the bytes of 16-bit weights.
// PRECOND: in % 8 == 0, in % VALUES == 0 if packed; x, weight aligned to 16 bytes; out % 16 == 0 if GATED or EXPERTS
// and the format is packed.

constexpr int WARPS = WARPS_OUT * WARPS_K, TILE = 32 * WARPS_OUT, TILES_N = ROWS / 8, UNIT = 256;
constexpr int PARTS = INPUTS / 32, PARTS_OF_WARP = PARTS / WARPS_K;  // of a stage, 32 inputs each
constexpr int SHARING = TILES_N % 4 == 0 ? 4 : TILES_N % 3 == 0 ? 3 : 1;  // tiles of x that take turns
constexpr int TURNS = TILES_N / SHARING;
#ifdef SECOND
constexpr int SECOND_BYTES = Weights<SECOND>::BYTES;
constexpr bool HAS_TAIL = Weights<WEIGHT>::HAS_TAIL && Weights<SECOND>::HAS_TAIL;
#else
constexpr int SECOND_BYTES = 0;
constexpr bool HAS_TAIL = Weights<WEIGHT>::HAS_TAIL;
#endif
constexpr int BYTES = Weights<WEIGHT>::BYTES > SECOND_BYTES ? Weights<WEIGHT>::BYTES : SECOND_BYTES;  // of 16 rows
constexpr int FRAGMENTS = TILES_N * PARTS, OWN = (FRAGMENTS + WARPS - 1) / WARPS;  // of x: 8 rows × 32 inputs
constexpr int X_AT = 2 * WARPS_OUT * BYTES, STAGE = X_AT + 512 * FRAGMENTS;
static_assert(PARTS_OF_WARP % 2 == 0 && UNIT % INPUTS == 0 && STAGES >= 3, "weights of parts are unpacked in turn");
static_assert(SHARED == STAGES * STAGE && SHARED >= 4 * (WARPS_K - 1) * TILE * ROWS, "weights and x, and then sums");

using Number = WEIGHT::Product;

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
    mma_m16n8k16_f16(d, a, b);
}
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
    mma_m16n8k16_bf16(d, a, b);
}

// A thread's copies of x. Rows after the last one repeat it; inputs beyond `in` are zeros.
struct Inputs {
    const Number *x;
    unsigned at[OWN];  // element of stage 0
    int in;

    __device__ __forceinline__ Inputs(const Number *x, const Rows &rows, int first_row, int in) : x(x), in(in) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            const int f = warp + WARPS * c, row = min(first_row + f % TILES_N * 8 + lane / 4, rows.count - 1);
            at[c] = unsigned(rows[row]) * in + f / TILES_N * 32 + lane % 4 * 8;
        }
    }
    __device__ __forceinline__ void copy(unsigned char *slot, int stage) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k = stage * INPUTS;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            const int f = warp + WARPS * c;
            if (FRAGMENTS % WARPS && f >= FRAGMENTS) break;
            unsigned char *const to = slot + X_AT + 512 * f + 16 * lane;
            if (!HAS_TAIL || k + f / TILES_N * 32 + lane % 4 * 8 < in) cp_async<16>(to, x + at[c] + k);
            else *reinterpret_cast<uint4 *>(to) = uint4();
        }
    }
};

using Sums = float[2][TILES_N][4];
using Operands = uint4[2][2];  // of two tiles; rows g and g + 8

// What a block does with the rows `tile` of a matrix of the format W.
template <class W>
struct Product {
    unsigned char *shared, *tiles;  // the stages, and this warp's rows of weights in the first one
    Tile tile;
    Weights<W> weights;
    int in, first, last;  // stages

    // With OVERLAPS it begins the copies of the first weights, before x is there.
    __device__ __forceinline__ Product(unsigned char *shared, const unsigned char *weight, const Tile &tile,
                                       int first_weight, int in)
        : shared(shared), tiles(shared + own_rows() * 2 * BYTES), tile(tile),
          weights(weight, tile, first_weight, in), in(in) {
        const int units = (in + UNIT - 1) / UNIT;
        first = int(units * (long long)blockIdx.y / gridDim.y) * (UNIT / INPUTS);
        last = min(int(units * (blockIdx.y + 1ll) / gridDim.y) * (UNIT / INPUTS), (in + INPUTS - 1) / INPUTS);
#ifdef OVERLAPS
        for (int i = 0; i < STAGES - 1 && first + i < last; ++i) weights.copy(tiles + i * STAGE, first + i);
#endif
    }

    // Adds the products of 32 inputs: the warp's 32 rows of weights × all rows of x. Between these it unpacks `next`,
    // part `next_part` of the stage at `next_tiles`.
    static __device__ __forceinline__ void add_part(Sums &sums, const Operands &w, const uint4 *fragments,
                                                    Operands &next, const unsigned char *next_tiles, int next_part,
                                                    unsigned zero) {
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            uint4 v[SHARING];
#pragma unroll
            for (int n = 0; n < SHARING; ++n) v[n] = fragments[(turn * SHARING + n) * 32];
#pragma unroll
            for (int n = 0; n < SHARING; ++n)
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    multiply(sums[m][turn * SHARING + n], {w[m][0].x, w[m][1].x, w[m][0].y, w[m][1].y},
                             {v[n].x, v[n].y}, Number());
#pragma unroll
            for (int i = 4 * turn / TURNS; i < 4 * (turn + 1) / TURNS; ++i)
                next[i / 2][i % 2] = Weights<W>::unpack(next_tiles, next_part, i / 2, i % 2, zero);
#pragma unroll
            for (int n = 0; n < SHARING; ++n)
#pragma unroll
                for (int m = 0; m < 2; ++m)
                    multiply(sums[m][turn * SHARING + n], {w[m][0].z, w[m][1].z, w[m][0].w, w[m][1].w},
                             {v[n].z, v[n].w}, Number());
        }
    }

    // Multiplies rows first_row … of x and writes y.
    __device__ __forceinline__ void run(TO *y, const Number *x, const float *bias, const Rows &rows, int first_row,
                                        long long pitch) const {
        const Inputs inputs(x, rows, first_row, in);
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) {
            if (first + i < last) {
#ifndef OVERLAPS
                weights.copy(tiles + i * STAGE, first + i);
#endif
                inputs.copy(shared + i * STAGE, first + i);
            }
            cp_async_commit();
        }
        float sums[2][TILES_N][4] = {};
        uint4 w[2][2][2];  // of this part and of the next one, in turn
        const unsigned zero = unsigned(in) >> 31;
        int slot = 0, free = (STAGES - 1) * STAGE;
        cp_async_wait<STAGES - 2>();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 4; ++i) w[0][i / 2][i % 2] = Weights<W>::unpack(tiles, k_warp(), i / 2, i % 2, zero);
#pragma unroll 1
        for (int stage = first; stage < last; ++stage) {
            const int next = slot == (STAGES - 1) * STAGE ? 0 : slot + STAGE;
#pragma unroll
            for (int i = 0; i < PARTS_OF_WARP; ++i) {
                const bool ends = i == PARTS_OF_WARP - 1;
                const int part = i * WARPS_K + k_warp();
                if (ends) {  // the next stage is there, and nobody needs the one before this
                    cp_async_wait<STAGES - 3>();
                    __syncthreads();
                    if (stage + STAGES - 1 < last) {
                        weights.copy(tiles + free, stage + STAGES - 1);
                        inputs.copy(shared + free, stage + STAGES - 1);
                    }
                    cp_async_commit();
                }
                const int from = ends && stage + 1 < last ? next : slot;  // after the last, what is there
                const auto *const fragments = reinterpret_cast<const uint4 *>(shared + slot + X_AT) + threadIdx.x % 32;
                add_part(sums, w[i % 2], fragments + part * TILES_N * 32, w[1 - i % 2], tiles + from,
                         ends ? k_warp() : part + WARPS_K, zero);
            }
            free = slot, slot = next;
        }
        // Not before: blocks of the next kernel would gather on the processors that are free.
        let_next_begin();
        cp_async_wait<0>();
        if (WARPS_K > 1 && !join(sums)) return;
        write(y, sums, bias, rows, first_row, pitch);
    }

    // Adds the sums of both warps with the same rows of weights; whether the caller has the total.
    __device__ __forceinline__ bool join(Sums &sums) const {
        float4 *const others = reinterpret_cast<float4 *>(shared) + own_rows() * 2 * TILES_N * 32;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2 * TILES_N; ++i) {
            const float(&sum)[4] = sums[i / TILES_N][i % TILES_N];
            if (k_warp()) others[32 * i + threadIdx.x % 32] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2 * TILES_N; ++i) {
            if (k_warp()) break;
            const float4 other = others[32 * i + threadIdx.x % 32];
            float(&sum)[4] = sums[i / TILES_N][i % TILES_N];
            sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
        }
        return k_warp() == 0;
    }

    __device__ __forceinline__ void write(TO *y, const Sums &sums, const float *bias, const Rows &rows, int first_row,
                                          long long pitch) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        y += blockIdx.y * (long long)rows.count * pitch;
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = first_row + n * 8 + lane % 4 * 2 + i % 2;
                if (row >= rows.count) continue;
#pragma unroll
                for (int m = 0; m < (GATED ? 1 : 2); ++m) {
                    const int c = 32 * warp + 16 * m + i / 2 * 8 + lane / 4, column = tile.column_of(c);
                    if (column >= tile.out) continue;
                    float sum = sums[m][n][i], other = sums[1][n][i];
                    if (bias) sum += bias[column], other += GATED ? bias[tile.out + column] : 0.0f;
                    if (GATED) sum = ACTIVATION(sum, other);
                    store(y + row * pitch + column, sum);
                }
            }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS_OUT * WARPS_K, RESIDENT)
gemm_wide_kernel(TO *y, const Number *x, const unsigned char *weight, const float *bias, int rows_of_x, int in, int out,
                 long long pitch SECOND_ARGUMENTS GROUP_ARGUMENTS) {
    DYNAMIC_SHARED(unsigned char, shared);
#if EXPERTS
    const Rows rows = rows_of_group(y, bias, groups, places_rows, bias_pitch, (GATED ? 2 : 1) * out, pitch);
    if (!rows.count) return;
    const int number = blockIdx.x, first_row = 0;
#else
    const Rows rows{0, rows_of_x};
    const int sets = (rows_of_x + ROWS - 1) / ROWS, number = int(blockIdx.x) / sets;
    const int first_row = int(blockIdx.x) % sets * ROWS;
#endif
#ifdef SECOND
    if (number >= border) {
        const Product<SECOND> product(shared, second, {(number - border) * TILE, second_out}, 0, in);
        wait_for_previous();
        product.run(y + out, x, bias ? bias + out : nullptr, rows, first_row, pitch);
        return;
    }
#endif
    const Product<WEIGHT> product(shared, weight, {number * (GATED ? TILE / 2 : TILE), out}, rows.first_weight, in);
    wait_for_previous();
    product.run(y, x, bias, rows, first_row, pitch);
}

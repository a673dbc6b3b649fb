// The op `linear` for 3 to 16 rows and packed weights on tensor cores, with the residual sum after it:
// y = x @ weightᵀ + bias. Fewer rows are those of gemv_packed.
//
// y: rows of `out` numbers, `pitch` numbers apart; x (rows, in) in half precision, as `narrow` writes it; weight (out,
// in), bias (out) float or null. Sums are float. With ADD, y += instead of y =. With an ACTIVATION (GATED), weight and
// bias are [gate | up], 2 · out rows, and y is ACTIVATION(gate, up).
//
// A block multiplies TILES tiles of 16 rows of weights; with GATED they are in turn one of gate and the matching one of
// up. Of the inputs, its warps take turns at units of UNIT, and their sums are added in shared memory. A warp works
// alone: it copies a unit of each tile, whole blocks of the format, which lie together, to SLOTS in shared memory, and
// its lanes unpack from there the A operands of mma.m16n8k16 (packed_weights.cuh). The tiles share the B operands.
// Columns of B behind the last row repeat rows: their sums are not read.
// Grid (ceil(rows of weights / (16 · TILES))), 32 · WARPS threads. With BESIDE it has more blocks and arguments:
// beside.cuh.
// DEFINES: ACT (of x: __half), WEIGHT (a packed format), ROWS (most rows: 4, 8, 16), UNIT (a multiple of VALUES), TILES
// (even if GATED), SLOTS (more than TILES), WARPS, SHARED (bytes of dynamic shared memory), ADD (0 or 1), ACTIVATION (a
// function of activation.cuh, or not defined), TO (of y, see output_tile.cuh), BESIDE.
// JOINS: activation.cuh, output_tile.cuh, beside.cuh.
// Cost: bytes of the weights, of which at least WARPS · (SLOTS − TILES) units per block are in flight; each block reads
// all rows of x from L2 or L1, which for 16 rows is about the bytes of four tiles of 4-bit weights.
// PRECOND: 1 <= rows <= ROWS; in % VALUES == 0; x aligned to 16 bytes; out % 16 == 0 if GATED.

constexpr int COLUMNS_N = ROWS > 8 ? ROWS / 8 : 1;  // tiles of 8 rows of x

// What a block does with a matrix of the format W. U, M, S: its UNIT, TILES and SLOTS.
template <class W, int U, int M, int S>
struct Product {
    static constexpr int TILE = 16 * M, BYTES = U / W::VALUES * W::BLOCK;  // BYTES: of a unit of a tile
    static constexpr int COPIED_BYTES = WARPS * S * BYTES, JOINED_BYTES = WARPS * ROWS * pitch_of(TILE) * 4;
    static constexpr int ALL_BYTES = COPIED_BYTES > JOINED_BYTES ? COPIED_BYTES : JOINED_BYTES;
    static constexpr bool CONSTANTS_KEPT = M <= 2 || W::HIGH == 0;  // in registers, of which more planes need more
    static_assert(S > M && !(GATED && M % 2) && U % W::VALUES == 0, "as the head says");

    unsigned char *shared, *places;  // the block's, and this warp's slots
    int warp, lane, units, in;
    Tile tile;
    const unsigned char *tiles[M];

    // Begins the copies of the first weights. number: the block's, of those that multiply the matrix.
    __device__ __forceinline__ Product(unsigned char *shared, const unsigned char *weight, int in, int out, int number)
        : shared(shared), warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)), lane(threadIdx.x % 32),
          units((in + U - 1) / U), in(in), tile{number * (GATED ? TILE / 2 : TILE), out} {
        places = shared + warp * (S * BYTES);
#pragma unroll
        for (int m = 0; m < M; ++m) tiles[m] = W::block_at(weight, tile.row_of(16 * m) / 16, in, 0) + 16 * lane;
#pragma unroll
        for (int i = 0; i < S; ++i) copy(i * BYTES, warp + i / M * WARPS, i % M);
    }

    // Commits one group of copies, of unit `unit` of tile m; behind the last unit it is empty.
    __device__ __forceinline__ void copy(int slot, int unit, int m) const {
        if (unit < units) {
            const int left = U == W::VALUES ? U : min(U, in - unit * U);
            const int end = left / W::VALUES * W::BLOCK;
            const unsigned char *const from = tiles[m] + unit * (long long)BYTES;
#pragma unroll
            for (int at = 0; at < BYTES; at += 512)
                if (at + 16 * lane < end) cp_async<16>(places + slot + 16 * lane + at, from + at);
        }
        cp_async_commit();
    }

    // The A operands of 16 rows of weights and 32 inputs, k … of a unit. zero: see PackedWeights.
    static __device__ __forceinline__ void unpack(uint4 (&w)[2], const unsigned char *unit, int k, unsigned zero) {
        const int lane = threadIdx.x % 32, group = (k % W::VALUES + lane % 4 * 8) / W::GROUP;
        const unsigned char *const block = unit + k / W::VALUES * W::BLOCK;
        const unsigned char *const plane = block + W::plane(k % W::VALUES);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto factors = W::factors(block, half * 8 + lane / 4, group);
            w[half] = W::halves(W::unpack(plane, lane, half, zero), factors);
        }
    }

    // Multiplies all rows of x and writes y.
    __device__ __forceinline__ void run(TO *y, const ACT *x, const float *bias, int rows, long long pitch) const {
        const ACT *inputs[COLUMNS_N];  // the lane's first ones
#pragma unroll
        for (int n = 0; n < COLUMNS_N; ++n)
            inputs[n] = x + min(n * 8 + lane / 4, rows - 1) * (long long)in + lane % 4 * 8;
        float sums[M][COLUMNS_N][4] = {};
        int slots[M];  // of the unit's tiles
#pragma unroll
        for (int m = 0; m < M; ++m) slots[m] = m * BYTES;
        for (int unit = warp; unit < units; unit += WARPS) {
            cp_async_wait<S - M>();
            __syncwarp();
#pragma unroll
            for (int k = 0; k < U; k += 32) {
                if (U != W::VALUES && unit * U + k >= in) break;
                uint4 x[COLUMNS_N];
#pragma unroll
                for (int n = 0; n < COLUMNS_N; ++n) x[n] = *reinterpret_cast<const uint4 *>(inputs[n] + unit * U + k);
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    uint4 w[2];
                    unpack(w, places + slots[m], k, CONSTANTS_KEPT ? unsigned(rows) >> 31 : 0);
#pragma unroll
                    for (int n = 0; n < COLUMNS_N; ++n) {
                        mma_m16n8k16_f16(sums[m][n], {w[0].x, w[1].x, w[0].y, w[1].y}, {x[n].x, x[n].y});
                        mma_m16n8k16_f16(sums[m][n], {w[0].z, w[1].z, w[0].w, w[1].w}, {x[n].z, x[n].w});
                    }
                }
            }
            __syncwarp();
#pragma unroll
            for (int m = 0; m < M; ++m) {
                copy(slots[m], unit + (m + S) / M * WARPS, (m + S) % M);
                slots[m] += slots[m] >= (S - M) * BYTES ? (M - S) * BYTES : M * BYTES;
            }
        }

        cp_async_wait<0>();
        __syncthreads();
        float *const joined = reinterpret_cast<float *>(shared);
#pragma unroll
        for (int m = 0; m < M; ++m)
#pragma unroll
            for (int i = 0; i < 4 * COLUMNS_N; ++i) {
                const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;  // of x
                float *const to = joined + (warp * ROWS + row) * pitch_of(TILE) + m * 16;
                if (row < ROWS) to[i % 4 / 2 * 8 + lane / 4] = sums[m][i / 4][i % 4];
            }
        __syncthreads();
        store_tile<WARPS, TILE>(y, joined, tile, bias, rows, pitch, threadIdx.x);
    }
};

using Own = Product<WEIGHT, UNIT, TILES, SLOTS>;
#ifdef BESIDE
using Other = Product<BESIDE, BESIDE_UNIT, BESIDE_TILES, BESIDE_SLOTS>;
static_assert(SHARED == (Own::ALL_BYTES > Other::ALL_BYTES ? Own::ALL_BYTES : Other::ALL_BYTES), "for either");
#else
static_assert(SHARED == Own::ALL_BYTES, "the slots, and then the sums");
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
gemm_packed_kernel(TO *y, const ACT *x, const unsigned char *weight, const float *bias, int rows, int in, int out,
                   long long pitch BESIDE_ARGUMENTS) {
    let_next_begin();
    DYNAMIC_SHARED(unsigned char, shared);
#ifdef BESIDE
    if (int(blockIdx.x) >= border) {
        const Other product(shared, beside, in, beside_out, blockIdx.x - border);
        wait_for_previous();
        product.run(y + out, x, bias ? bias + out : nullptr, rows, pitch);
        return;
    }
#endif
    const Own product(shared, weight, in, out, blockIdx.x);
    wait_for_previous();
    product.run(y, x, bias, rows, pitch);
}

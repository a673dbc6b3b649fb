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
// Grid (ceil(rows of weights / (16 · TILES))), 32 · WARPS threads.
// DEFINES: ACT (of x: __half), WEIGHT (a packed format), ROWS (most rows: 4, 8, 16), UNIT (a multiple of VALUES), TILES
// (even if GATED), SLOTS (more than TILES), WARPS, SHARED (bytes of dynamic shared memory), ADD (0 or 1), ACTIVATION (a
// function of activation.cuh, or not defined), TO (of y, see output_tile.cuh).
// JOINS: activation.cuh, output_tile.cuh.
// Cost: bytes of the weights, of which at least WARPS · (SLOTS − TILES) units per block are in flight; each block reads
// all rows of x from L2 or L1, which for 16 rows is about the bytes of four tiles of 4-bit weights.
// PRECOND: 1 <= rows <= ROWS; in % VALUES == 0; x aligned to 16 bytes; out % 16 == 0 if GATED.

constexpr int TILE = 16 * TILES, BYTES = UNIT / WEIGHT::VALUES * WEIGHT::BLOCK;  // BYTES: of a unit of a tile
constexpr int COPIED_BYTES = WARPS * SLOTS * BYTES, JOINED_BYTES = WARPS * ROWS * pitch_of(TILE) * 4;
constexpr int COLUMNS_N = ROWS > 8 ? ROWS / 8 : 1;  // tiles of 8 rows of x
constexpr bool CONSTANTS_KEPT = TILES <= 2 || WEIGHT::HIGH == 0;  // in registers, of which more planes need more
static_assert(SLOTS > TILES && !(GATED && TILES % 2) && UNIT % WEIGHT::VALUES == 0, "as the head says");
static_assert(SHARED == (COPIED_BYTES > JOINED_BYTES ? COPIED_BYTES : JOINED_BYTES), "the slots, and then the sums");

// The A operands of 16 rows of weights and 32 inputs, k … of a unit. zero: see PackedWeights.
__device__ __forceinline__ void unpack(uint4 (&w)[2], const unsigned char *unit, int k, unsigned zero) {
    const int lane = threadIdx.x % 32, group = (k % WEIGHT::VALUES + lane % 4 * 8) / WEIGHT::GROUP;
    const unsigned char *const block = unit + k / WEIGHT::VALUES * WEIGHT::BLOCK;
    const unsigned char *const plane = block + WEIGHT::plane(k % WEIGHT::VALUES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto factors = WEIGHT::factors(block, half * 8 + lane / 4, group);
        w[half] = WEIGHT::halves(WEIGHT::unpack(plane, lane, half, zero), factors);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
gemm_packed_kernel(TO *y, const ACT *x, const unsigned char *weight, const float *bias, int rows, int in, int out,
                   long long pitch) {
    let_next_begin();
    DYNAMIC_SHARED(unsigned char, shared);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int units = (in + UNIT - 1) / UNIT;
    const Tile tile = {int(blockIdx.x) * (GATED ? TILE / 2 : TILE), out};
    unsigned char *const places = shared + warp * (SLOTS * BYTES);
    const ACT *inputs[COLUMNS_N];  // the lane's first ones
#pragma unroll
    for (int n = 0; n < COLUMNS_N; ++n) inputs[n] = x + min(n * 8 + lane / 4, rows - 1) * (long long)in + lane % 4 * 8;
    const unsigned char *tiles[TILES];
#pragma unroll
    for (int m = 0; m < TILES; ++m) tiles[m] = WEIGHT::block_at(weight, tile.row_of(16 * m) / 16, in, 0) + 16 * lane;

    // Commits one group of copies, of unit `unit` of tile m; behind the last unit it is empty.
    const auto copy = [&](int slot, int unit, int m) {
        if (unit < units) {
            const int left = UNIT == WEIGHT::VALUES ? UNIT : min(UNIT, in - unit * UNIT);
            const int end = left / WEIGHT::VALUES * WEIGHT::BLOCK;
            const unsigned char *const from = tiles[m] + unit * (long long)BYTES;
#pragma unroll
            for (int at = 0; at < BYTES; at += 512)
                if (at + 16 * lane < end) cp_async<16>(places + slot + 16 * lane + at, from + at);
        }
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) copy(i * BYTES, warp + i / TILES * WARPS, i % TILES);
    wait_for_previous();
    float sums[TILES][COLUMNS_N][4] = {};
    int slots[TILES];  // of the unit's tiles
#pragma unroll
    for (int m = 0; m < TILES; ++m) slots[m] = m * BYTES;
    for (int unit = warp; unit < units; unit += WARPS) {
        cp_async_wait<SLOTS - TILES>();
        __syncwarp();
#pragma unroll
        for (int k = 0; k < UNIT; k += 32) {
            if (UNIT != WEIGHT::VALUES && unit * UNIT + k >= in) break;
            uint4 x[COLUMNS_N];
#pragma unroll
            for (int n = 0; n < COLUMNS_N; ++n) x[n] = *reinterpret_cast<const uint4 *>(inputs[n] + unit * UNIT + k);
#pragma unroll
            for (int m = 0; m < TILES; ++m) {
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
        for (int m = 0; m < TILES; ++m) {
            copy(slots[m], unit + (m + SLOTS) / TILES * WARPS, (m + SLOTS) % TILES);
            slots[m] += slots[m] >= (SLOTS - TILES) * BYTES ? (TILES - SLOTS) * BYTES : TILES * BYTES;
        }
    }

    cp_async_wait<0>();
    __syncthreads();
    float *const joined = reinterpret_cast<float *>(shared);
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4 * COLUMNS_N; ++i) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;  // of x
            float *const to = joined + (warp * ROWS + row) * pitch_of(TILE) + m * 16;
            if (row < ROWS) to[i % 4 / 2 * 8 + lane / 4] = sums[m][i / 4][i % 4];
        }
    __syncthreads();
    store_tile<WARPS, TILE>(y, joined, tile, bias, rows, pitch, threadIdx.x);
}

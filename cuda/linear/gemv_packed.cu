// The op `linear` for up to 16 rows and packed weights on tensor cores, with RMS norm before it and the residual sum
// after it: y = x @ weightᵀ + bias.
//
// y: rows of `out` floats, `pitch` floats apart; x (rows, in), weight (out, in), bias (out) float or null. x is rounded
// to half precision, clipped to ±65504; sums are float. With NORMED, x is replaced by x / rms(x) · norm, norm (in)
// float: x · norm is rounded, and 1 / rms(x), one number per row, multiplies the sums. With ADD, y += instead of y =.
// With an ACTIVATION (GATED), weight and bias are [gate | up], 2 · out rows, and y is ACTIVATION(gate) · up.
//
// A block multiplies TILES tiles of 16 rows of weights; with GATED they are in turn one of gate and the matching one of
// up. Of the inputs, its 8 warps take turns at units of UNIT, and their sums are added in shared memory. A warp works
// alone: it copies a unit of a tile, whole blocks of the format, which lie together, to its ring of SLOTS in shared
// memory, and its lanes unpack from there the A operands of mma.m16n8k16 (packed_weights.cuh). It rounds its inputs
// itself, each lane ROWS · UNIT / 256 times 8 of them, as B operands, which all tiles share. Of 8 rows, a lane rounds
// just what it multiplies. Of fewer rows, lanes give each other theirs in shared memory, and the columns of B behind
// the last row repeat rows: their sums are not read. 16 rows come rounded, and lanes load their operands.
// Grid (ceil(rows of weights / (16 · TILES))), 256 threads.
// DEFINES: ACT (of x: float, or __half with 16 rows), WEIGHT (a packed format), ROWS (most rows: 1, 2, 4, 8, 16), TILES
// (even if GATED), SLOTS (at least 2), NORMED (0 or 1; 0 with 16 rows), ADD (0 or 1), ACTIVATION (a function of
// activation.cuh, or not defined).
// JOINS: activation.cuh, output_tile.cuh.
// Dynamic shared memory: 8 · max(SLOTS · BYTES + X, 4 · ROWS · (16 · TILES + 4)) bytes, BYTES: of a unit of a tile; X:
// 2 · ROWS · UNIT, or 0 from 8 rows on.
// Cost: bytes of the weights, of which 8 · (SLOTS − 1) units per block are in flight at any time; each block reads its
// inputs of all rows from L2 or L1.
// PRECOND: 1 <= rows <= ROWS; in % VALUES == 0; x, norm aligned to 16 bytes; out % 16 == 0 if GATED.

constexpr int WARPS = 8, TILE = 16 * TILES;
constexpr int UNIT = WEIGHT::VALUES > 128 ? WEIGHT::VALUES : 128, BYTES = UNIT / WEIGHT::VALUES * WEIGHT::BLOCK;
constexpr int COLUMNS_N = ROWS > 8 ? ROWS / 8 : 1;  // tiles of 8 rows of x
constexpr int OCTETS = ROWS * UNIT / 8;             // 8 inputs of a row each
constexpr bool KEPT = ROWS == 8;                    // a lane multiplies what it has rounded itself
static_assert((8 % ROWS == 0 || ROWS == 16 && !NORMED) && SLOTS >= 2 && !(GATED && TILES % 2), "as the head says");

// A warp's share of x, one unit of all rows, as B operands. 16 rows are read as they are wanted.
#if ROWS > 8
struct Inputs {
    const __half *rows[COLUMNS_N];  // the lane's inputs of a group of 32

    __device__ __forceinline__ Inputs(const __half *x, const float *, uint4 *, int count, int in) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < COLUMNS_N; ++n)
            rows[n] = x + min(n * 8 + lane / 4, count - 1) * (long long)in + lane % 4 * 8;
    }
    __device__ __forceinline__ void round(int, int, int) {}
    __device__ __forceinline__ uint4 at(int first, int k, int n) const {
        return *reinterpret_cast<const uint4 *>(rows[n] + first + k);
    }
};
#else
// In shared memory, for each 32 inputs those of each row in turn.
struct Inputs {
    const ACT *row;         // the row that the lane rounds: lane / 4 % ROWS
    const float *norm;
    uint4 *shared;          // [OCTETS]; used only if not KEPT
    uint4 kept[UNIT / 32];  // used only if KEPT
    float squares = 0.0f;   // the sum over all that the lane has rounded

    __device__ __forceinline__ Inputs(const ACT *x, const float *norm_, uint4 *shared_, int count, int in)
        : row(x + min(threadIdx.x % 32 / 4 % ROWS, count - 1) * (long long)in), norm(norm_), shared(shared_) {}
    // Rounds the lane's octets first + lane. k: the unit's first input.
    __device__ __forceinline__ void round(int first, int k, int in) {
        const int lane = threadIdx.x % 32, octet = first + lane, at = k + octet / (4 * ROWS) * 32 + octet % 4 * 8;
        if (OCTETS % 32 && octet >= OCTETS || UNIT != WEIGHT::VALUES && at >= in) return;
        float values[8];
        load_floats(values, row + at);
#if NORMED
        float g[8];
        load_floats(g, norm + at);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            squares += values[j] * values[j];
            values[j] *= g[j];
        }
#endif
        store_within(reinterpret_cast<__half *>(KEPT ? &kept[first / 32] : &shared[octet]), values);
    }
    // Inputs k + 8 * (lane % 4) … + 7 of row lane / 4 % ROWS.
    __device__ __forceinline__ uint4 at(int, int k, int) const {
        return KEPT ? kept[k / 32] : shared[k / 8 * ROWS + threadIdx.x % (4 * ROWS)];
    }
};
#endif

// Adds the products of one unit: 16 rows of weights × all rows of x. first: input of the unit. round: inputs that are
// KEPT are rounded on the way, few at a time, which saves registers.
__device__ __forceinline__ void add_unit(float (&sums)[COLUMNS_N][4], const unsigned char *unit, Inputs &inputs,
                                         int first, int in, bool round, unsigned zero) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < UNIT; k += 32) {
        if (UNIT != WEIGHT::VALUES && first + k >= in) break;
        if (KEPT && round) inputs.round(k, first, in);
        const unsigned char *const block = unit + k / WEIGHT::VALUES * WEIGHT::BLOCK;
        const unsigned char *const plane =
            block + WEIGHT::codes(WEIGHT::VALUES / WEIGHT::GROUP) + k % WEIGHT::VALUES / 32 * 64 * WEIGHT::BITS;
        uint4 w[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int group = (k % WEIGHT::VALUES + lane % 4 * 8) / WEIGHT::GROUP;
            const auto factors = WEIGHT::factors(block, half * 8 + lane / 4, group);
            w[half] = WEIGHT::halves(WEIGHT::unpack(plane, lane, half, zero), factors);
        }
#pragma unroll
        for (int n = 0; n < COLUMNS_N; ++n) {
            const uint4 v = inputs.at(first, k, n);
            const unsigned low[2] = {v.x, v.y}, high[2] = {v.z, v.w};
            mma_m16n8k16_f16(sums[n], {w[0].x, w[1].x, w[0].y, w[1].y}, low);
            mma_m16n8k16_f16(sums[n], {w[0].z, w[1].z, w[0].w, w[1].w}, high);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2)
gemv_packed_kernel(float *y, const ACT *x, const unsigned char *weight, const float *bias, const float *norm, int rows,
                   int in, int out, long long pitch, float eps) {
    DYNAMIC_SHARED(unsigned char, shared);
    __shared__ float partial[WARPS][ROWS], factors[ROWS];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int units = (in + UNIT - 1) / UNIT;
    const Tile tile = {int(blockIdx.x) * (GATED ? TILE / 2 : TILE), out};
    unsigned char *const places = shared + warp * (SLOTS * BYTES);
    Inputs inputs(x, norm, reinterpret_cast<uint4 *>(shared + WARPS * SLOTS * BYTES) + warp * OCTETS, rows, in);
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
    for (int i = 0; i < SLOTS - 1; ++i) copy(i * BYTES, warp + i / TILES * WARPS, i % TILES);
    float sums[TILES][COLUMNS_N][4] = {};
    int slot = 0, free = (SLOTS - 1) * BYTES;
    for (int unit = warp; unit < units; unit += WARPS) {
        if (ROWS < 8) {
            __syncwarp();
#pragma unroll
            for (int first = 0; first < OCTETS; first += 32) inputs.round(first, unit * UNIT, in);
        }
#pragma unroll
        for (int m = 0; m < TILES; ++m) {
            cp_async_wait<SLOTS - 2>();
            __syncwarp();
            copy(free, unit + (m + SLOTS - 1) / TILES * WARPS, (m + SLOTS - 1) % TILES);
            add_unit(sums[m], places + slot, inputs, unit * UNIT, in, m == 0, unsigned(rows) >> 31);
            free = slot;
            slot = slot == (SLOTS - 1) * BYTES ? 0 : slot + BYTES;
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
#if NORMED
    float squares = inputs.squares;
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
#pragma unroll
    for (int step = 4 * ROWS; step < 32; step *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
    if (lane % 4 == 0 && lane / 4 < ROWS) partial[warp][lane / 4] = squares;
    __syncthreads();
    if (threadIdx.x < ROWS) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) sum += partial[w][threadIdx.x];
        factors[threadIdx.x] = rsqrtf(sum / in + eps);
    }
#endif
    __syncthreads();
    store_tile<WARPS, TILE>(y, joined, factors, tile, bias, rows, pitch);
}

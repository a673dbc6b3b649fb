// The op `linear` for 3 to 16 rows and packed weights on tensor cores, with the residual sum after it: y = x @ weightᵀ
// + bias. gemv_packed takes fewer rows.
//
// y: rows of `out` numbers, `pitch` numbers apart; x (rows, in) in half precision, as `narrow` writes it; weight (out,
// in), bias (out) float or null. Sums are float. With ADD, y += instead of y =. With an ACTIVATION (GATED), weight and
// bias are [gate | up], 2 · out rows, and y is ACTIVATION(gate, up).
// A block multiplies TILES tiles of 16 rows of weights; with GATED they are in turn one of gate and the matching one of
// up. Of the inputs, its warps take turns at units of UNIT, and their sums are added in shared memory. A warp works
// alone: it copies a unit of each tile, whole blocks of the format, which lie together, to SLOTS in shared memory, and
// its lanes unpack from there the A operands of mma.m16n8k16 (packed_weights.cuh). The tiles share the B operands,
// whose columns after the last row of x repeat rows. With STAYS there are fewer blocks than sets of TILES tiles: block
// b multiplies every gridDim.x-th set, from set b on, and while it multiplies and adds, the units of its next set are
// on their way.
// Grid (ceil(rows of weights / (16 · TILES)), with STAYS fewer), 32 · WARPS threads. With BESIDE it has more blocks and
// arguments: beside.cuh.
// DEFINES: WEIGHT (a packed format), ROWS (most rows: 4, 8, 16), UNIT (a multiple of VALUES), TILES (even if GATED),
// SLOTS (more than TILES), WARPS, STAYS (0 or 1; 0 with BESIDE), SHARED (bytes of dynamic shared memory), ADD (0 or 1),
// ACTIVATION (a function of activation.cuh, or not defined), TO (type of y, see output_tile.cuh), BESIDE.
// JOINS: activation.cuh, output_tile.cuh, beside.cuh.
// Cost: bytes of the weights; at least WARPS · (SLOTS − TILES) units per block are in flight. Each block reads x
// from L2 or L1 for each set: 16 rows of x have about as many bytes as four tiles of 4-bit weights.
// PRECOND: 1 <= rows <= ROWS; in % VALUES == 0; x aligned to 16 bytes; out % 16 == 0 if GATED.

constexpr int COLUMNS_N = ROWS > 8 ? ROWS / 8 : 1;  // tiles of 8 rows of x

// What a block does with a matrix of the format W. U, M, S: its UNIT, TILES and SLOTS.
template <class W, int U, int M, int S>
struct Product {
    static constexpr int TILE = 16 * M, BYTES = U / W::VALUES * W::BLOCK;  // BYTES: of a unit of a tile
    static constexpr int COPIED_BYTES = WARPS * S * BYTES, JOINED_BYTES = WARPS * ROWS * pitch_of(TILE) * 4;
    // In blocks that stay, slots are on their way while sums are added; others have them in the same place.
    static constexpr int JOINED_AT = STAYS ? COPIED_BYTES : 0, SUMMED_BYTES = JOINED_AT + JOINED_BYTES;
    static constexpr int ALL_BYTES = COPIED_BYTES > SUMMED_BYTES ? COPIED_BYTES : SUMMED_BYTES;
    static constexpr bool CONSTANTS_KEPT = M <= 2 || W::HIGH == 0;  // in registers: more planes need more
    static_assert(S > M && !(GATED && M % 2) && U % W::VALUES == 0, "as the head says");

    unsigned char *shared, *places;  // the block's, and this warp's slots
    const unsigned char *weight;
    int warp, lane, units, sets, in, out, first_set;
    int next_unit, next_set;  // whose weights are copied next
    const unsigned char *tiles[M];

    // Begins the copies of the first weights. number: the block's, of those that multiply the matrix.
    __device__ __forceinline__ Product(unsigned char *shared, const unsigned char *weight, int in, int out, int number)
        : shared(shared), weight(weight), warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)), lane(threadIdx.x % 32),
          units((in + U - 1) / U), sets(((GATED ? 2 : 1) * out + TILE - 1) / TILE), in(in), out(out),
          first_set(number), next_unit(warp), next_set(number) {
        places = shared + warp * (S * BYTES);
        point();
#pragma unroll
        for (int i = 0; i < S; ++i) copy(i * BYTES, i % M);
    }

    __device__ __forceinline__ Tile tile_of(int set) const { return {set * (GATED ? TILE / 2 : TILE), out}; }
    __device__ __forceinline__ void point() {
        const Tile tile = tile_of(next_set);
#pragma unroll
        for (int m = 0; m < M; ++m) tiles[m] = W::block_at(weight, tile.row_of(16 * m) / 16, in, 0) + 16 * lane;
    }

    // Commits one group of copies, of the next unit of tile m; after the last unit it is empty.
    __device__ __forceinline__ void copy(int slot, int m) {
        if (next_unit < units && (!STAYS || next_set < sets)) {
            const int left = U == W::VALUES ? U : min(U, in - next_unit * U);
            const int end = left / W::VALUES * W::BLOCK;
            const unsigned char *const from = tiles[m] + next_unit * (long long)BYTES;
#pragma unroll
            for (int at = 0; at < BYTES; at += 512)
                if (at + 16 * lane < end) cp_async<16>(places + slot + 16 * lane + at, from + at);
        }
        cp_async_commit();
        if (m < M - 1) return;
        next_unit += WARPS;
        if (STAYS && next_unit >= units) next_unit = warp, next_set += gridDim.x, point();
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
    __device__ __forceinline__ void run(TO *y, const __half *x, const float *bias, int rows, long long pitch) {
        const __half *inputs[COLUMNS_N];  // the lane's first ones
#pragma unroll
        for (int n = 0; n < COLUMNS_N; ++n)
            inputs[n] = x + min(n * 8 + lane / 4, rows - 1) * (long long)in + lane % 4 * 8;
        int slots[M];  // slots of the unit's tiles
#pragma unroll
        for (int m = 0; m < M; ++m) slots[m] = m * BYTES;
        float *const joined = reinterpret_cast<float *>(shared + JOINED_AT);
        int set = first_set;
        do {
            float sums[M][COLUMNS_N][4] = {};
            for (int unit = warp; unit < units; unit += WARPS) {
                cp_async_wait<S - M>();
                __syncwarp();
#pragma unroll
                for (int k = 0; k < U; k += 32) {
                    if (U != W::VALUES && unit * U + k >= in) break;
                    uint4 x[COLUMNS_N];
#pragma unroll
                    for (int n = 0; n < COLUMNS_N; ++n)
                        x[n] = *reinterpret_cast<const uint4 *>(inputs[n] + unit * U + k);
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
                    copy(slots[m], (m + S) % M);
                    slots[m] += slots[m] >= (S - M) * BYTES ? (M - S) * BYTES : M * BYTES;
                }
            }

            if (!STAYS) cp_async_wait<0>();
            __syncthreads();  // nobody reads the last set's sums, or slots in their place
#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int i = 0; i < 4 * COLUMNS_N; ++i) {
                    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;  // row of x
                    float *const to = joined + (warp * ROWS + row) * pitch_of(TILE) + m * 16;
                    if (row < ROWS) to[i % 4 / 2 * 8 + lane / 4] = sums[m][i / 4][i % 4];
                }
            __syncthreads();
            store_tile<WARPS, TILE>(y, joined, tile_of(set), bias, rows, pitch, threadIdx.x);
        } while (STAYS && (set += gridDim.x) < sets);
    }
};

using Own = Product<WEIGHT, UNIT, TILES, SLOTS>;
#ifdef BESIDE
using Other = Product<BESIDE, BESIDE_UNIT, BESIDE_TILES, BESIDE_SLOTS>;
static_assert(!STAYS, "blocks of both formats would be too few");
static_assert(SHARED == (Own::ALL_BYTES > Other::ALL_BYTES ? Own::ALL_BYTES : Other::ALL_BYTES), "for either");
#else
static_assert(SHARED == Own::ALL_BYTES, "the slots, and then the sums, or both");
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
gemm_packed_kernel(TO *y, const __half *x, const unsigned char *weight, const float *bias, int rows, int in, int out,
                   long long pitch BESIDE_ARGUMENTS) {
    let_next_begin();
    DYNAMIC_SHARED(unsigned char, shared);
#ifdef BESIDE
    if (int(blockIdx.x) >= border) {
        Other product(shared, beside, in, beside_out, blockIdx.x - border);
        wait_for_previous();
        product.run(y + out, x, bias ? bias + out : nullptr, rows, pitch);
        return;
    }
#endif
    Own product(shared, weight, in, out, blockIdx.x);
    wait_for_previous();
    product.run(y, x, bias, rows, pitch);
}

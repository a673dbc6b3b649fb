// The weights of a block of gemm_small on their way through shared memory. The head of gemm_small.cu says what the
// constants mean.

constexpr int WARPS = 8, WARPS_K = WARPS / WARPS_OUT, TILE = 32 * WARPS_OUT, INPUTS = 32 * WARPS_K;
constexpr int STAGES = WEIGHT::PACKED ? 8 : 5;  // as many of packed weights fit where five of 16-bit weights do
constexpr int TILES_N = ROWS / 8, COLUMNS = GATED ? TILE / 2 : TILE;  // COLUMNS: of y, of a block
constexpr int FRAGMENTS = TILES_N * WARPS_K;  // fragments of x in a stage: 8 rows × 32 inputs, 16 bytes per lane
constexpr int OWN = (FRAGMENTS + WARPS - 1) / WARPS, PITCH = pitch_of(TILE);
constexpr int COPIED = 5 * WARPS * 4 * 32;  // pieces of weights: 16 bytes each, for 5 stages of 16-bit weights
constexpr int LOOP_BYTES = 16 * (COPIED + 2 * FRAGMENTS * 32), JOINED_BYTES = WARPS_K * ROWS * PITCH * 4;
static_assert(ROWS % 8 == 0 && ROWS * WARPS_K <= 128 && WARPS % WARPS_OUT == 0, "shared memory is laid out for these");
static_assert(SHARED == (LOOP_BYTES > JOINED_BYTES ? LOOP_BYTES : JOINED_BYTES), "weights and x, and then the sums");

using Product = WEIGHT::Product;

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
    mma_m16n8k16_f16(d, a, b);
}
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
    mma_m16n8k16_bf16(d, a, b);
}

// A warp's weights, 32 rows × 32 inputs of a stage, on their way through shared memory to the A operands of two
// products. A lane reads inputs 8 · (lane % 4) … + 7 of the rows 8 · i + lane / 4.
template <class W, bool PACKED = W::PACKED>
struct Weights;

// In formats whose rows are arrays, a lane copies and reads 16 bytes of each of its four rows, stage by stage.
template <class W>
struct Weights<W, false> {
    const Product *rows[4];
    uint4 *stages;  // this warp's and lane's in [STAGES][WARPS][4][32]
    int input, in;  // the lane's first input of stage 0

    __device__ __forceinline__ Weights(const unsigned char *weight, int first_row, const Tile &tile, int column,
                                       int first_input, int in_, uint4 *shared)
        : stages(shared + threadIdx.x / 32 * 4 * 32 + threadIdx.x % 32), input(first_input + threadIdx.x % 4 * 8),
          in(in_) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first_row + tile.row_of(column + 8 * i + threadIdx.x % 32 / 4);
            rows[i] = reinterpret_cast<const Product *>(weight) + row * (long long)in;
        }
    }
    __device__ __forceinline__ uint4 *piece(int stage, int i) const {
        return stages + (stage % STAGES * WARPS * 4 + i) * 32;
    }
    // Commits one group of copies; from stage `last` on it is empty.
    __device__ __forceinline__ void copy(int stage, int last) const {
        const int k = stage * INPUTS + input;
#pragma unroll
        for (int i = 0; stage < last && i < 4; ++i) {
            if (k < in) cp_async<16>(piece(stage, i), rows[i] + k);
            else *piece(stage, i) = make_uint4(0, 0, 0, 0);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void read(uint4 (&w)[4], int stage) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = *piece(stage, i);
    }
};

// In packed formats, the lanes of a warp copy codes and factors of two tiles of 16 rows as they are, 16 bytes at a
// time, and unpack them when they are multiplied. PRECOND: with GATED, out % 16 == 0.
template <class W>
struct Weights<W, true> {
    static constexpr int PIECES = W::PIECES;
    static_assert(STAGES * WARPS * 2 * PIECES <= COPIED, "shared memory is laid out for 5 stages of 16-bit weights");
    const unsigned char *tiles[2];
    uint4 *stages;  // this warp's in [STAGES][WARPS][2][PIECES]
    int input, in, lane;  // the warp's first input of stage 0

    __device__ __forceinline__ Weights(const unsigned char *weight, int first_row, const Tile &tile, int column,
                                       int first_input, int in_, uint4 *shared)
        : stages(shared + threadIdx.x / 32 * 2 * PIECES), input(first_input), in(in_), lane(threadIdx.x % 32) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
            tiles[m] = W::block_at(weight, (first_row + tile.row_of(column + 16 * m)) / 16, in, 0);
    }
    __device__ __forceinline__ uint4 *pieces(int stage) const { return stages + stage % STAGES * WARPS * 2 * PIECES; }
    // Commits one group of copies; from stage `last` on it is empty.
    __device__ __forceinline__ void copy(int stage, int last) const {
        const int k = stage * INPUTS + input;
        if (stage < last && k < in) {
            const int place = INPUTS % W::VALUES == 0 ? input : k;  // in a block; in stages of whole blocks the same
            const long long block = (long long)(k / W::VALUES) * W::BLOCK;
#pragma unroll
            for (int first = 0; first < 2 * PIECES; first += 32) {
                const int i = first + lane;
                if (i >= 2 * PIECES) break;
                const unsigned char *const tile = i < PIECES ? tiles[0] : tiles[1];
                cp_async<16>(pieces(stage) + i, tile + block + W::piece(place, i < PIECES ? i : i - PIECES));
            }
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void read(uint4 (&w)[4], int stage) const {
        if (stage * INPUTS + input >= in) {
#pragma unroll
            for (int i = 0; i < 4; ++i) w[i] = make_uint4(0, 0, 0, 0);
            return;
        }
        const uint4 *const parts = pieces(stage);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const auto *const part = reinterpret_cast<const unsigned char *>(parts + i / 2 * PIECES);
            const auto factors = W::factors(part, i % 2 * 8 + lane / 4, lane % 4 * 8 / W::GROUP);
            w[i] = W::halves(W::unpack(part + W::codes(W::PART_GROUPS), lane, i % 2), factors);
        }
    }
};

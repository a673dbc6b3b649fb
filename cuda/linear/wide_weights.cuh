// The weights of a warp of gemm_wide on their way through shared memory: 32 rows, two tiles of 16, INPUTS inputs of a
// stage. Part of gemm_wide.cu, whose head says what the constants mean.
//
//   BYTES                       of a tile in a stage
//   HAS_TAIL                    whether the last stage may have inputs beyond `in`
//   copy(tiles, stage)          copies both tiles of a stage to `tiles`; inputs beyond `in` are zeros
//   unpack(tiles, part, m, half, zero)   the A operands of rows 16m + 8 · half … and of 32 inputs, a part of a stage
template <class W, bool PACKED = W::PACKED>
struct Weights;

constexpr int LANES = 32 * WARPS_K;  // that copy the same tiles

// Which rows of weights a warp has, and which of the warps with these it is.
__device__ __forceinline__ int own_rows() { return WARPS_K > 1 ? threadIdx.x / 32 % WARPS_OUT : threadIdx.x / 32; }
__device__ __forceinline__ int k_warp() { return WARPS_K > 1 ? threadIdx.x / 32 / WARPS_OUT : 0; }

// In packed formats a lane copies codes and their factors unchanged. A tile in a stage has whole blocks, or a part of
// one block: its scales and offsets, then the sub-scales of some groups, then their codes. zero: see PackedWeights.
template <class W>
struct Weights<W, true> {
    static constexpr bool WHOLE = W::VALUES <= INPUTS, HAS_TAIL = W::VALUES % INPUTS != 0;
    static constexpr int HEAD = W::codes((WHOLE ? W::VALUES : INPUTS) / W::GROUP);
    static constexpr int BYTES = WHOLE ? INPUTS / W::VALUES * W::BLOCK : HEAD + 2 * W::BITS * INPUTS;
    static constexpr int PIECES = BYTES / 16, COPIES = (2 * PIECES + LANES - 1) / LANES;  // COPIES: of a lane
    static_assert(BYTES % 16 == 0 && (WHOLE ? INPUTS % W::VALUES : W::VALUES % INPUTS) == 0, "copies are 16 bytes");

    const unsigned char *from[COPIES];  // of stage 0
    int step[COPIES];                   // to the next stage of the same block
    int in, first_piece;

    __device__ __forceinline__ Weights(const unsigned char *weight, const Tile &tile, int first_weight, int in)
        : in(in), first_piece(k_warp() * 32 + threadIdx.x % 32) {
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const int i = LANES * c + first_piece, m = i < PIECES ? 0 : 1, at = 16 * (i - m * PIECES);
            const int row = first_weight + tile.row_of(own_rows() * 32 + 16 * m);
            from[c] = W::block_at(weight, row / 16, in, 0) + at;
            step[c] = WHOLE ? BYTES : 2 * W::BITS * INPUTS;
            if (WHOLE) continue;
            if (at < W::NUMBERS) step[c] = 0;
            else if (at < HEAD) step[c] = HEAD - W::NUMBERS;
            else from[c] += W::codes(W::VALUES / W::GROUP) - HEAD;
        }
    }
    __device__ __forceinline__ void copy(unsigned char *tiles, int stage) const {
        const int part = WHOLE ? 0 : stage % (W::VALUES / INPUTS);
        const long long at = (WHOLE ? stage : stage * INPUTS / W::VALUES) * (long long)(WHOLE ? BYTES : W::BLOCK);
        const int left = WHOLE ? (in - stage * INPUTS) / W::VALUES * W::BLOCK : BYTES;
#pragma unroll
        for (int c = 0; c < COPIES; ++c) {
            const int i = LANES * c + first_piece;
            if (LANES * (c + 1) > 2 * PIECES && i >= 2 * PIECES) break;
            if (WHOLE && 16 * (i < PIECES ? i : i - PIECES) >= left) reinterpret_cast<uint4 *>(tiles)[i] = uint4();
            else cp_async<16>(tiles + 16 * i, from[c] + at + part * step[c]);
        }
    }
    static __device__ __forceinline__ uint4 unpack(const unsigned char *tiles, int part, int m, int half,
                                                   unsigned zero) {
        const int lane = threadIdx.x % 32, k = WHOLE ? 32 * part % W::VALUES : 32 * part;
        const unsigned char *const block = tiles + m * BYTES + (WHOLE ? 32 * part / W::VALUES * W::BLOCK : 0);
        const unsigned char *const plane = block + HEAD + 64 * W::BITS * (k / 32);
        const int group = k / W::GROUP + lane % 4 * 8 / W::GROUP;
        return W::halves(W::unpack(plane, lane, half, zero), W::factors(block, half * 8 + lane / 4, group));
    }
};

// In formats whose rows are arrays, a lane copies and reads 16 bytes of each of its four rows for each part.
template <class W>
struct Weights<W, false> {
    static constexpr bool HAS_TAIL = true;
    static constexpr int BYTES = 32 * INPUTS;
    const typename W::Product *rows[4];  // from the lane's first input on
    int left;                   // inputs from there

    __device__ __forceinline__ Weights(const unsigned char *weight, const Tile &tile, int first_weight, int in)
        : left(in - threadIdx.x % 4 * 8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first_weight + tile.row_of(own_rows() * 32 + 8 * i + threadIdx.x % 32 / 4);
            rows[i] = reinterpret_cast<const typename W::Product *>(weight) + row * (long long)in + threadIdx.x % 4 * 8;
        }
    }
    static __device__ __forceinline__ int place(int part, int i) { return (4 * part + i) * 32 + threadIdx.x % 32; }
    __device__ __forceinline__ void copy(unsigned char *tiles, int stage) const {
#pragma unroll
        for (int warp_part = 0; warp_part < INPUTS / 32 / WARPS_K; ++warp_part) {
            const int part = warp_part * WARPS_K + k_warp(), k = stage * INPUTS + 32 * part;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                uint4 *const to = reinterpret_cast<uint4 *>(tiles) + place(part, i);
                if (k < left) cp_async<16>(to, rows[i] + k);
                else *to = uint4();
            }
        }
    }
    static __device__ __forceinline__ uint4 unpack(const unsigned char *tiles, int part, int m, int half, unsigned) {
        return reinterpret_cast<const uint4 *>(tiles)[place(part, 2 * m + half)];
    }
};

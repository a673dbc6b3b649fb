// The op `linear` for up to 64 rows on tensor cores, with the residual sum after it: y = x @ weightᵀ + bias. For packed
// weights, and for groups of experts' rows.
//
// y: rows of `out` numbers, `pitch` numbers apart; x (rows, in) of the format's Product, from `narrow`; weight (out,
// in), bias (out) float or null. Packed weights are rounded to half precision; sums are float. With ADD, y += and
// not y =. With an ACTIVATION (GATED), weight and bias are [gate | up], 2 · out rows, and y is ACTIVATION(gate, up).
// A warp multiplies 32 rows of weights by all rows of x: the weights, read once, are the A operands of mma.m16n8k16, x
// the B operands. The 32 rows are neighbours; with GATED 16 rows of gate and the 16 matching rows of up. The sum over
// `in` may run in any order, so a lane takes 8 neighbouring inputs as its share of two products: 16 bytes of a row of
// weights, copied to shared memory and read back by the same lane, and 16 bytes of x for each group of 8 rows. From
// packed formats the warp copies codes and scales, and a lane makes these 16 bytes when it reads them. WARPS_OUT of the
// 8 warps take different rows of weights, and warps with the same rows different inputs of a stage; their sums are
// added in shared memory.
// Grid (ceil(rows of weights / TILE), parts), 256 threads, TILE = 32 · WARPS_OUT. With parts > 1, blocks of equal
// blockIdx.y take one part of `in` and write their sums to y (parts, rows, rows of weights), TO float;
// gemm_small_sum_kernel adds the parts. With EXPERTS (0 or 1, default 0) the grid has groups of rows in z, and there
// are more arguments: expert_group.cuh.
// DEFINES: WEIGHT (a weight format), ROWS (most rows), WARPS_OUT (2, 4, 8), SHARED (bytes of dynamic shared memory,
// at most 96 KB), ADD (0 or 1), ACTIVATION (a function of activation.cuh, or not defined), TO (type of y, see
// output_tile.cuh).
// JOINS: activation.cuh, output_tile.cuh, weight_stages.cuh, expert_group.cuh.
// Cost: bytes of the weights; STAGES − 1 stages per block are in flight, 64 KB of 16-bit weights. Each block reads its
// inputs of all rows from L2: over all blocks rows / TILE times the bytes of 16-bit weights.
// PRECOND: 1 <= rows <= ROWS; ROWS % 8 == 0; ROWS · WARPS_K <= 128; in % 8 == 0; x, weight aligned to 16 bytes; out %
// 16 == 0 if GATED or EXPERTS and the format is packed.

// A thread's share of x, one stage ahead: loaded while the previous stage is multiplied, then stored as fragments.
struct Inputs {
    uint4 eight[OWN];

    __device__ __forceinline__ void load(const Product *x, int stage, const Rows &rows, int in) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            const int f = warp + WARPS * c, row = f % TILES_N * 8 + lane / 4;
            const int k = stage * INPUTS + f / TILES_N * 32 + lane % 4 * 8;
            eight[c] = make_uint4(0, 0, 0, 0);
            if (f >= FRAGMENTS || row >= rows.count || k >= in) continue;
            eight[c] = *reinterpret_cast<const uint4 *>(x + rows[row] * (long long)in + k);
        }
    }
    __device__ __forceinline__ void store(uint4 *fragments) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            if (warp + WARPS * c >= FRAGMENTS) break;
            fragments[(warp + WARPS * c) * 32 + lane] = eight[c];
        }
    }
};

// Adds the products of one stage: 32 rows of weights × all rows of x × the warp's 32 inputs.
__device__ __forceinline__ void add_stage(float (&sums)[2][TILES_N][4], const Weights<WEIGHT> &weights, int stage,
                                          const uint4 *fragments) {
    uint4 w[4];
    weights.read(w, stage);
#pragma unroll
    for (int n = 0; n < TILES_N; ++n) {
        const uint4 v = fragments[n * 32];
        const unsigned low[2] = {v.x, v.y}, high[2] = {v.z, v.w};
#pragma unroll
        for (int m = 0; m < 2; ++m)
            multiply(sums[m][n], {w[2 * m].x, w[2 * m + 1].x, w[2 * m].y, w[2 * m + 1].y}, low, Product());
#pragma unroll
        for (int m = 0; m < 2; ++m)
            multiply(sums[m][n], {w[2 * m].z, w[2 * m + 1].z, w[2 * m].w, w[2 * m + 1].w}, high, Product());
    }
}

// Stores a warp's sums (32 rows of weights × all rows of x) as one row of PITCH floats for each row of x.
__device__ __forceinline__ void store_sums(float *joined, const float (&sums)[2][TILES_N][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < TILES_N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                joined[(n * 8 + lane % 4 * 2 + i % 2) * PITCH + m * 16 + i / 2 * 8 + lane / 4] = sums[m][n][i];
}

extern "C" __global__ void __launch_bounds__(256, ROWS > 32 ? 1 : 2)
gemm_small_kernel(TO *y, const Product *x, const unsigned char *weight, const float *bias, int rows_of_x, int in,
                  int out, long long pitch GROUP_ARGUMENTS) {
    let_next_begin();
    DYNAMIC_SHARED(uint4, shared);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_k = warp / WARPS_OUT;
    const int column = warp % WARPS_OUT * 32;
    const Tile tile = {int(blockIdx.x) * COLUMNS, out};
    uint4 *const fragments = shared + COPIED;
#if EXPERTS
    const int size = (GATED ? 2 : 1) * out;
    const Rows rows = rows_of_group(y, bias, groups, places_rows, bias_pitch, size, pitch);
    if (!rows.count) return;
#else
    const Rows rows{0, rows_of_x};
#endif

    const Weights<WEIGHT> weights(weight, rows.first_weight, tile, column, warp_k * 32, in, shared);
    Inputs inputs = {};
    const int all = (in + INPUTS - 1) / INPUTS;
    const int first = int(all * (long long)blockIdx.y / gridDim.y), last = int(all * (blockIdx.y + 1ll) / gridDim.y);
    for (int stage = first; stage < first + STAGES - 1; ++stage) weights.copy(stage, last);
    wait_for_previous();
    float sums[2][TILES_N][4] = {};
    inputs.load(x, first, rows, in);
    inputs.store(fragments + first % 2 * FRAGMENTS * 32);
    for (int stage = first; stage < last; ++stage) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        weights.copy(stage + STAGES - 1, last);
        if (stage + 1 < last) inputs.load(x, stage + 1, rows, in);
        add_stage(sums, weights, stage, fragments + (stage % 2 * FRAGMENTS + warp_k * TILES_N) * 32 + lane);
        if (stage + 1 < last) inputs.store(fragments + (stage + 1) % 2 * FRAGMENTS * 32);
    }

    cp_async_wait<0>();
    __syncthreads();
    float *const joined = reinterpret_cast<float *>(shared);
    store_sums(joined + warp_k * ROWS * PITCH + column, sums);
    __syncthreads();
    store_tile<WARPS_K, TILE>(y, joined, tile, bias, rows.count, pitch, threadIdx.x);
}

// Adds parts (count, rows, rows of weights) in their order, then bias, into y, as gemm_small_kernel does with one part.
// Grid (ceil(rows · out / block)), block any.
extern "C" __global__ void __launch_bounds__(1024)
gemm_small_sum_kernel(TO *y, const float *parts, const float *bias, int count, int rows, int out, long long pitch) {
    let_next_begin();
    wait_for_previous();
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= (long long)rows * out) return;
    const int width = GATED ? 2 * out : out;
    const auto product = [&](int column) {
        float total = 0.0f;
        for (int part = 0; part < count; ++part) total += parts[(part * (long long)rows + i / out) * width + column];
        return bias ? total + bias[column] : total;
    };
    float total = product(i % out);
    if (GATED) total = ACTIVATION(total, product(out + i % out));
    TO *const at = y + i / out * pitch + i % out;
    *at = from_float<TO>(within<TO>(ADD ? to_float(*at) + total : total));
}

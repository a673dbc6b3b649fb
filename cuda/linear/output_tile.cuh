// What a block of gemm_small or gemv_packed writes to y: the rows of weights that it multiplied, bias and activation.
// TO: the type of y, float if it is not defined; halves are clipped to ±65504, NaN stays.
#ifndef TO
#define TO float
#endif

// The rows of weights that a block multiplies; c is a row's number among these.
struct Tile {
    int first, out;  // first column of y; columns of y in all

    __device__ __forceinline__ int column_of(int c) const { return first + (GATED ? c / 32 * 16 + c % 16 : c); }
    __device__ __forceinline__ int row_of(int c) const {
        return min(column_of(c), out - 1) + (GATED && c % 32 >= 16 ? out : 0);
    }
};

// Floats between the sums of neighbouring rows of x, in shared memory: 8 of them are in different banks.
constexpr int pitch_of(int tile) { return tile + 4; }

// Adds the sums of COUNT warps, `joined` [COUNT][ROWS][pitch_of(TILE_ROWS)], and writes them to y. thread: the caller's
// number; the first threads write.
template <int COUNT, int TILE_ROWS>
__device__ __forceinline__ void store_tile(TO *y, const float *joined, const Tile &tile, const float *bias,
                                           int rows, long long pitch, int thread) {
    constexpr int COLUMNS_OF_Y = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    const auto sum_of = [&](int row, int c) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < COUNT; ++k) total += joined[(k * ROWS + row) * pitch_of(TILE_ROWS) + c];
        return total;
    };
    if (gridDim.y > 1) {
        const long long width = GATED ? 2ll * tile.out : tile.out;
        for (int i = thread; i < rows * TILE_ROWS; i += blockDim.x) {
            const int row = i / TILE_ROWS, c = i % TILE_ROWS;
            if (tile.column_of(c) < tile.out)
                y[(blockIdx.y * (long long)rows + row) * width + tile.row_of(c)] = from_float<TO>(sum_of(row, c));
        }
        return;
    }
    const auto product = [&](int row, int c) {
        return bias ? sum_of(row, c) + bias[tile.row_of(c)] : sum_of(row, c);
    };
    for (int i = thread; i < rows * COLUMNS_OF_Y; i += blockDim.x) {
        const int row = i / COLUMNS_OF_Y, place = i % COLUMNS_OF_Y, c = GATED ? place / 16 * 32 + place % 16 : place;
        if (tile.column_of(c) >= tile.out) continue;
        float total = product(row, c);
        if (GATED) total = ACTIVATION(total, product(row, c + 16));
        TO *const at = y + row * pitch + tile.column_of(c);
        *at = from_float<TO>(within<TO>(ADD ? to_float(*at) + total : total));
    }
}

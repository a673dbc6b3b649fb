// Products of float32 numbers on tensor cores, for delta_scan. Each number, times a power of two that is common to its
// matrix, is the sum of two halves, high and low: to 2^-23 of itself, or to 2^-39 of the largest number. The product of
// two low parts is left out. The left operand's rows are SLICE columns of a head's matrix, or of updates; the right
// one's columns are tokens or keys, which warps share out in tiles of 8.

constexpr int WARPS = THREADS / 32;
constexpr int COLUMN_TILES = SLICE / 16;
constexpr int TOKEN_TILES = BLOCK / 8, KEY_TILES = KEY_DIM / 8;  // tiles of all warps

__host__ __device__ constexpr int own_tiles(int all) { return (all + WARPS - 1) / WARPS; }  // tiles of a warp, at most
__host__ __device__ constexpr int whole_steps(int terms) { return (terms + 15) / 16 * 16; }  // terms with zeros

// A lane's numbers of a tile of 8 tokens or keys: see each_number.
using Numbers = float[COLUMN_TILES][4];

// The left operand: a row of shared memory is a column of a matrix. [0] has high parts, [1] low ones. Rows are so far
// apart that neighbours are in other banks.
template <int TERMS>
using Left = unsigned short[2][SLICE][whole_steps(TERMS) + 8];

// A power of two, and its inverse.
struct Scale {
    float up, down;

    // With which numbers up to `largest` are below 2^15; at most 2^60, so that products of two scales are numbers.
    __device__ __forceinline__ explicit Scale(float largest) {
        const int exponent = min(268 - static_cast<int>(__float_as_uint(largest) >> 23), 127 + 60);
        up = __uint_as_float(exponent << 23), down = __uint_as_float((254 - exponent) << 23);
    }
};

// Calls with(i, m, e, column, index) for each of the lane's numbers of the warp's tiles (ALL: tiles of all warps): two
// neighbouring tokens or keys of each of two columns that are 8 apart, as m16n8k16 has its sums.
template <int ALL, class With>
__device__ __forceinline__ void each_number(With with) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < own_tiles(ALL); ++i) {
        const int tile = warp + WARPS * i;
        if (ALL % WARPS && tile >= ALL) break;
#pragma unroll
        for (int m = 0; m < COLUMN_TILES; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                with(i, m, e, 16 * m + lane / 4 + e / 2 * 8, 8 * tile + lane % 4 * 2 + e % 2);
    }
}

// The warps' numbers become a left operand, times the scale that is returned: the scale of `least` if all are smaller.
template <int ALL, int ROW>
__device__ __forceinline__ Scale store_left(unsigned short (&left)[2][SLICE][ROW], float (&partial)[WARPS],
                                            const Numbers (&numbers)[own_tiles(ALL)], float least) {
    float largest = 0.0f;
    each_number<ALL>([&](int i, int m, int e, int, int) { largest = fmaxf(largest, fabsf(numbers[i][m][e])); });
    const Scale scale(fmaxf(block_max(largest, partial), least));
    each_number<ALL>([&](int i, int m, int e, int column, int index) {
        if (e % 2) return;
        unsigned parts[2];
        split_halves(parts[0], parts[1], numbers[i][m][e], numbers[i][m][e + 1], scale.up);
#pragma unroll
        for (int part = 0; part < 2; ++part) *reinterpret_cast<unsigned *>(&left[part][column][index]) = parts[part];
    });
    return scale;
}

// Where a chunk of CHUNK terms of the right operand, in shared memory, has a term of a row, which is a token or a key.
// Groups of 8 terms change places, so that those that are read at a time are in other banks.
__device__ __forceinline__ unsigned in_chunk(unsigned row, unsigned term) {
    return row * CHUNK + (term ^ (CHUNK == 32 ? row % 4 : row / 2 % 2) * 8);
}

// Starts to copy a chunk of `from` (ROWS, TERMS), from term `start` on, to rows from `first` on, a multiple of 8. A
// thread copies the same terms of every PASS-th row. Products take 16 terms: those that do not exist become 0, since
// what the chunk before had there may be infinite as a half, whose product with the left operand's 0 is NaN.
template <int ROWS, int TERMS>
__device__ __forceinline__ void copy_chunk(float *chunk, int first, const float *from, int start) {
    constexpr int PASS = 4 * THREADS / CHUNK;
    const unsigned row = threadIdx.x / (CHUNK / 4), term = threadIdx.x % (CHUNK / 4) * 4;
    if (TERMS % CHUNK && start + term >= whole_steps(TERMS)) return;
    const bool is_zero = TERMS % 16 && start + term >= TERMS;
    chunk += first * CHUNK + in_chunk(row, term);
    from += row * TERMS + start + term;
#pragma unroll
    for (int passed = 0; passed < ROWS; passed += PASS) {
        if (ROWS % PASS && passed + row >= ROWS) break;
        if (is_zero)
            *reinterpret_cast<float4 *>(chunk + passed * CHUNK) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        else
            cp_async<16>(chunk + passed * CHUNK, from + passed * TERMS);
    }
}

// What all tiles of a warp multiply in a step of 16 terms: high and low parts of the left operand's rows.
struct LeftTiles {
    unsigned parts[2][COLUMN_TILES][4];

    template <int ROW>
    __device__ __forceinline__ LeftTiles(const unsigned short (&left)[2][SLICE][ROW], int start) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
            for (int m = 0; m < COLUMN_TILES; ++m)
                ldmatrix_x4(parts[part][m], &left[part][16 * m + lane % 16][start + lane / 16 * 8]);
    }

    // sums += the products with 16 terms, times `scale`, of the warp's tiles (ALL: tiles of all warps), from row
    // `first` of the chunk.
    template <int ALL>
    __device__ __forceinline__ void multiply(Numbers (&sums)[own_tiles(ALL)], const float *chunk, int first, int term,
                                             float scale) const {
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        unsigned right[own_tiles(ALL)][2][2] = {};
#pragma unroll
        for (int i = 0; i < own_tiles(ALL); ++i) {
            if (ALL % WARPS && warp + WARPS * i >= ALL) break;
            const float *const rows = chunk + (first + 8 * WARPS * i) * CHUNK;  // a multiple of 8
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const unsigned place = in_chunk(8 * warp + lane / 4, term + 8 * half + lane % 4 * 2);
                const float2 pair = *reinterpret_cast<const float2 *>(rows + place);
                split_halves(right[i][0][half], right[i][1][half], pair.x, pair.y, scale);
            }
        }
#pragma unroll
        for (int product = 0; product < 3; ++product)  // high · high, high · low, low · high
#pragma unroll
            for (int i = 0; i < own_tiles(ALL); ++i) {
                if (ALL % WARPS && warp + WARPS * i >= ALL) break;
#pragma unroll
                for (int m = 0; m < COLUMN_TILES; ++m)
                    mma_m16n8k16_f16(sums[i][m], parts[product / 2][m], right[i][product % 2]);
            }
    }
};

// The ops `gated_delta` and `mamba2` for a prompt, second part: the blocks of a prompt in their order, after
// delta_blocks or mamba2_blocks.
//
// With the matrix M of a head before a block, its updates are u = news − reads M, its results exp(g) M q and the sum of
// u by `weights`, and the matrix after a complete block is exp(g_N) M + Σ_i u_iᵀ of `decayed_keys` keys. With READS 0
// the updates are `news`, there are no `reads`, and results are added to what y has.
//
// y (rows, H, D): results, before their norm. The slot: matrices (H, A, D), kept_keys (Q, A, N), kept_updates (H, N,
// D), kept_decays (H, N); it gets the tokens of the block after the last complete one. end_matrices (n, H, A, D):
// the matrices after block b are row kept[b], if that is not −1. largest (blocks, Q, 2), where READS is 0: largest
// magnitudes of queries and keys; else queries have at most the length A^-½, and keys and reads 1. delta_blocks
// explains the other arrays.
// A block of threads has SLICE columns of a head's matrix, whose results depend on no other columns. The matrix stays
// in registers in float32; its parts, and the updates' parts, are left operands of products on tensor cores. The right
// operands, reads and queries, then weights and faded keys, are copied to shared memory CHUNK terms at a time: while
// one chunk is multiplied, the next one is copied.
// Grid (ceil(D / SLICE), H), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, SLICE (16, 32 or 64), CHUNK (16
// or 32), READS, THREADS, SHARED.
// JOINS: delta.cuh.
// PRECOND: KEY_DIM % 8 == BLOCK % 8 == 0.
// Cost: for a block of a head (2 + READS) NAD + N²D FMA of float32, three times as many on tensor cores, and N((2 +
// READS) A + N) numbers read for each slice.

// Products of float32 numbers on tensor cores. Each number, times a power of two that is common to its
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

constexpr int QUERIES = READS ? BLOCK : 0;  // row of the first query in a chunk, after the reads
constexpr int READING_ROWS = QUERIES + BLOCK, ADDING_ROWS = BLOCK + KEY_DIM;
constexpr int ROWS = READING_ROWS > ADDING_ROWS ? READING_ROWS : ADDING_ROWS;
constexpr bool HAS_ZEROS = KEY_DIM % 16 || BLOCK % 16;  // left operands, after the terms of a product

// Shared memory. chunks: this one and the next, of reads and queries, or of weights and faded keys.
struct ScanMemory {
    float chunks[2][ROWS * CHUNK];
    Left<KEY_DIM> matrix;
    Left<BLOCK> updates;
    float partial[WARPS];
};
static_assert(sizeof(ScanMemory) == SHARED, "SHARED is what a block takes");

// The right operands of a head.
struct Operands {
    const float *reads, *queries, *weights, *decayed_keys;
    int heads, key_heads, head, key_head;

    // Starts to copy a chunk of reads and queries.
    __device__ __forceinline__ void copy_reading(float *chunk, int block, int start) const {
        const long long block_head = block * static_cast<long long>(heads) + head;
        const long long block_key = block * static_cast<long long>(key_heads) + key_head;
        if (READS) copy_chunk<BLOCK, KEY_DIM>(chunk, 0, reads + block_head * BLOCK * KEY_DIM, start);
        copy_chunk<BLOCK, KEY_DIM>(chunk, QUERIES, queries + block_key * BLOCK * KEY_DIM, start);
        cp_async_commit();
    }

    // Starts to copy a chunk of weights, and of faded keys if the block is complete.
    __device__ __forceinline__ void copy_adding(float *chunk, int block, int start, bool is_complete) const {
        const long long block_head = block * static_cast<long long>(heads) + head;
        copy_chunk<BLOCK, BLOCK>(chunk, 0, weights + block_head * BLOCK * BLOCK, start);
        if (is_complete) copy_chunk<KEY_DIM, BLOCK>(chunk, BLOCK, decayed_keys + block_head * KEY_DIM * BLOCK, start);
        cp_async_commit();
    }
};

// Waits for the copies of memory.chunks[now], by which all threads have finished the one before it; then `now` is where
// the next one is copied to.
__device__ __forceinline__ const float *next_chunk(const ScanMemory &memory, int &now) {
    cp_async_wait<0>();
    __syncthreads();
    const float *const chunk = memory.chunks[now];
    now ^= 1;
    return chunk;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
delta_scan_kernel(float *y, float *matrices, float *kept_keys, float *kept_updates, float *kept_decays,
                  float *end_matrices, const float *queries, const float *decayed_keys, const float *reads,
                  const float *news, const float *weights, const float *logs, const float *largest, const int *end_rows,
                  int key_heads, int tiled, int rows, int place) {
    DYNAMIC_SHARED(ScanMemory, shared);
    ScanMemory &memory = *shared;
    const DeltaHeads heads = {key_heads, static_cast<int>(gridDim.y), tiled};
    const int thread = threadIdx.x, head = blockIdx.y, key_head = heads.key_of(head);
    const int first_column = blockIdx.x * SLICE, columns = VALUE_DIM - first_column;  // in the head; how many there are
    const int blocks = (place + rows + BLOCK - 1) / BLOCK;
    const Operands operands = {reads, queries, weights, decayed_keys, heads.values, key_heads, head, key_head};
    const long long pitch = static_cast<long long>(heads.values) * VALUE_DIM;  // from row to row of y
    matrices += head * KEY_DIM * VALUE_DIM + first_column;
    y += head * VALUE_DIM + first_column;
    if (HAS_ZEROS) {
        constexpr int LEFT = (sizeof(memory.matrix) + sizeof(memory.updates)) / 4;
        for (int i = thread; i < LEFT; i += THREADS) reinterpret_cast<unsigned *>(&memory.matrix)[i] = 0;
        __syncthreads();
    }

    int now = 0;  // which of memory.chunks
    operands.copy_reading(memory.chunks[0], 0, 0);
    Numbers matrix[own_tiles(KEY_TILES)];
    each_number<KEY_TILES>([&](int i, int m, int e, int column, int key) {
        matrix[i][m][e] = column < columns ? matrices[key * VALUE_DIM + column] : 0.0f;
    });
    Scale matrix_scale = store_left<KEY_TILES>(memory.matrix, memory.partial, matrix, 0.0f);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const int low = block == 0 ? place : 0, high = min(BLOCK, place + rows - block * BLOCK);
        const bool is_complete = high == BLOCK;
        const int target = end_rows[block];
        const long long block_head = block * static_cast<long long>(heads.values) + head;
        const float *const log = logs + block_head * BLOCK;
        const float *const own_news = news + block_head * BLOCK * VALUE_DIM + first_column;
        float *const result = y + (block * BLOCK - place) * pitch;

        const long long block_key = 2 * (block * static_cast<long long>(key_heads) + key_head);
        const float query = READS ? rsqrtf(static_cast<float>(KEY_DIM)) : largest[block_key];
        const float key = READS ? 1.0f : largest[block_key + 1];
        const Scale query_scale(query), key_scale(key), weight_scale(READS ? query : KEY_DIM * query * key);

        // known: what reads read of the matrix; without reads, what y has. updates: news at first. since: exp(g).
        constexpr int tiles = own_tiles(TOKEN_TILES);
        Numbers results[tiles] = {}, updates[tiles], key_reads[tiles] = {};
        float since[tiles][2];
        const float whole = expf(log[BLOCK - 1]);
        each_number<TOKEN_TILES>([&](int i, int m, int e, int column, int token) {
            const bool is_there = column < columns;
            if (m == 0 && e < 2) since[i][e] = expf(log[token]);
            updates[i][m][e] = is_there ? own_news[token * VALUE_DIM + column] : 0.0f;
            if (!READS && is_there && token >= low && token < high) key_reads[i][m][e] = result[token * pitch + column];
        });
        const auto read = [&](const float *chunk, int start) {
#pragma unroll
            for (int term = 0; term < CHUNK; term += 16) {
                if (KEY_DIM % CHUNK && start + term >= KEY_DIM) break;
                const LeftTiles left(memory.matrix, start + term);
                if (READS) left.multiply<TOKEN_TILES>(key_reads, chunk, 0, term, key_scale.up);
                left.multiply<TOKEN_TILES>(results, chunk, QUERIES, term, query_scale.up);
            }
        };
#pragma unroll 1
        for (int start = CHUNK; start < KEY_DIM; start += CHUNK) {
            const float *const chunk = next_chunk(memory, now);
            operands.copy_reading(memory.chunks[now], block, start);
            read(chunk, start - CHUNK);
        }
        const float *chunk = next_chunk(memory, now);
        operands.copy_adding(memory.chunks[now], block, 0, is_complete);
        read(chunk, (KEY_DIM - 1) / CHUNK * CHUNK);
        each_number<TOKEN_TILES>([&](int i, int m, int e, int column, int token) {
            if (READS) updates[i][m][e] -= key_reads[i][m][e] * (matrix_scale.down * key_scale.down);
            if (!is_complete && column < columns && token >= low && token < high)
                kept_updates[(head * BLOCK + token) * VALUE_DIM + first_column + column] = updates[i][m][e];
        });
        // Updates below 2^-40 of the matrix are nothing to it; with a larger scale its numbers might be too large.
        const Scale update_scale =
            store_left<TOKEN_TILES>(memory.updates, memory.partial, updates, matrix_scale.down * 0x1p-25f);
        const float up = update_scale.up * weight_scale.up, down = update_scale.down * weight_scale.down;
        each_number<TOKEN_TILES>([&](int i, int m, int e, int, int) {
            results[i][m][e] *= matrix_scale.down * query_scale.down * since[i][e % 2];
            if (!READS) results[i][m][e] += key_reads[i][m][e];
            results[i][m][e] *= up;
        });
        if (is_complete)
            each_number<KEY_TILES>([&](int i, int m, int e, int, int) {
                matrix[i][m][e] *= whole * update_scale.up * key_scale.up;
            });
        const auto add = [&](const float *chunk, int start) {
#pragma unroll
            for (int term = 0; term < CHUNK; term += 16) {
                if (BLOCK % CHUNK && start + term >= BLOCK) break;
                const LeftTiles left(memory.updates, start + term);
                left.multiply<TOKEN_TILES>(results, chunk, 0, term, weight_scale.up);
                if (is_complete) left.multiply<KEY_TILES>(matrix, chunk, BLOCK, term, key_scale.up);
            }
        };
#pragma unroll 1
        for (int start = CHUNK; start < BLOCK; start += CHUNK) {
            chunk = next_chunk(memory, now);
            operands.copy_adding(memory.chunks[now], block, start, is_complete);
            add(chunk, start - CHUNK);
        }
        chunk = next_chunk(memory, now);
        if (block + 1 < blocks) operands.copy_reading(memory.chunks[now], block + 1, 0);
        add(chunk, (BLOCK - 1) / CHUNK * CHUNK);
        each_number<TOKEN_TILES>([&](int i, int m, int e, int column, int token) {
            const bool is_new = column < columns && token >= low && token < high;
            if (is_new) result[token * pitch + column] = down * results[i][m][e];
        });
        if (!is_complete) break;
        each_number<KEY_TILES>([&](int i, int m, int e, int, int) {
            matrix[i][m][e] *= update_scale.down * key_scale.down;
        });
        matrix_scale = store_left<KEY_TILES>(memory.matrix, memory.partial, matrix, 0.0f);
        if (target < 0) continue;
        const long long end_head = target * static_cast<long long>(heads.values) + head;
        float *const end = end_matrices + end_head * KEY_DIM * VALUE_DIM + first_column;
        each_number<KEY_TILES>([&](int i, int m, int e, int column, int key) {
            if (column < columns) end[key * VALUE_DIM + column] = matrix[i][m][e];
        });
    }
    const int complete = (place + rows) / BLOCK;
    if (complete < blocks && blockIdx.x == 0) {  // what has become known of the last block
        const int low = complete == 0 ? place : 0, high = place + rows - complete * BLOCK;
        const long long block_head = complete * static_cast<long long>(heads.values) + head;
        for (int i = low + thread; i < high; i += THREADS) kept_decays[head * BLOCK + i] = logs[block_head * BLOCK + i];
        if (heads.is_first(head))
            for (int i = thread; i < BLOCK * KEY_DIM; i += THREADS)
                if (i % BLOCK >= low && i % BLOCK < high)
                    kept_keys[key_head * KEY_DIM * BLOCK + i] = decayed_keys[block_head * KEY_DIM * BLOCK + i];
    }
    if (complete == 0) return;
    each_number<KEY_TILES>([&](int i, int m, int e, int column, int key) {
        if (column < columns) matrices[key * VALUE_DIM + column] = matrix[i][m][e];
    });
}

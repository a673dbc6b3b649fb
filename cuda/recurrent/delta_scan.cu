// The op `gated_delta` for a prompt, second part: the blocks of a prompt in their order, after delta_blocks.
//
// With the matrix M of a head before a block, its updates are u = news − reads M, its results exp(g) M q and the sum of
// u by `weights`, and the matrix after a complete block is exp(g_N) M + Σ_i u_iᵀ of `faded` keys.
//
// y (rows, H, D): results, before their norm. The slot: matrices (H, A, D), kept_keys (Q, A, N), kept_updates (H, N,
// D), kept_decays (H, N); it gets what is known of the block after the last complete one. end_matrices (n, H, A, D):
// those after block b are row kept[b], if that is not −1. The other arrays are those of delta_blocks.
//
// A block of threads has SLICE columns of a head's matrix, whose results depend on no other columns. A thread has 4
// columns of some rows of each product; the matrix stays in registers and, for the others, in shared memory. Each of
// the two products of a block of tokens, reads and queries by the matrix, weights and faded keys by the updates, is
// computed in two stages, each of which has half of the terms: while one is computed, the next one is copied.
// Grid (ceil(D / SLICE), H), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, SLICE, THREADS, SHARED.
// JOINS: delta.cuh.
// PRECOND: SLICE % 4 == 0, KEY_DIM % 8 == BLOCK % 8 == 0, THREADS >= APART · SLICE / 4.
// Cost: for a block of a head 3NAD + N²D FMA, and N(3A + N) numbers read for each slice.

constexpr int TOKENS = SLICE < 32 || BLOCK < 64 ? 2 : 4;  // of a thread: four, if registers for its rows are enough
constexpr int APART = BLOCK / TOKENS;  // distance of its rows
constexpr int KEY_ROWS = (KEY_DIM + APART - 1) / APART;  // of the matrix, of a thread
constexpr int READ = KEY_DIM / 2, ADDED = BLOCK / 2;  // terms of a stage
constexpr int READ_ROW = READ + 4, ADDED_ROW = ADDED + 4;  // distances of rows, so that neighbours are in other banks
constexpr int READING = 2 * BLOCK * READ_ROW, ADDING = (BLOCK + KEY_DIM) * ADDED_ROW;

// Shared memory. left: of this stage and the next, reads and queries, or weights and faded keys.
struct ScanMemory {
    float left[2][READING > ADDING ? READING : ADDING];
    float matrix[KEY_DIM][SLICE], updates[BLOCK][SLICE];
};
static_assert(sizeof(ScanMemory) == SHARED, "SHARED is what a block takes");

// Starts to copy NUMBERS numbers of each of ROWS rows, which are `pitch` apart, to rows that are NUMBERS + 4 apart.
template <int ROWS, int NUMBERS>
__device__ __forceinline__ void copy_rows(float *to, const float *from, int pitch) {
    for (int i = 4 * threadIdx.x; i < ROWS * NUMBERS; i += 4 * THREADS)
        cp_async<16>(to + i / NUMBERS * (NUMBERS + 4) + i % NUMBERS, from + i / NUMBERS * pitch + i % NUMBERS);
}

// What the stages of a head copy.
struct Operands {
    const float *reads, *queries, *weights, *faded;
    int heads, key_heads, head, key_head;

    // Starts to copy the left operand of a stage: 0 and 1 of the first product, 2 and 3 of the second.
    template <int STAGE>
    __device__ __forceinline__ void copy(ScanMemory &memory, int block) const {
        constexpr int half = STAGE % 2;
        float *const to = memory.left[half];
        const long long of_head = block * static_cast<long long>(heads) + head;
        if (STAGE < 2) {
            const long long of_key = block * static_cast<long long>(key_heads) + key_head;
            copy_rows<BLOCK, READ>(to, reads + of_head * BLOCK * KEY_DIM + half * READ, KEY_DIM);
            copy_rows<BLOCK, READ>(to + BLOCK * READ_ROW, queries + of_key * BLOCK * KEY_DIM + half * READ, KEY_DIM);
        } else {
            copy_rows<BLOCK, ADDED>(to, weights + of_head * BLOCK * BLOCK + half * ADDED, BLOCK);
            copy_rows<KEY_DIM, ADDED>(to + BLOCK * ADDED_ROW, faded + of_head * KEY_DIM * BLOCK + half * ADDED, BLOCK);
        }
        cp_async_commit();
    }
};

// Waits for the copies of a stage, by which all threads have finished the one before it.
__device__ __forceinline__ void begin_stage() {
    cp_async_wait<0>();
    __syncthreads();
}

// sums += left · right, of rows first, first + APART, … of `left`, of which there are `most`, and 4 columns of `right`.
template <int TERMS, int ROWS>
__device__ __forceinline__ void add_products(float (&sums)[ROWS][4], const float *left, int first, int most,
                                             const float *right) {
#pragma unroll 2
    for (int k = 0; k < TERMS; k += 4) {
        float of_right[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) load_floats(of_right[i], right + (k + i) * SLICE);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float of_left[4];
            load_floats(of_left, left + min(first + APART * r, most - 1) * (TERMS + 4) + k);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[r][e] += of_left[i] * of_right[i][e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
delta_scan_kernel(float *y, float *matrices, float *kept_keys, float *kept_updates, float *kept_decays,
                  float *end_matrices, const float *queries, const float *faded, const float *reads, const float *news,
                  const float *weights, const float *logs, const int *kept, int key_heads, int tiled, int rows,
                  int place) {
    DYNAMIC_SHARED(ScanMemory, shared);
    ScanMemory &memory = *shared;
    const DeltaHeads heads = {key_heads, static_cast<int>(gridDim.y), tiled};
    const int thread = threadIdx.x, head = blockIdx.y, key_head = heads.key_of(head);
    const int own = thread % (SLICE / 4) * 4, first = thread / (SLICE / 4), column = blockIdx.x * SLICE + own;
    const bool is_active = first < APART && column < VALUE_DIM;
    const int blocks = (place + rows + BLOCK - 1) / BLOCK;
    const Operands operands = {reads, queries, weights, faded, heads.values, key_heads, head, key_head};
    const float *const matrix_terms = memory.matrix[0] + own, *const update_terms = memory.updates[0] + own;
    matrices += head * KEY_DIM * VALUE_DIM + column;
    y += head * VALUE_DIM + column;

    operands.copy<0>(memory, 0);
    float matrix[KEY_ROWS][4] = {};
    if (is_active) {
#pragma unroll
        for (int i = 0; i < KEY_ROWS; ++i) {
            const int row = first + APART * i;
            if (row >= KEY_DIM) break;
            load_floats(matrix[i], matrices + row * VALUE_DIM);
            store_floats(memory.matrix[row] + own, matrix[i]);
        }
    }
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
        const int low = block == 0 ? place : 0, high = min(BLOCK, place + rows - block * BLOCK);
        const long long of_head = block * static_cast<long long>(heads.values) + head;
        const float *const log = logs + of_head * BLOCK;
        float sums[2 * TOKENS][4] = {}, updates[TOKENS][4];  // rows of reads M, and of the results; rows of u
        begin_stage();
        operands.copy<1>(memory, block);
        if (is_active) add_products<READ>(sums, memory.left[0], first, 2 * BLOCK, matrix_terms);
        begin_stage();
        operands.copy<2>(memory, block);
        if (is_active) {
            add_products<READ>(sums, memory.left[1], first, 2 * BLOCK, matrix_terms + READ * SLICE);
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                const int token = first + APART * i;
                load_floats(updates[i], news + (of_head * BLOCK + token) * VALUE_DIM + column);
#pragma unroll
                for (int e = 0; e < 4; ++e) updates[i][e] -= sums[i][e];
                store_floats(memory.updates[token] + own, updates[i]);
            }
        }
        float added[TOKENS + KEY_ROWS][4];  // rows of the results, and those of the matrix
        const float whole = expf(log[BLOCK - 1]);
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const float since = expf(log[min(first + APART * i, BLOCK - 1)]);
#pragma unroll
            for (int e = 0; e < 4; ++e) added[i][e] = since * sums[TOKENS + i][e];
        }
#pragma unroll
        for (int i = 0; i < KEY_ROWS; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) added[TOKENS + i][e] = whole * matrix[i][e];
        begin_stage();
        operands.copy<3>(memory, block);
        if (is_active) add_products<ADDED>(added, memory.left[0], first, BLOCK + KEY_DIM, update_terms);
        begin_stage();
        if (block + 1 < blocks) operands.copy<0>(memory, block + 1);
        if (!is_active) continue;
        add_products<ADDED>(added, memory.left[1], first, BLOCK + KEY_DIM, update_terms + ADDED * SLICE);
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int token = first + APART * i;
            if (token < low || token >= high) continue;
            const long long row = block * BLOCK + token - place;
            store_floats(y + row * heads.values * VALUE_DIM, added[i]);
            if (high < BLOCK) store_floats(kept_updates + (head * BLOCK + token) * VALUE_DIM + column, updates[i]);
        }
        if (high < BLOCK) break;
        const int target = kept[block];
#pragma unroll
        for (int i = 0; i < KEY_ROWS; ++i) {
            const int row = first + APART * i;
            if (row >= KEY_DIM) break;
#pragma unroll
            for (int e = 0; e < 4; ++e) matrix[i][e] = added[TOKENS + i][e];
            store_floats(memory.matrix[row] + own, matrix[i]);
            if (target >= 0)
                store_floats(end_matrices + ((target * static_cast<long long>(heads.values) + head) * KEY_DIM + row)
                             * VALUE_DIM + column, matrix[i]);
        }
    }
    const int complete = (place + rows) / BLOCK;
    if (complete < blocks && blockIdx.x == 0) {  // what has become known of the last block
        const int low = complete == 0 ? place : 0, high = place + rows - complete * BLOCK;
        const long long of_head = complete * static_cast<long long>(heads.values) + head;
        for (int i = low + thread; i < high; i += THREADS) kept_decays[head * BLOCK + i] = logs[of_head * BLOCK + i];
        if (heads.is_first(head))
            for (int i = thread; i < BLOCK * KEY_DIM; i += THREADS)
                if (i % BLOCK >= low && i % BLOCK < high)
                    kept_keys[key_head * KEY_DIM * BLOCK + i] = faded[of_head * KEY_DIM * BLOCK + i];
    }
    if (!is_active || complete == 0) return;
#pragma unroll
    for (int i = 0; i < KEY_ROWS; ++i) {
        const int row = first + APART * i;
        if (row < KEY_DIM) store_floats(matrices + row * VALUE_DIM, matrix[i]);
    }
}

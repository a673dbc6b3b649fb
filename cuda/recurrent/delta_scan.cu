// The op `gated_delta` for a prompt, second part: the blocks of a prompt in their order, after delta_blocks.
//
// With the matrix M of a head before a block, its updates are u = news − reads M, its results exp(g) M q and the sum of
// u by `weights`, and the matrix after a complete block is exp(g_N) M + Σ_i exp(g_N − g_i) k_i u_iᵀ.
//
// y (rows, H, D): results, before their norm. The slot: matrices (H, A, D), kept_keys (Q, A, N), kept_updates (H, N, D),
// kept_decays (H, N); it gets what is known of the block after the last complete one. end_matrices (n, H, A, D): those
// after block b are row kept[b], if that is not −1. The other arrays are those of delta_blocks.
//
// A block of threads has SLICE columns of a head's matrix, whose results depend on no other columns. A thread has 4
// columns of some rows of each product; the matrix stays in registers and, for the others, in shared memory.
// Grid (ceil(D / SLICE), H), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, SLICE, THREADS, SHARED.
// JOINS: delta.cuh.
// PRECOND: SLICE % 4 == 0, THREADS >= N / 2 · SLICE / 4.
// Cost: for a block of a head 3NAD + N²D FMA, and N(3A + N) numbers read for each slice.

constexpr int APART = BLOCK / 2;  // distance of a thread's rows
constexpr int KEY_ROWS = (KEY_DIM + APART - 1) / APART;  // of the matrix, of a thread
constexpr int WIDE_ROW = KEY_DIM + 4, ROW = BLOCK + 4;  // distances of rows, so that neighbours are in other banks

// Shared memory. reading: reads, then queries times exp(g); adding: weights, then keys times exp(g_N − g).
union Left {
    float reading[2 * BLOCK][WIDE_ROW];
    float adding[BLOCK + KEY_DIM][ROW];
};
struct ScanMemory {
    Left left;
    float matrix[KEY_DIM][SLICE], updates[BLOCK][SLICE];
};
static_assert(sizeof(ScanMemory) == SHARED, "SHARED is what a block takes");

// sums += left · right, of rows first, first + APART, … of `left`, of which there are `most`, and 4 columns of `right`.
template <int ROWS, int DEPTH, int PITCH>
__device__ __forceinline__ void add_products(float (&sums)[ROWS][4], const float *left, int first, int most,
                                             const float *right) {
#pragma unroll 2
    for (int k = 0; k < DEPTH; k += 4) {
        float of_right[4][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) load_floats(of_right[i], right + (k + i) * SLICE);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            float of_left[4];
            load_floats(of_left, left + min(first + APART * r, most - 1) * PITCH + k);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[r][e] += of_left[i] * of_right[i][e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
delta_scan_kernel(float *y, float *matrices, float *kept_keys, float *kept_updates, float *kept_decays,
                  float *end_matrices, const float *queries, const float *keys, const float *reads, const float *news,
                  const float *weights, const float *logs, const int *kept, int key_heads, int tiled, int rows,
                  int place) {
    DYNAMIC_SHARED(ScanMemory, shared);
    ScanMemory &memory = *shared;
    const DeltaHeads heads = {key_heads, static_cast<int>(gridDim.y), tiled};
    const int thread = threadIdx.x, head = blockIdx.y, key_head = heads.key_of(head);
    const int own = thread % (SLICE / 4) * 4, first = thread / (SLICE / 4), column = blockIdx.x * SLICE + own;
    const bool is_active = first < APART && column < VALUE_DIM;
    const int blocks = (place + rows + BLOCK - 1) / BLOCK;
    matrices += head * KEY_DIM * VALUE_DIM + column;
    y += head * VALUE_DIM + column;

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
        const long long of_key = block * static_cast<long long>(key_heads) + key_head;
        const float *const log = logs + of_head * BLOCK;
        for (int i = 4 * thread; i < 2 * BLOCK * KEY_DIM; i += 4 * THREADS) {
            const int row = i / KEY_DIM, channel = i % KEY_DIM;
            const bool is_query = row >= BLOCK;
            float x[4];
            load_floats(x, is_query ? queries + of_key * BLOCK * KEY_DIM + i - BLOCK * KEY_DIM
                                    : reads + of_head * BLOCK * KEY_DIM + i);
            const float factor = is_query ? expf(log[row - BLOCK]) : 1.0f;
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] *= factor;
            store_floats(memory.left.reading[row] + channel, x);
        }
        __syncthreads();
        float sums[4][4] = {};  // two rows of reads M, and of the results
        if (is_active) {
            add_products<4, KEY_DIM, WIDE_ROW>(sums, memory.left.reading[0], first, 2 * BLOCK, memory.matrix[0] + own);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float update[4];
                load_floats(update, news + (of_head * BLOCK + first + APART * i) * VALUE_DIM + column);
#pragma unroll
                for (int e = 0; e < 4; ++e) update[e] -= sums[i][e];
                store_floats(memory.updates[first + APART * i] + own, update);
            }
        }
        __syncthreads();
        const float last = log[BLOCK - 1];
        for (int i = 4 * thread; i < BLOCK * (BLOCK + KEY_DIM); i += 4 * THREADS) {
            const int row = i / BLOCK, token = i % BLOCK;
            float x[4];
            if (row < BLOCK) {
                load_floats(x, weights + of_head * BLOCK * BLOCK + i);
            } else {
                load_floats(x, keys + of_key * KEY_DIM * BLOCK + i - BLOCK * BLOCK);
#pragma unroll
                for (int e = 0; e < 4; ++e) x[e] *= expf(last - log[token + e]);
            }
            store_floats(memory.left.adding[row] + token, x);
        }
        __syncthreads();
        if (is_active) {
            float added[2 + KEY_ROWS][4];  // two rows of the results, and those of the matrix
            const float whole = expf(last);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                added[0][e] = sums[2][e], added[1][e] = sums[3][e];
#pragma unroll
                for (int i = 0; i < KEY_ROWS; ++i) added[2 + i][e] = whole * matrix[i][e];
            }
            add_products<2 + KEY_ROWS, BLOCK, ROW>(added, memory.left.adding[0], first, BLOCK + KEY_DIM,
                                                   memory.updates[0] + own);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = first + APART * i;
                if (token < low || token >= high) continue;
                const long long row = block * BLOCK + token - place;
                store_floats(y + row * heads.values * VALUE_DIM, added[i]);
            }
            if (high == BLOCK) {
                const int target = kept[block];
#pragma unroll
                for (int i = 0; i < KEY_ROWS; ++i) {
                    const int row = first + APART * i;
                    if (row >= KEY_DIM) break;
#pragma unroll
                    for (int e = 0; e < 4; ++e) matrix[i][e] = added[2 + i][e];
                    store_floats(memory.matrix[row] + own, matrix[i]);
                    if (target >= 0)
                        store_floats(end_matrices + ((target * static_cast<long long>(heads.values) + head) * KEY_DIM + row)
                                     * VALUE_DIM + column, matrix[i]);
                }
            }
        }
        __syncthreads();
        if (high < BLOCK) {
            if (is_active) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = first + APART * i;
                    if (token < low || token >= high) continue;
                    float update[4];
                    load_floats(update, memory.updates[token] + own);
                    store_floats(kept_updates + (head * BLOCK + token) * VALUE_DIM + column, update);
                }
            }
            if (blockIdx.x > 0) continue;
            for (int i = low + thread; i < high; i += THREADS) kept_decays[head * BLOCK + i] = log[i];
            if (!heads.is_first(head)) continue;
            for (int i = thread; i < BLOCK * KEY_DIM; i += THREADS)
                if (i % BLOCK >= low && i % BLOCK < high)
                    kept_keys[key_head * KEY_DIM * BLOCK + i] = keys[of_key * KEY_DIM * BLOCK + i];
        }
    }
    if (!is_active || place + rows < BLOCK) return;
#pragma unroll
    for (int i = 0; i < KEY_ROWS; ++i) {
        const int row = first + APART * i;
        if (row < KEY_DIM) store_floats(matrices + row * VALUE_DIM, matrix[i]);
    }
}

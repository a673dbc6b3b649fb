// The op `gated_delta` for a prompt, first part: what does not depend on the matrices, of all blocks at once.
//
// With the matrix M of a head before a block, the updates u of its tokens i solve u_i + Σ_j<i L_ij u_j = b_i (v_i −
// exp(g_i) Mᵀk_i), where L_ij = b_i exp(g_i − g_j) k_i·k_j (Yang et al., "Gated Delta Networks", 2024, §3.3). The
// inverse of 1 + L is applied to both terms of the right side, so that u = news − reads M. Tokens that the slot has had
// before keep their updates.
//
// queries (blocks, Q, N, A), keys (blocks, Q, A, N); for value heads: decayed_keys (blocks, H, A, N): keys times
// exp(g_N − g_i), but keys alone of a block that is not complete; reads (blocks, H, N, A), news (blocks, H, N, D),
// weights (blocks, H, N, N): of updates in results, exp(g_i − g_j) q_i·k_j; logs (blocks, H, N): g. Missing tokens have
// 0 for all but g. projected: `rows` rows of the prompt, `pitch` numbers apart; the first row's place in its block is
// `place`. The slot: kept_keys (Q, A, N), kept_updates (H, N, D), kept_decays (H, N), kept_inputs (WIDTH − 1 + N, C).
// conv (WIDTH, C), decay, dt_bias (H,).
// Grid (blocks, Q), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, THREADS, SHARED.
// JOINS: delta.cuh, delta_pairs.cuh.
// PRECOND: THREADS >= (N / 4)².
// Cost: 2N²A FMA for a key head, and N²(A + D) / 2 for a value head.

constexpr int SOLVED = BLOCK % 8 ? 4 : 8;  // tokens that are solved together
constexpr int WARPS = THREADS / 32;

// Shared memory: queries and keys of the block, and then, in their place, the columns that are solved. factors: Lᵀ,
// negative.
union Rows {
    Pairs<KEY_DIM> pairs;
    float columns[BLOCK][THREADS];
};
struct BlockMemory {
    Rows rows;
    float factors[BLOCK][BLOCK];
    float logs[BLOCK], betas[BLOCK], since[BLOCK];  // since: b_i exp(g_i)
};
static_assert(sizeof(BlockMemory) == SHARED, "SHARED is what a block takes");

// x_i − Σ_j<i L_ij x_j of a thread's own column, in place and to `out`, whose tokens are `pitch` numbers apart.
__device__ __forceinline__ void solve(BlockMemory &memory, float *out, int pitch) {
#pragma unroll 1
    for (int first = 0; first < BLOCK; first += SOLVED) {
        float sums[SOLVED];
#pragma unroll
        for (int i = 0; i < SOLVED; ++i) sums[i] = memory.rows.columns[first + i][threadIdx.x];
        for (int other = 0; other < first; ++other) {
            float factors[SOLVED];
            load_floats(factors, memory.factors[other] + first);
            const float x = memory.rows.columns[other][threadIdx.x];
#pragma unroll
            for (int i = 0; i < SOLVED; ++i) sums[i] += factors[i] * x;
        }
#pragma unroll
        for (int other = 0; other < SOLVED; ++other) {
            float factors[SOLVED];
            load_floats(factors, memory.factors[first + other] + first);
#pragma unroll
            for (int i = other + 1; i < SOLVED; ++i) sums[i] += factors[i] * sums[other];
        }
#pragma unroll
        for (int i = 0; i < SOLVED; ++i) {
            memory.rows.columns[first + i][threadIdx.x] = sums[i];
            out[(first + i) * pitch] = sums[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
delta_blocks_kernel(float *queries, float *keys, float *decayed_keys, float *reads, float *news, float *weights,
                    float *logs, const float *projected, const float *kept_keys, const float *kept_updates,
                    const float *kept_decays, const float *kept_inputs, const float *conv, const float *decay,
                    const float *dt_bias, long long pitch, int key_heads, int value_heads, int tiled, int rows,
                    int place) {
    DYNAMIC_SHARED(BlockMemory, shared);
    BlockMemory &memory = *shared;
    const DeltaHeads heads = {key_heads, value_heads, tiled};
    const int thread = threadIdx.x, warp = thread / 32, block = blockIdx.x, key_head = blockIdx.y;
    const int begin = block * BLOCK;  // the block's first token, counted from the first block's first
    const int low = block == 0 ? place : 0, high = min(BLOCK, place + rows - begin);  // new tokens of the block
    const ConvInputs conv_inputs = {kept_inputs, projected, pitch, heads.channels(), place};
    const long long block_key = block * static_cast<long long>(key_heads) + key_head;
    queries += block_key * BLOCK * KEY_DIM, keys += block_key * BLOCK * KEY_DIM;
    kept_keys += key_head * KEY_DIM * BLOCK;

    load_pairs<KEY_DIM>(memory.rows.pairs, heads, key_head, conv_inputs, conv, kept_keys, begin, low, high);
    __syncthreads();
    for (int i = warp; i < 2 * (high - low); i += WARPS) {
        const int block_key = i % 2;
        set_length(memory.rows.pairs[block_key][low + i / 2], block_key ? 1.0f : rsqrtf(static_cast<float>(KEY_DIM)));
    }
    __syncthreads();

    float products[2][4][4] = {};  // products of queries, and of keys, with keys
    const int own = thread / TILE, other = thread % TILE;
    if (own < TILE) multiply_tokens<2>(products, memory.rows.pairs, own, other);
    for (int i = thread; i < BLOCK * KEY_DIM; i += THREADS) {
        queries[i] = memory.rows.pairs[0][i / KEY_DIM][i % KEY_DIM];
        keys[i] = memory.rows.pairs[1][i % BLOCK][i / BLOCK];
    }

    const float *const gates = projected + (begin + low - place) * pitch;
#pragma unroll 1
    for (int member = 0; member < value_heads / key_heads; ++member) {
        const int head = heads.member(key_head, member);
        const long long block_head = block * static_cast<long long>(value_heads) + head;
        const float *const updates = kept_updates + head * BLOCK * VALUE_DIM;
        __syncthreads();  // all have solved their columns
        if (warp == 0) {
            const float own_decay = decay[head], own_bias = dt_bias[head];
            add_decays(
                kept_decays + head * BLOCK, low, high,
                [&](int token) {
                    return own_decay * softplus(gates[(token - low) * pitch + heads.decay(head)] + own_bias);
                },
                [&](int token, float log) {
                    const bool is_new = token >= low && token < high;
                    const float beta = is_new ? sigmoid(gates[(token - low) * pitch + heads.beta(head)]) : 0.0f;
                    memory.logs[token] = log, memory.betas[token] = beta, memory.since[token] = beta * expf(log);
                });
        }
        __syncthreads();
        for (int i = thread; i < BLOCK; i += THREADS) logs[block_head * BLOCK + i] = memory.logs[i];
        for (int i = thread; i < BLOCK * KEY_DIM; i += THREADS) {
            const float fading = high == BLOCK ? expf(memory.logs[BLOCK - 1] - memory.logs[i % BLOCK]) : 1.0f;
            decayed_keys[block_head * KEY_DIM * BLOCK + i] = fading * keys[i];
        }
        if (own < TILE) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int i = own + TILE * r;
                float *const row = weights + (block_head * BLOCK + i) * BLOCK;
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    const int j = other + TILE * s;
                    const float pair_decay = j <= i ? expf(memory.logs[i] - memory.logs[j]) : 0.0f;
                    row[j] = i >= low && i < high ? pair_decay * products[0][r][s] : 0.0f;
                    memory.factors[j][i] = j < i ? -memory.betas[i] * pair_decay * products[1][r][s] : 0.0f;
                }
            }
        }
        __syncthreads();
        for (int i = thread; i < KEY_DIM + VALUE_DIM; i += THREADS) {
            const bool is_value = i >= KEY_DIM;
            const int column = is_value ? i - KEY_DIM : i;
            float *const x = &memory.rows.columns[0][thread];
            if (is_value) {
                for (int token = 0; token < low; ++token) x[token * THREADS] = updates[token * VALUE_DIM + column];
                conv_inputs.convolve(conv, heads.value(head) + column, begin + low, begin + high,
                                     [&](int token, float value) {
                    x[(token - begin) * THREADS] = memory.betas[token - begin] * value;
                });
                for (int token = high; token < BLOCK; ++token) x[token * THREADS] = 0.0f;
                solve(memory, news + block_head * BLOCK * VALUE_DIM + column, VALUE_DIM);
            } else {
                for (int token = 0; token < BLOCK; ++token)
                    x[token * THREADS] = memory.since[token] * keys[column * BLOCK + token];
                solve(memory, reads + block_head * BLOCK * KEY_DIM + column, KEY_DIM);
            }
        }
    }
}

// The op `mamba2` for a prompt, first part: what does not depend on the matrices, of all blocks at once; delta_scan
// follows (Dao and Gu, "Transformers are SSMs", 2024, §6).
//
// y (rows, H, D): `skip` times the values. queries, faded, news, weights, logs: as delta_blocks writes them, where
// `news` are the updates, values times their steps Δ. largest (blocks, Q, 2): of the magnitudes of queries and of keys.
// The other arguments are as for it too; bias (C,) or null; skip (H,).
// Grid (blocks, Q, ceil(H / Q / MEMBERS)), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, CHANNELS (of
// queries and keys that are in shared memory at a time), MEMBERS (heads of a block of threads), THREADS, SHARED.
// JOINS: delta.cuh, delta_pairs.cuh.
// PRECOND: THREADS >= (N / 4)², CHANNELS % 4 == 0.
// Cost: N²A FMA for MEMBERS heads.

constexpr int RANGES = THREADS / VALUE_DIM > 0 ? THREADS / VALUE_DIM : 1;  // ranges of tokens that threads convolve

struct BlockMemory {
    Pairs<CHANNELS> pairs;
    float logs[MEMBERS][BLOCK], steps[MEMBERS][BLOCK], fading[MEMBERS][BLOCK];
    float partial[2][THREADS / 32];
};
static_assert(sizeof(BlockMemory) == SHARED, "SHARED is what a block takes");

extern "C" __global__ void __launch_bounds__(THREADS, 1)
mamba2_blocks_kernel(float *y, float *queries, float *largest, float *decayed_keys, float *news, float *weights,
                     float *logs, const float *projected, const float *kept_keys, const float *kept_updates,
                     const float *kept_decays, const float *kept_inputs, const float *conv, const float *bias,
                     const float *decay, const float *dt_bias, const float *skip, long long pitch, int key_heads,
                     int value_heads, int rows, int place) {
    DYNAMIC_SHARED(BlockMemory, shared);
    BlockMemory &memory = *shared;
    const Mamba2Heads heads = {{key_heads, value_heads, 0}};
    const int thread = threadIdx.x, warp = thread / 32, block = blockIdx.x, key_head = blockIdx.y;
    const int begin = block * BLOCK;  // the block's first token, counted from the first block's first
    const int low = block == 0 ? place : 0, high = min(BLOCK, place + rows - begin);  // new tokens of the block
    const ConvInputs conv_inputs = {kept_inputs, projected + heads.first_channel(), pitch, heads.channels(), place,
                                    bias};
    const int first_member = blockIdx.z * MEMBERS;
    const int members = min(MEMBERS, value_heads / key_heads - first_member);
    kept_keys += key_head * KEY_DIM * BLOCK;

    const float *const steps = projected + (begin + low - place) * pitch;
    for (int i = warp; i < members; i += THREADS / 32) {
        const int head = heads.member(key_head, first_member + i);
        const float own_decay = decay[head], own_bias = dt_bias[head];
        const auto step = [&](int token) {
            return softplus(steps[(token - low) * pitch + heads.decay(head)] + own_bias);
        };
        add_decays(
            kept_decays + head * BLOCK, low, high, [&](int token) { return own_decay * step(token); },
            [&](int token, float log) {
                memory.logs[i][token] = log;
                memory.steps[i][token] = token >= low && token < high ? step(token) : 0.0f;
            });
    }
    const long long block_key = block * static_cast<long long>(key_heads) + key_head;
    queries += block_key * BLOCK * KEY_DIM;
    float products[1][4][4] = {}, magnitudes[2] = {};
    const int own = thread / TILE, other = thread % TILE;
#pragma unroll 1
    for (int first = 0; first < KEY_DIM; first += CHANNELS) {
        if (first > 0) __syncthreads();  // all have read the channels before
        load_pairs<CHANNELS>(memory.pairs, heads, key_head, conv_inputs, conv, kept_keys, begin, low, high, first);
        __syncthreads();
        const int channels = KEY_DIM % CHANNELS ? min(CHANNELS, KEY_DIM - first) : CHANNELS;
        if (own < TILE) multiply_tokens<1>(products, memory.pairs, own, other);
        if (blockIdx.z == 0)
            for (int i = thread; i < BLOCK * channels; i += THREADS) {
                const int token = i / channels, channel = i % channels;
                const float query = memory.pairs[0][token][channel];
                queries[token * KEY_DIM + first + channel] = query;
                magnitudes[0] = fmaxf(magnitudes[0], fabsf(query));
                magnitudes[1] = fmaxf(magnitudes[1], fabsf(memory.pairs[1][token][channel]));
            }
        if (first == 0) {
            for (int i = thread; i < members * BLOCK; i += THREADS) {
                const int member = i / BLOCK, token = i % BLOCK;
                const float *const own_logs = memory.logs[member];
                memory.fading[member][token] = high == BLOCK ? expf(own_logs[BLOCK - 1] - own_logs[token]) : 1.0f;
            }
            __syncthreads();
        }
#pragma unroll 1
        for (int i = 0; i < members; ++i) {
            const int head = heads.member(key_head, first_member + i);
            const long long block_head = block * static_cast<long long>(value_heads) + head;
            float *const own_faded = decayed_keys + (block_head * KEY_DIM + first) * BLOCK;
            for (int at = thread; at < BLOCK * channels; at += THREADS)
                own_faded[at] = memory.fading[i][at % BLOCK] * memory.pairs[1][at % BLOCK][at / BLOCK];
        }
    }
    if (blockIdx.z == 0) {
        const float query = block_max(magnitudes[0], memory.partial[0]);
        const float key = block_max(magnitudes[1], memory.partial[1]);
        if (thread == 0) largest[2 * block_key] = query, largest[2 * block_key + 1] = key;
    }

#pragma unroll 1
    for (int i = 0; i < members; ++i) {
        const int head = heads.member(key_head, first_member + i);
        const long long block_head = block * static_cast<long long>(value_heads) + head;
        const float *const own_logs = memory.logs[i], *const own_steps = memory.steps[i];
        for (int token = thread; token < BLOCK; token += THREADS) logs[block_head * BLOCK + token] = own_logs[token];
        if (own < TILE) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int of = own + TILE * r;
                float *const row = weights + (block_head * BLOCK + of) * BLOCK;
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    const int j = other + TILE * s;
                    const bool is_read = j <= of && of >= low && of < high;
                    row[j] = is_read ? expf(own_logs[of] - own_logs[j]) * products[0][r][s] : 0.0f;
                }
            }
        }
        float *const updates = news + block_head * BLOCK * VALUE_DIM;
        const float *const block_updates = kept_updates + head * BLOCK * VALUE_DIM, own_skip = skip[head];
        for (int at = thread; at < low * VALUE_DIM; at += THREADS) updates[at] = block_updates[at];
        for (int at = high * VALUE_DIM + thread; at < BLOCK * VALUE_DIM; at += THREADS) updates[at] = 0.0f;
        const int length = (high - low + RANGES - 1) / RANGES;
        for (int at = thread; at < RANGES * VALUE_DIM; at += THREADS) {
            const int column = at % VALUE_DIM, start = low + at / VALUE_DIM * length;
            const auto write = [&](int token, float x) {
                updates[(token - begin) * VALUE_DIM + column] = own_steps[token - begin] * x;
                y[((token - place) * static_cast<long long>(value_heads) + head) * VALUE_DIM + column] = own_skip * x;
            };
            conv_inputs.convolve(conv, heads.value(head) + column, begin + min(start, high),
                                 begin + min(start + length, high), write);
        }
    }
}

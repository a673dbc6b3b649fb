// The op `channel_delta`, of steps and of prompts: rows are added to slots, and their results are computed.
//
// y (T, H, D). slots: keys (S, H, A, N), updates (S, H, N, D), decays (S, H, A, N), inputs (S, WIDTH − 1 + N, C) get
// the new rows; matrices (S, H, A, D). projected: rows [q | k | v | b], `pitch` numbers apart; conv (WIDTH, C); logits
// of decays (T, H, A), gates (T, H, D), rows `logit_pitch` and `gate_pitch` numbers apart; decay (H,), dt_bias (H, A),
// norm (D,). spans int32 (spans, 4): slot, first row, rows, place of the first in its block.
// With ADVANCES, of a prompt: at the end of each block the slot becomes that at the start of the next one. The state
// after block b, counted from the first row's, goes to row kept[b] of end_matrices (n, H, A, D) and end_inputs
// (n, WIDTH − 1, C), if that is not −1.
//
// A block of threads has a head of a span, all of whose state is its own. Threads hold the head's matrix as it is
// before a row: M, the block's earlier tokens added. A row decays it, and adds a key times an update. What keys and
// queries read is a sum over rows of the matrix, which groups of threads add up. A step makes the matrix anew for each
// row, which so has the same result whichever rows are computed with it; a prompt convolves MOST_ROWS at a time.
//
// With MOST_ROWS 1, span i has row i or none: then y is 0 there.
// Grid (H, spans), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, MOST_ROWS (1 or 16), ADVANCES, THREADS,
// SHARED.
// JOINS: delta.cuh, delta_matrix.cuh, delta_step.cuh.
// PRECOND: without ADVANCES the rows of a span lie in one block; WIDTH − 1 <= BLOCK.
// Cost: a head reads its matrix once, and keys, decays and updates of the block's tokens so far; a row takes 4 · A · D
// multiply-adds and two barriers, one row after the other.

constexpr int WARPS = THREADS / 32, TILE = 16;  // rows, or earlier tokens, at a time

// Shared memory. A row's value becomes its update. factors: exp of the change of g by a row; of an earlier token, what
// is left of its key. scores: of a row's query with its key.
struct ChannelMemory {
    float sums[2][GROUPS][VALUE_DIM];
    StepRows rows;
    float factors[TILE][KEY_DIM], results[MOST_ROWS][VALUE_DIM], betas[MOST_ROWS], scores[MOST_ROWS];
};
static_assert(sizeof(ChannelMemory) == SHARED, "SHARED is what a block takes");

struct ChannelHeads : DeltaHeads {
    __device__ __forceinline__ int beta(int head) const { return channels() + head; }
};

// A thread's rows and 4 columns of a head's matrix; rows that there are not stay 0.
struct HeldMatrix {
    float rows[OWN][4];
    int group, column;

    __device__ __forceinline__ int row(int i) const { return i * GROUPS + group; }
    __device__ __forceinline__ bool has(int i) const { return group < GROUPS && row(i) < KEY_DIM; }
    __device__ __forceinline__ void load(const float *matrix) {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (has(i)) load_floats(rows[i], matrix + row(i) * VALUE_DIM + column);
    }
    __device__ __forceinline__ void store(float *matrix) const {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (has(i)) store_floats(matrix + row(i) * VALUE_DIM + column, rows[i]);
    }
    // Adds key · updateᵀ: key (KEY_DIM,), update (4,) of the thread's columns.
    __device__ __forceinline__ void add(const float *key, const float (&update)[4]) {
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (has(i)) {
#pragma unroll
                for (int e = 0; e < 4; ++e) rows[i][e] += key[row(i)] * update[e];
            }
    }
};

// The matrix as it is after the block's first `place` tokens.
__device__ __forceinline__ void add_earlier(ChannelMemory &memory, HeldMatrix &held, const float *keys,
                                            const float *updates, const float *decays, int place) {
    if (place == 0) return;
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (held.has(i)) {
            const float since = expf(decays[held.row(i) * BLOCK + place - 1]);
#pragma unroll
            for (int e = 0; e < 4; ++e) held.rows[i][e] *= since;
        }
    for (int first = 0; first < place; first += TILE) {
        const int count = min(TILE, place - first);
        __syncthreads();
        for (int i = threadIdx.x; i < KEY_DIM * count; i += THREADS) {
            const int channel = i / count, token = first + i % count;
            const float *const own = decays + channel * BLOCK;
            memory.factors[i % count][channel] = expf(own[place - 1] - own[token]) * keys[channel * BLOCK + token];
        }
        __syncthreads();
        if (held.group < GROUPS)
            for (int t = 0; t < count; ++t) {
                float update[4];
                load_floats(update, updates + (first + t) * VALUE_DIM + held.column);
                held.add(memory.factors[t], update);
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
channel_delta_kernel(float *y, float *keys, float *updates, float *decays, float *inputs, float *matrices,
                     float *end_matrices, float *end_inputs, const int *kept, const float *projected,
                     const float *logits, const float *gates, const float *conv, const float *decay,
                     const float *dt_bias, const float *norm, const int *spans, long long pitch,
                     long long logit_pitch, long long gate_pitch, float eps) {
    let_next_begin();
    wait_for_previous();
    DYNAMIC_SHARED(ChannelMemory, shared);
    ChannelMemory &memory = *shared;
    const ChannelHeads heads = {{static_cast<int>(gridDim.x), static_cast<int>(gridDim.x), 0}};
    const int head = blockIdx.x, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int *const span = spans + 4 * blockIdx.y;
    const long long slot = span[0], slot_head = slot * heads.values + head, channels = heads.channels();
    const long long row_size = static_cast<long long>(heads.values) * VALUE_DIM;
    const int rows = span[2];
    long long first = span[1];
    int place = span[3], block = 0;
    if (rows == 0) {
        if (MOST_ROWS == 1)
            for (int i = thread; i < VALUE_DIM; i += THREADS) y[blockIdx.y * row_size + head * VALUE_DIM + i] = 0.0f;
        return;
    }
    keys += slot_head * KEY_DIM * BLOCK;
    updates += slot_head * BLOCK * VALUE_DIM;
    decays += slot_head * KEY_DIM * BLOCK;
    inputs += slot * (WIDTH - 1 + BLOCK) * channels;
    matrices += slot_head * KEY_DIM * VALUE_DIM;
    logits += head * KEY_DIM, gates += head * VALUE_DIM, dt_bias += head * KEY_DIM;

    HeldMatrix held = {{}, thread / COLUMNS, thread % COLUMNS * 4};
    held.load(matrices);
    add_earlier(memory, held, keys, updates, decays, place);

    for (const long long end = first + rows; first < end;) {
        const int most = ADVANCES ? min(MOST_ROWS, BLOCK - place) : 1, count = min(most, static_cast<int>(end - first));
        __syncthreads();
        // Queries, keys and values of the tile's rows, and their gates.
        const ConvInputs conv_inputs = {inputs, projected + first * pitch, pitch, static_cast<int>(channels), place};
        convolve_rows(memory.rows, inputs, heads, head, conv_inputs, conv, count);
        for (int channel = thread; channel < KEY_DIM; channel += THREADS) {
            float log = place > 0 ? decays[channel * BLOCK + place - 1] : 0.0f;
            for (int r = 0; r < count; ++r) {
                const float own = logits[(first + r) * logit_pitch + channel] + dt_bias[channel];
                const float change = decay[head] * softplus(own);
                decays[channel * BLOCK + place + r] = log += change;
                memory.factors[r][channel] = expf(change);
            }
        }
        if (thread < count) memory.betas[thread] = sigmoid(projected[(first + thread) * pitch + heads.beta(head)]);
        __syncthreads();
        for (int i = warp; i < 2 * count; i += WARPS)
            set_length(memory.rows.pairs[i / 2][i % 2], i % 2 ? rsqrtf(static_cast<float>(KEY_DIM)) : 1.0f);
        __syncthreads();
        for (int r = warp; r < count; r += WARPS) {
            float score = 0.0f;
            for (int channel = lane; channel < KEY_DIM; channel += 32) {
                const float key = memory.rows.pairs[r][0][channel];
                keys[channel * BLOCK + place + r] = key;
                score += key * memory.rows.pairs[r][1][channel];
            }
            score = warp_sum(score);
            if (lane == 0) memory.scores[r] = score;
        }
        for (int r = 0; r < count; ++r) {
            const float *const key = memory.rows.pairs[r][0], *const query = memory.rows.pairs[r][1];
            if (held.group < GROUPS) {
                float sums[2][4] = {};  // what the key reads, and the query
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (held.has(i)) {
                        const int row = held.row(i);
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            const float x = held.rows[i][e] *= memory.factors[r][row];
                            sums[0][e] += key[row] * x, sums[1][e] += query[row] * x;
                        }
                    }
                for (int which = 0; which < 2; ++which)
                    store_floats(memory.sums[which][held.group] + held.column, sums[which]);
            }
            __syncthreads();
            for (int i = thread; i < VALUE_DIM; i += THREADS) {
                float read = 0.0f, result = 0.0f;
#pragma unroll 4
                for (int group = 0; group < GROUPS; ++group)
                    read += memory.sums[0][group][i], result += memory.sums[1][group][i];
                const float update = memory.betas[r] * (memory.rows.values[r][i] - read);
                memory.rows.values[r][i] = updates[(place + r) * VALUE_DIM + i] = update;
                memory.results[r][i] = result + memory.scores[r] * update;
            }
            __syncthreads();
            if (held.group < GROUPS) {
                float update[4];
                load_floats(update, memory.rows.values[r] + held.column);
                held.add(key, update);
            }
        }
        for (int r = warp; r < count; r += WARPS)
            write_gated(y + (first + r) * row_size + head * VALUE_DIM, memory.results[r],
                        gates + (first + r) * gate_pitch, norm, eps, [](float x) { return sigmoid(x); });
        first += count, place += count;
        if (!ADVANCES && first < end) {
            __syncthreads();
            held.load(matrices);
            add_earlier(memory, held, keys, updates, decays, place);
        }
        if (!ADVANCES || place < BLOCK) continue;

        const int row = kept[block++];
        held.store(matrices);
        if (row >= 0) held.store(end_matrices + (row * row_size + head * VALUE_DIM) * KEY_DIM);
        __syncthreads();
        for (int i = thread; i < 2 * KEY_DIM + VALUE_DIM; i += THREADS) {
            const int channel = i < KEY_DIM       ? heads.query(head) + i
                                : i < 2 * KEY_DIM ? heads.key(head) + i - KEY_DIM
                                                  : heads.value(head) + i - 2 * KEY_DIM;
            shift_inputs(inputs, static_cast<int>(channels), channel);
            for (int back = 0; row >= 0 && back < WIDTH - 1; ++back)
                end_inputs[(row * (WIDTH - 1LL) + back) * channels + channel] = inputs[back * channels + channel];
        }
        place = 0;
    }
}

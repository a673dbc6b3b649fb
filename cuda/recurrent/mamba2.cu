// The op `mamba2` in a step: rows are added to the current blocks of slots, and what their queries read, with `skip`
// times their own values, is computed.
//
// y (T, H, D): results, before they are gated. The slots, projected rows [z | x | B | C | dt], conv, decay, dt_bias and
// spans are as for `gated_delta`; bias (C,) or null; skip (H,).
//
// A block of threads has a head of a span, and does as one of `gated_delta` does; but the update of a row is its value
// times its step Δ.
//
// With MOST_ROWS 1, span i has row i or none: then y is 0 there.
// Grid (H, spans), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, MOST_ROWS (1 or 16), THREADS, SHARED.
// JOINS: delta.cuh, delta_matrix.cuh, delta_step.cuh.
// PRECOND: the rows of a span lie in one block.
// Cost: a head reads its matrix once, and keys and updates of the block's tokens so far.

constexpr int MATRIX_SUMS = GROUPS * VALUE_DIM, KEY_SUMS = KEY_GROUPS * BLOCK;

// Shared memory. A row's value becomes its update. weights: of the block's updates in the row's result.
struct StepMemory {
    float sums[MATRIX_SUMS > KEY_SUMS ? MATRIX_SUMS : KEY_SUMS];
    StepRows rows;
    float skipped[MOST_ROWS][VALUE_DIM];
    float weights[BLOCK], decays[BLOCK], steps[MOST_ROWS];
};
static_assert(sizeof(StepMemory) == SHARED, "SHARED is what a block takes");

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 128 ? 1024 / THREADS : 1)
mamba2_kernel(float *y, float *keys, float *updates, float *decays, float *inputs, const float *matrices,
              const float *projected, const float *conv, const float *bias, const float *decay, const float *dt_bias,
              const float *skip, const int *spans, long long pitch, int key_heads) {
    let_next_begin();
    wait_for_previous();
    DYNAMIC_SHARED(StepMemory, shared);
    StepMemory &memory = *shared;
    const Mamba2Heads heads = {{key_heads, static_cast<int>(gridDim.x), 0}};
    const int head = blockIdx.x, key_head = heads.key_of(head), channels = heads.channels();
    const int thread = threadIdx.x, lane = thread % 32;
    const int *const span = spans + 4 * blockIdx.y;
    const long long slot = span[0], slot_head = slot * heads.values + head;
    const int first = span[1], rows = span[2], place = span[3];
    const long long pitch_of_y = static_cast<long long>(heads.values) * VALUE_DIM;
    y += (rows == 0 ? blockIdx.y : first) * pitch_of_y + head * VALUE_DIM;
    if (rows == 0) {
        if (MOST_ROWS == 1)
            for (int i = thread; i < VALUE_DIM; i += THREADS) y[i] = 0.0f;
        return;
    }
    const int column = thread % COLUMNS * 4, group = thread / COLUMNS;
    const float *const matrix = matrices + slot_head * KEY_DIM * VALUE_DIM;

    projected += first * pitch;
    keys += (slot * key_heads + key_head) * KEY_DIM * BLOCK;
    updates += slot_head * BLOCK * VALUE_DIM;
    decays += slot_head * BLOCK;
    inputs += slot * (WIDTH - 1 + BLOCK) * channels;
    prefetch_state(matrix, keys, updates, place);

    const ConvInputs conv_inputs = {inputs, projected + heads.first_channel(), pitch, channels, place, bias};
    convolve_rows(memory.rows, inputs, heads, head, conv_inputs, conv, rows);
    for (int i = thread; i < place; i += THREADS) memory.decays[i] = decays[i];
    if (thread < 32) {
        const float step = softplus(projected[min(lane, rows - 1) * pitch + heads.step(head)] + dt_bias[head]);
        if (lane < rows) memory.steps[lane] = step;
        add_row_decays(memory.decays, decays, decay[head] * step, place, rows);
    }
    float held[HELD][4];
    if (group < GROUPS) load_rows(held, matrix, group, 0, column);
    __syncthreads();
    const float own_skip = skip[head];
    for (int i = thread; i < rows * VALUE_DIM; i += THREADS) {
        const int r = i / VALUE_DIM;
        float &value = memory.rows.values[r][i % VALUE_DIM];
        memory.skipped[r][i % VALUE_DIM] = own_skip * value;
        value = updates[place * VALUE_DIM + i] = memory.steps[r] * value;
    }
    if (heads.is_first(head))
        for (int i = thread; i < rows * KEY_DIM; i += THREADS)
            keys[i % KEY_DIM * BLOCK + place + i / KEY_DIM] = memory.rows.pairs[i / KEY_DIM][0][i % KEY_DIM];

    for (int r = 0; r < rows; ++r) {
        const int token = place + r;
        multiply_keys<1>(memory.sums, memory.rows, keys, r, place);
        __syncthreads();
        for (int i = thread; i <= token; i += THREADS) {
            float weight = 0.0f;
#pragma unroll 4
            for (int other = 0; other < KEY_GROUPS; ++other) weight += memory.sums[other * BLOCK + i];
            memory.weights[i] = weight * expf(memory.decays[token] - memory.decays[i]);
        }
        __syncthreads();
        if (group < GROUPS) {
            float sums[1][4] = {};
            multiply_matrix(sums, held, memory.rows, matrix, r, group, column);
            const float since = expf(memory.decays[token]);
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[0][e] *= since;
            add_updates(sums, memory.weights, memory.rows, updates, token + 1, place, group, column);
            store_floats(memory.sums + group * VALUE_DIM + column, sums[0]);
        }
        __syncthreads();
        for (int i = thread; i < VALUE_DIM; i += THREADS) {
            float result = memory.skipped[r][i];
#pragma unroll 4
            for (int other = 0; other < GROUPS; ++other) result += memory.sums[other * VALUE_DIM + i];
            y[r * pitch_of_y + i] = result;
        }
        __syncthreads();
    }
}

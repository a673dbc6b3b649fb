// The ops `gated_delta` (READS 1) and `mamba2` (READS 0) in a step: rows are added to the current blocks of slots, and
// their results are computed.
//
// y (T, H, D); of Mamba 2 before norms and gates, with `skip` times a row's own values. slots: keys (S, Q, A, N),
// updates (S, H, N, D), decays (S, H, N), inputs (S, WIDTH − 1 + N, C) get the new rows; matrices (S, H, A, D).
// projected: rows [q | k | v | z | b | a], or [z | x | B | C | dt], `pitch` numbers apart; conv (WIDTH, C), bias (C,)
// or null, decay, dt_bias (H,), norm (D,) if READS, else skip (H,). spans int32 (spans, 4): slot, first row, rows,
// place of the first in its block.
//
// A block of threads has a value head of a span. It loads the matrix, which is most of its bytes, and what it needs of
// the block so far into the L2 cache, and convolves while that is on its way. Then threads hold the matrix in
// registers, and take row by row: the update u and the result y of a row are sums over rows of the matrix and over
// earlier updates, which groups of threads add up; but an update of Mamba 2 is a value times its step Δ. So a row's
// sums have the same order whichever rows are computed with it. What value heads with one key have in common is
// computed by each of them, and written by the first.
//
// With MOST_ROWS 1, span i has row i or none: then y is 0 there.
// Grid (H, spans), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, READS (whether updates depend on what keys
// read), MOST_ROWS (1 or 16), THREADS, SHARED.
// JOINS: delta.cuh, delta_matrix.cuh, delta_step.cuh.
// PRECOND: the rows of a span lie in one block.
// Cost: a head reads its matrix once, and keys and updates of the block's tokens so far.

#if READS
using Heads = DeltaHeads;
#else
using Heads = Mamba2Heads;
#endif

constexpr int WARPS = THREADS / 32;
constexpr int SUMS = 1 + READS;  // of a row's key if it reads, and of its query
constexpr int MATRIX_SUMS = GROUPS * VALUE_DIM, KEY_SUMS = KEY_GROUPS * BLOCK;
constexpr int LEAST_BLOCKS = READS ? (THREADS > 384 ? 2 : 1) : (THREADS > 128 ? 1024 / THREADS : 1);

// Shared memory. A row's value becomes its update. results: before the gate; of Mamba 2, `skip` times values. weights:
// of the block's updates in the row's update, if it reads, and in its result. factors: beta, or the step Δ.
struct StepMemory {
    float sums[SUMS * (MATRIX_SUMS > KEY_SUMS ? MATRIX_SUMS : KEY_SUMS)];
    StepRows rows;
    float results[MOST_ROWS][VALUE_DIM];
    float weights[SUMS][BLOCK], decays[BLOCK], factors[MOST_ROWS];
};
static_assert(sizeof(StepMemory) == SHARED, "SHARED is what a block takes");

// `weights` of row r, the token `token` of its block, from the products.
__device__ __forceinline__ void weigh(StepMemory &memory, int r, int token) {
    for (int i = threadIdx.x; i < SUMS * BLOCK; i += THREADS) {
        const int which = i / BLOCK, is_query = READS ? which : 1, other = i % BLOCK;
        float weight = 0.0f;
        if (other < token + is_query) {
#pragma unroll 4
            for (int group = 0; group < KEY_GROUPS; ++group) weight += memory.sums[SUMS * group * BLOCK + i];
            weight *= expf(memory.decays[token] - memory.decays[other]) * (is_query ? 1.0f : -memory.factors[r]);
        }
        memory.weights[which][other] = weight;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, LEAST_BLOCKS)
delta_step_kernel(float *y, float *keys, float *updates, float *decays, float *inputs, const float *matrices,
                  const float *projected, const float *conv, const float *bias, const float *decay,
                  const float *dt_bias, const float *norm, const float *skip, const int *spans, long long pitch,
                  int key_heads, int tiled, float eps) {
    let_next_begin();
    wait_for_previous();
    DYNAMIC_SHARED(StepMemory, shared);
    StepMemory &memory = *shared;
    const Heads heads = {key_heads, static_cast<int>(gridDim.x), READS && tiled};
    const int head = blockIdx.x, key_head = heads.key_of(head), channels = heads.channels();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int *const span = spans + 4 * blockIdx.y;
    const long long slot = span[0], slot_head = slot * heads.values + head;
    const int first = span[1], rows = span[2], place = span[3];
    if (rows == 0) {
        if (MOST_ROWS == 1)
            for (int i = thread; i < VALUE_DIM; i += THREADS) 
                y[(blockIdx.y * static_cast<long long>(heads.values) + head) * VALUE_DIM + i] = 0.0f;
        return;
    }
    const int column = thread % COLUMNS * 4, group = thread / COLUMNS;
    const float *const matrix = matrices + slot_head * KEY_DIM * VALUE_DIM;

    y += (first * static_cast<long long>(heads.values) + head) * VALUE_DIM;
    projected += first * pitch;
    keys += (slot * key_heads + key_head) * KEY_DIM * BLOCK;
    updates += slot_head * BLOCK * VALUE_DIM;
    decays += slot_head * BLOCK;
    inputs += slot * (WIDTH - 1 + BLOCK) * channels;
    prefetch_state(matrix, keys, updates, place);

    // Queries, keys and values of the rows, and their decays and factors.
    const ConvInputs conv_inputs = {inputs, projected + heads.first_channel(), pitch, channels, place,
                                    READS ? nullptr : bias};
    const bool is_first = heads.is_first(head);
    convolve_rows(memory.rows, inputs, heads, head, conv_inputs, conv, rows);
    for (int i = thread; i < place; i += THREADS) memory.decays[i] = decays[i];
    if (warp == 0) {
        const float *const gates = projected + min(lane, rows - 1) * pitch;
        const float step = softplus(gates[heads.decay(head)] + dt_bias[head]);
        if (lane < rows) memory.factors[lane] = READS ? sigmoid(gates[heads.beta(head)]) : step;
        add_row_decays(memory.decays, decays, decay[head] * step, place, rows);
    }
    float held[HELD][4];
    if (group < GROUPS) load_rows(held, matrix, group, 0, column);
    __syncthreads();
    if (READS) {
        for (int i = warp; i < 2 * rows; i += WARPS) {
            const int r = i / 2, is_query = i % 2;
            float *const x = memory.rows.pairs[r][is_query];
            set_length(x, is_query ? rsqrtf(static_cast<float>(KEY_DIM)) : 1.0f);
            if (!is_query && is_first)
                for (int channel = lane; channel < KEY_DIM; channel += 32)
                    keys[channel * BLOCK + place + r] = x[channel];
        }
        __syncthreads();
    } else {
        const float own_skip = skip[head];
        for (int i = thread; i < rows * VALUE_DIM; i += THREADS) {
            const int r = i / VALUE_DIM;
            float &value = memory.rows.values[r][i % VALUE_DIM];
            memory.results[r][i % VALUE_DIM] = own_skip * value;
            value = updates[place * VALUE_DIM + i] = memory.factors[r] * value;
        }
        if (is_first)
            for (int i = thread; i < rows * KEY_DIM; i += THREADS)
                keys[i % KEY_DIM * BLOCK + place + i / KEY_DIM] = memory.rows.pairs[i / KEY_DIM][0][i % KEY_DIM];
    }

    for (int r = 0; r < rows; ++r) {
        const int token = place + r;
        multiply_keys<SUMS>(memory.sums, memory.rows, keys, r, place);
        __syncthreads();
        weigh(memory, r, token);
        __syncthreads();
        const float factor = memory.factors[r], since = expf(memory.decays[token]);
        if (group < GROUPS) {
            float sums[SUMS][4] = {};
            multiply_matrix(sums, held, memory.rows, matrix, r, group, column);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (READS) sums[0][e] *= -factor * since;
                sums[READS][e] *= since;
            }
            const int end = READS ? token : token + 1;
            add_updates(sums, memory.weights[0], memory.rows, updates, end, place, group, column);
#pragma unroll
            for (int which = 0; which < SUMS; ++which)
                store_floats(memory.sums + (SUMS * group + which) * VALUE_DIM + column, sums[which]);
        }
        __syncthreads();
        for (int i = thread; i < VALUE_DIM; i += THREADS) {
            float update = factor * memory.rows.values[r][i], result = READS ? 0.0f : memory.results[r][i];
#pragma unroll 4
            for (int other = 0; other < GROUPS; ++other) {
                if (READS) update += memory.sums[SUMS * other * VALUE_DIM + i];
                result += memory.sums[(SUMS * other + READS) * VALUE_DIM + i];
            }
            if (READS) {
                memory.rows.values[r][i] = updates[token * VALUE_DIM + i] = update;
                memory.results[r][i] = result + memory.weights[READS][token] * update;
            } else {
                y[r * static_cast<long long>(heads.values) * VALUE_DIM + i] = result;
            }
        }
        __syncthreads();
    }
    if (READS)
        for (int r = warp; r < rows; r += WARPS)
            write_gated(y + r * static_cast<long long>(heads.values) * VALUE_DIM, memory.results[r],
                        projected + r * pitch + heads.gate(head), norm, eps, [](float x) { return silu_of(x); });
}

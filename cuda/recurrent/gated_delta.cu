// The op `gated_delta` in a step: rows are added to the current blocks of slots, and their results are computed.
//
// y (T, H, D), 0 for a span without rows. slots: keys (S, Q, A, N), updates (S, H, N, D), decays (S, H, N), inputs (S,
// WIDTH − 1 + N, C) get what belongs to the rows; matrices (S, H, A, D). projected: rows [q | k | v | z | b | a],
// `pitch` numbers apart; conv (WIDTH, C), decay, dt_bias (H,), norm (D,). spans int32 (spans, 4): slot, first row,
// rows, place of the first in its block.
// Grid (H, spans), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, MOST_ROWS (1 or 16), THREADS, SHARED.
// JOINS: delta.cuh, delta_matrix.cuh, delta_step.cuh.
// PRECOND: the rows of a span lie in one block.
// Cost: a head reads its matrix once, and keys and updates of the block's tokens so far.

static_assert(sizeof(StepMemory<2>) == SHARED, "SHARED is what a block takes");

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 384 ? 2 : 1)
gated_delta_kernel(float *y, float *keys, float *updates, float *decays, float *inputs, const float *matrices,
                   const float *projected, const float *conv, const float *decay, const float *dt_bias,
                   const float *norm, const int *spans, long long pitch, int key_heads, int tiled, float eps) {
    let_next_begin();
    wait_for_previous();
    DYNAMIC_SHARED(StepMemory<2>, shared);
    StepMemory<2> &memory = *shared;
    const DeltaHeads heads = {key_heads, static_cast<int>(gridDim.x), tiled};
    const StepHead<DeltaHeads> of(heads, y, keys, updates, decays, inputs, matrices, spans);
    if (!of.has_rows()) return;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, head = of.head, place = of.place;
    projected += of.first * pitch;
    prefetch_state(of.matrix, of.keys, of.updates, place);

    const ConvInputs seen = {of.inputs, projected, pitch, heads.channels(), place};
    convolve_rows(memory.rows, of.inputs, heads, head, seen, conv, of.rows);
    for (int i = thread; i < place; i += THREADS) memory.decays[i] = of.decays[i];
    if (warp == 0) {
        const float *const gates = projected + min(lane, of.rows - 1) * pitch;
        const float own = decay[head] * softplus(gates[heads.decay(head)] + dt_bias[head]);
        if (lane < of.rows) memory.factors[lane] = sigmoid(gates[heads.beta(head)]);
        add_row_decays(memory.decays, of.decays, own, place, of.rows);
    }
    float held[HELD][4];
    if (thread / COLUMNS < GROUPS) load_rows(held, of.matrix, thread / COLUMNS, 0, thread % COLUMNS * 4);
    __syncthreads();
    const bool is_first = heads.is_first(head);
    for (int vector = warp; vector < 2 * of.rows; vector += THREADS / 32) {
        const int r = vector / 2, of_query = vector % 2;
        float *const x = memory.rows.pairs[r][of_query];
        set_length(x, of_query ? rsqrtf(static_cast<float>(KEY_DIM)) : 1.0f);
        if (!of_query && is_first)
            for (int i = lane; i < KEY_DIM; i += 32) of.keys[i * BLOCK + place + r] = x[i];
    }
    __syncthreads();

    add_rows<2>(memory, held, of.matrix, of.keys, of.updates, of.rows, place, [&](int r, int i) {
        float update = memory.factors[r] * memory.rows.values[r][i], result = 0.0f;
#pragma unroll 4
        for (int other = 0; other < GROUPS; ++other) {
            update += memory.sums[2 * other * VALUE_DIM + i];
            result += memory.sums[(2 * other + 1) * VALUE_DIM + i];
        }
        memory.rows.values[r][i] = of.updates[(place + r) * VALUE_DIM + i] = update;
        memory.results[r][i] = result + memory.weights[1][place + r] * update;
    });
    for (int r = warp; r < of.rows; r += THREADS / 32)
        write_gated(of.y + r * static_cast<long long>(heads.values) * VALUE_DIM, memory.results[r],
                    projected + r * pitch + heads.gate(head), norm, eps);
}

// The op `mamba2` in a step: rows are added to the current blocks of slots, and what their queries read, with `skip`
// times their own values, is computed. The update of a row is its value times its step Δ.
//
// y (T, H, D): results, before they are gated; 0 for a span without rows. The slots, projected rows [z | x | B | C |
// dt], conv, decay, dt_bias and spans are as for `gated_delta`; bias (C,) or null; skip (H,).
// Grid (H, spans), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, MOST_ROWS (1 or 16), THREADS, SHARED.
// JOINS: delta.cuh, delta_matrix.cuh, delta_step.cuh, mamba2.cuh.
// PRECOND: the rows of a span lie in one block.
// Cost: a head reads its matrix once, and keys and updates of the block's tokens so far.

static_assert(sizeof(StepMemory<1>) == SHARED, "SHARED is what a block takes");

extern "C" __global__ void __launch_bounds__(THREADS, THREADS > 128 ? 1024 / THREADS : 1)
mamba2_kernel(float *y, float *keys, float *updates, float *decays, float *inputs, const float *matrices,
              const float *projected, const float *conv, const float *bias, const float *decay, const float *dt_bias,
              const float *skip, const int *spans, long long pitch, int key_heads) {
    let_next_begin();
    wait_for_previous();
    DYNAMIC_SHARED(StepMemory<1>, shared);
    StepMemory<1> &memory = *shared;
    const Mamba2Heads heads = {{key_heads, static_cast<int>(gridDim.x), 0}};
    const StepHead<Mamba2Heads> of(heads, y, keys, updates, decays, inputs, matrices, spans);
    if (!of.has_rows()) return;
    const int thread = threadIdx.x, lane = thread % 32, head = of.head, place = of.place;
    projected += of.first * pitch;
    prefetch_state(of.matrix, of.keys, of.updates, place);

    const ConvInputs seen = {of.inputs, projected + heads.first_channel(), pitch, heads.channels(), place, bias};
    convolve_rows(memory.rows, of.inputs, heads, head, seen, conv, of.rows);
    for (int i = thread; i < place; i += THREADS) memory.decays[i] = of.decays[i];
    if (thread < 32) {
        const float step = softplus(projected[min(lane, of.rows - 1) * pitch + heads.step(head)] + dt_bias[head]);
        if (lane < of.rows) memory.factors[lane] = step;
        add_row_decays(memory.decays, of.decays, decay[head] * step, place, of.rows);
    }
    float held[HELD][4];
    if (thread / COLUMNS < GROUPS) load_rows(held, of.matrix, thread / COLUMNS, 0, thread % COLUMNS * 4);
    __syncthreads();
    const float own_skip = skip[head];
    for (int i = thread; i < of.rows * VALUE_DIM; i += THREADS) {
        const int r = i / VALUE_DIM;
        float &value = memory.rows.values[r][i % VALUE_DIM];
        memory.results[r][i % VALUE_DIM] = own_skip * value;
        value = of.updates[place * VALUE_DIM + i] = memory.factors[r] * value;
    }
    if (heads.is_first(head))
        for (int i = thread; i < of.rows * KEY_DIM; i += THREADS)
            of.keys[i % KEY_DIM * BLOCK + place + i / KEY_DIM] = memory.rows.pairs[i / KEY_DIM][0][i % KEY_DIM];

    add_rows<1>(memory, held, of.matrix, of.keys, of.updates, of.rows, place, [&](int r, int i) {
        float result = memory.results[r][i];
#pragma unroll 4
        for (int other = 0; other < GROUPS; ++other) result += memory.sums[other * VALUE_DIM + i];
        of.y[r * static_cast<long long>(heads.values) * VALUE_DIM + i] = result;
    });
}

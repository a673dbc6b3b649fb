// The op `advance_delta`: slots whose block is complete advance to the start of the next one, in place.
//
// layers (layers, 5): addresses, a DeltaArrays in each row; slots int32 (slots). With the decays g of the block's
// tokens a head's matrix M becomes exp(g of the last) M + Σ_i exp(g of the last − g_i) k_i u_iᵀ, and the inputs of the
// block's last tokens become those before the next one.
// With BY_CHANNEL each channel of a key decays by itself: decays (S, H, A, N).
// Grid (H, slots, layers), block THREADS. DEFINES: KEY_DIM, VALUE_DIM, BLOCK, WIDTH, BY_CHANNEL, THREADS.
// JOINS: delta.cuh, delta_matrix.cuh.
// PRECOND: WIDTH − 1 <= BLOCK; no slot is there twice.
// Cost: reads the whole slot, and writes its matrices.

struct DeltaArrays {
    float *matrices, *inputs;  // (S, H, A, D), (S, WIDTH − 1 + N, C)
    const float *keys, *updates, *decays;  // (S, Q, A, N), (S, H, N, D), (S, H, N)
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
advance_delta_kernel(const unsigned long long *layers, const int *slots, int key_heads, int tiled) {
    __shared__ float factors[BLOCK];
    const DeltaHeads heads = {key_heads, static_cast<int>(gridDim.x), tiled};
    const DeltaArrays &layer = reinterpret_cast<const DeltaArrays *>(layers)[blockIdx.z];
    const int head = blockIdx.x, key_head = heads.key_of(head), channels = heads.channels(), thread = threadIdx.x;
    const long long slot = slots[blockIdx.y], slot_head = slot * heads.values + head;
    const float *const decays = layer.decays + slot_head * (BY_CHANNEL ? KEY_DIM * BLOCK : BLOCK);
    for (int i = thread; i < BLOCK; i += THREADS) factors[i] = BY_CHANNEL ? 1.0f : expf(decays[BLOCK - 1] - decays[i]);

    float *const inputs = layer.inputs + slot * (WIDTH - 1 + BLOCK) * channels;
    for (int i = thread; i < VALUE_DIM; i += THREADS) shift_inputs(inputs, channels, heads.value(head) + i);
    if (heads.is_first(head))
        for (int i = thread; i < KEY_DIM; i += THREADS) {
            shift_inputs(inputs, channels, heads.query(key_head) + i);
            shift_inputs(inputs, channels, heads.key(key_head) + i);
        }
    __syncthreads();

    const int column = thread % COLUMNS * 4, group = thread / COLUMNS;
    if (group >= GROUPS) return;
    float *const matrix = layer.matrices + slot_head * KEY_DIM * VALUE_DIM;
    const float *const keys = layer.keys + (slot * key_heads + key_head) * KEY_DIM * BLOCK;
    const float *const updates = layer.updates + slot_head * BLOCK * VALUE_DIM;
    const float whole = BY_CHANNEL ? 1.0f : expf(decays[BLOCK - 1]);
#pragma unroll 1
    for (int start = 0; start < OWN; start += HELD) {
        float sums[HELD][4];
        load_rows(sums, matrix, group, start, column);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int row = min((start + i) * GROUPS + group, KEY_DIM - 1);
            const float left = BY_CHANNEL ? expf(decays[row * BLOCK + BLOCK - 1]) : whole;
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][e] *= left;
        }
#pragma unroll 1
        for (int token = 0; token < BLOCK; token += 4) {
            float own[4][4];
#pragma unroll
            for (int t = 0; t < 4; ++t) {
                load_floats(own[t], updates + (token + t) * VALUE_DIM + column);
#pragma unroll
                for (int e = 0; e < 4; ++e) own[t][e] *= factors[token + t];
            }
#pragma unroll
            for (int i = 0; i < HELD; ++i) {
                const int row = min((start + i) * GROUPS + group, KEY_DIM - 1);
                float key[4];
                load_floats(key, keys + row * BLOCK + token);
                if (BY_CHANNEL)
#pragma unroll
                    for (int t = 0; t < 4; ++t)
                        key[t] *= expf(decays[row * BLOCK + BLOCK - 1] - decays[row * BLOCK + token + t]);
#pragma unroll
                for (int t = 0; t < 4; ++t)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[i][e] += key[t] * own[t][e];
            }
        }
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int row = (start + i) * GROUPS + group;
            if (row < KEY_DIM) store_floats(matrix + row * VALUE_DIM + column, sums[i]);
        }
    }
}

// What a block of threads does in a step, for a value head of a span: rows are convolved, and multiplied with keys and
// the matrix.

constexpr int TOKENS = BLOCK / 4;  // threads of a row of keys
constexpr int KEY_GROUPS = THREADS / TOKENS < KEY_DIM ? THREADS / TOKENS : KEY_DIM;

// Shared memory: the key of each row, and its query; its value.
struct StepRows {
    float pairs[MOST_ROWS][2][KEY_DIM], values[MOST_ROWS][VALUE_DIM];
};

// Brings a head's matrix, and keys and updates of the block's first `place` tokens, into the L2 cache.
__device__ __forceinline__ void prefetch_state(const float *matrix, const float *keys, const float *updates,
                                               int place) {
    for (int i = threadIdx.x * 32; i < KEY_DIM * VALUE_DIM; i += THREADS * 32) prefetch_line(matrix + i);
    for (int i = threadIdx.x * 32; i < place * VALUE_DIM; i += THREADS * 32) prefetch_line(updates + i);
    if (place > 0)
        for (int i = threadIdx.x * 32; i < KEY_DIM * BLOCK; i += THREADS * 32) prefetch_line(keys + i);
}

// All threads convolve the rows, which begin at token conv_inputs.place; the slot's `inputs` get what is convolved.
// Keys and queries that heads have in common are kept there by the first of these.
template <class Heads>
__device__ __forceinline__ void convolve_rows(StepRows &step_rows, float *inputs, const Heads &heads, int head,
                                              const ConvInputs &conv_inputs, const float *conv, int rows) {
    const int key_head = heads.key_of(head);
    const bool is_first = heads.is_first(head);
    for (int i = threadIdx.x; i < 2 * KEY_DIM + VALUE_DIM; i += THREADS) {
        const bool is_value = i >= 2 * KEY_DIM;
        const int is_query = i >= KEY_DIM, own = is_value ? i - 2 * KEY_DIM : i - is_query * KEY_DIM;
        const int start = is_value ? heads.value(head) : is_query ? heads.query(key_head) : heads.key(key_head);
        const auto write = [&](int token, float x) {
            const int r = token - conv_inputs.place;
            (is_value ? step_rows.values[r] : step_rows.pairs[r][is_query])[own] = x;
            if (is_value || is_first)
                inputs[(token + WIDTH - 1) * static_cast<long long>(conv_inputs.channels) + start + own] =
                    conv_inputs.at(token, start + own);
        };
        conv_inputs.convolve(conv, start + own, conv_inputs.place, conv_inputs.place + rows, write);
    }
}

// A warp, whose lane r has the change of g by row r, computes g of the rows, for the slot and in shared memory.
__device__ __forceinline__ void add_row_decays(float *decays, float *row_decays, float change, int place, int rows) {
    float total = place > 0 ? row_decays[place - 1] : 0.0f;
    for (int r = 0; r < rows; ++r) {
        total += __shfl_sync(0xffffffffu, change, r);
        if (threadIdx.x % 32 == r) decays[place + r] = row_decays[place + r] = total;
    }
}

// Multiplies row r's query, with COUNT 2 its key and its query, by the block's keys: `place` keys are in the slot, the
// others are among the rows; each group of threads adds up its channels. sums (KEY_GROUPS, COUNT, N).
template <int COUNT>
__device__ __forceinline__ void multiply_keys(float *sums, const StepRows &of, const float *keys, int r, int place) {
    const int first = threadIdx.x % TOKENS * 4, group = threadIdx.x / TOKENS;
    if (group >= KEY_GROUPS) return;
    float products[COUNT][4] = {};
#pragma unroll 1
    for (int channel = group; channel < KEY_DIM; channel += KEY_GROUPS) {
        const float *const own = keys + channel * BLOCK + first;
        float row_decays[4] = {};
        if (first + 4 <= place) {
            load_floats(row_decays, own);
        } else {
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (first + i < place) row_decays[i] = own[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + i - place;
            const float other = row < 0 ? row_decays[i] : row <= r ? of.pairs[row][0][channel] : 0.0f;
#pragma unroll
            for (int which = 0; which < COUNT; ++which)
                products[which][i] += of.pairs[r][2 - COUNT + which][channel] * other;
        }
    }
#pragma unroll
    for (int which = 0; which < COUNT; ++which)
        store_floats(sums + (COUNT * group + which) * BLOCK + first, products[which]);
}

// Adds the products of row r's query, with COUNT 2 of its key and its query, with a thread's part of the matrix to its
// sums of 4 columns. held: the thread's first rows of the matrix, for row 0.
template <int COUNT>
__device__ __forceinline__ void multiply_matrix(float (&sums)[COUNT][4], float (&held)[HELD][4], const StepRows &of,
                                                const float *matrix, int r, int group, int column) {
#pragma unroll 1
    for (int start = 0; start < OWN; start += HELD) {
        if (OWN > HELD && (r > 0 || start > 0)) load_rows(held, matrix, group, start, column);
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int channel = (start + i) * GROUPS + group;
            if (KEY_DIM % (GROUPS * HELD) && channel >= KEY_DIM) break;
#pragma unroll
            for (int e = 0; e < 4; ++e)
#pragma unroll
                for (int which = 0; which < COUNT; ++which)
                    sums[which][e] += of.pairs[r][2 - COUNT + which][channel] * held[i][e];
        }
    }
}

// Adds to these sums the updates of the block's tokens before `end`, times weights (COUNT, N): `place` updates are in
// the slot, the others are among the rows.
template <int COUNT>
__device__ __forceinline__ void add_updates(float (&sums)[COUNT][4], const float *weights, const StepRows &of,
                                            const float *updates, int end, int place, int group, int column) {
#pragma unroll 1
    for (int other = group; other < end; other += GROUPS) {
        float own[COUNT], update[4];
#pragma unroll
        for (int which = 0; which < COUNT; ++which) own[which] = weights[which * BLOCK + other];
        load_floats(update, other < place ? updates + other * VALUE_DIM + column : of.values[other - place] + column);
#pragma unroll
        for (int e = 0; e < 4; ++e)
#pragma unroll
            for (int which = 0; which < COUNT; ++which) sums[which][e] += own[which] * update[e];
    }
}

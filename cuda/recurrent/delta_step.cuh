// A step of gated delta rules (COUNT 2) and of Mamba 2 (COUNT 1): a block of threads has a value head of a span.
//
// It brings the matrix, which is most of its bytes, and the block's earlier keys and updates into the L2 cache, and
// convolves meanwhile. Then threads hold the matrix in registers and take row by row: a row's result, and with COUNT 2
// its update, are sums over rows of the matrix and over earlier updates, which groups of threads add up. So a row's
// sums have the same order whichever rows are computed with it. Value heads with one key compute it each; the first
// writes it.

constexpr int TOKENS = BLOCK / 4;  // threads of a row of keys
constexpr int KEY_GROUPS = THREADS / TOKENS < KEY_DIM ? THREADS / TOKENS : KEY_DIM;

// The key of each row, and its query; its value, which becomes its update.
struct StepRows {
    float pairs[MOST_ROWS][2][KEY_DIM], values[MOST_ROWS][VALUE_DIM];
};

// Shared memory. weights: of the block's updates, with COUNT 2 in the row's update, and in its result. factors: beta of
// each row with COUNT 2, else its step.
template <int COUNT>
struct StepMemory {
    static constexpr int MATRIX_SUMS = GROUPS * VALUE_DIM, KEY_SUMS = KEY_GROUPS * BLOCK;
    float sums[COUNT * (MATRIX_SUMS > KEY_SUMS ? MATRIX_SUMS : KEY_SUMS)];
    StepRows rows;
    float results[MOST_ROWS][VALUE_DIM];
    float weights[COUNT][BLOCK], decays[BLOCK], factors[MOST_ROWS];
};

// The block's head of a span, and what it has of the slot and of y. With MOST_ROWS 1, span i has row i or none.
template <class Heads>
struct StepHead {
    int head, key_head, first, rows, place;
    float *y, *keys, *updates, *decays, *inputs;  // y: the first row's, or without rows the row of the span
    const float *matrix;

    __device__ __forceinline__ StepHead(const Heads &heads, float *y, float *keys, float *updates, float *decays,
                                        float *inputs, const float *matrices, const int *spans)
        : head(blockIdx.x), key_head(heads.key_of(head)) {
        const int *const span = spans + 4 * blockIdx.y;
        const long long slot = span[0], of_slot = slot * heads.values + head;
        first = span[1], rows = span[2], place = span[3];
        this->y = y + ((rows ? first : blockIdx.y) * static_cast<long long>(heads.values) + head) * VALUE_DIM;
        this->keys = keys + (slot * heads.keys + key_head) * KEY_DIM * BLOCK;
        this->updates = updates + of_slot * BLOCK * VALUE_DIM;
        this->decays = decays + of_slot * BLOCK;
        this->inputs = inputs + slot * (WIDTH - 1 + BLOCK) * heads.channels();
        matrix = matrices + of_slot * KEY_DIM * VALUE_DIM;
    }

    // Whether there are rows; else y is 0.
    __device__ __forceinline__ bool has_rows() const {
        if (rows == 0 && MOST_ROWS == 1)
            for (int i = threadIdx.x; i < VALUE_DIM; i += THREADS) y[i] = 0.0f;
        return rows > 0;
    }
};

// Brings a head's matrix, and keys and updates of the block's first `place` tokens, into the L2 cache.
__device__ __forceinline__ void prefetch_state(const float *matrix, const float *keys, const float *updates,
                                               int place) {
    for (int i = threadIdx.x * 32; i < KEY_DIM * VALUE_DIM; i += THREADS * 32) prefetch_line(matrix + i);
    for (int i = threadIdx.x * 32; i < place * VALUE_DIM; i += THREADS * 32) prefetch_line(updates + i);
    if (place > 0)
        for (int i = threadIdx.x * 32; i < KEY_DIM * BLOCK; i += THREADS * 32) prefetch_line(keys + i);
}

// All threads convolve the rows, which begin at token seen.place; the slot's `inputs` get what is convolved. Keys and
// queries that heads have in common are kept there by the first of these.
template <class Heads>
__device__ __forceinline__ void convolve_rows(StepRows &of, float *inputs, const Heads &heads, int head,
                                              const ConvInputs &seen, const float *conv, int rows) {
    const int key_head = heads.key_of(head);
    const bool is_first = heads.is_first(head);
    for (int i = threadIdx.x; i < 2 * KEY_DIM + VALUE_DIM; i += THREADS) {
        const bool is_value = i >= 2 * KEY_DIM;
        const int of_query = i >= KEY_DIM, own = is_value ? i - 2 * KEY_DIM : i - of_query * KEY_DIM;
        const int start = is_value ? heads.value(head) : of_query ? heads.query(key_head) : heads.key(key_head);
        seen.convolve(conv, start + own, seen.place, seen.place + rows, [&](int token, float x) {
            const int r = token - seen.place;
            (is_value ? of.values[r] : of.pairs[r][of_query])[own] = x;
            if (is_value || is_first)
                inputs[(token + WIDTH - 1) * static_cast<long long>(seen.channels) + start + own] =
                    seen.at(token, start + own);
        });
    }
}

// A warp, whose lane r has the change of g by row r, computes g of the rows, for the slot and in shared memory.
__device__ __forceinline__ void add_row_decays(float *decays, float *kept, float change, int place, int rows) {
    float total = place > 0 ? kept[place - 1] : 0.0f;
    for (int r = 0; r < rows; ++r) {
        total += __shfl_sync(0xffffffffu, change, r);
        if (threadIdx.x % 32 == r) decays[place + r] = kept[place + r] = total;
    }
}

// The products of row r's query, with COUNT 2 of its key and of its query, with the block's keys: the slot has `place`
// keys, the rows have the others; each group of threads adds up its channels. sums (KEY_GROUPS, COUNT, N).
template <int COUNT>
__device__ __forceinline__ void multiply_keys(float *sums, const StepRows &of, const float *keys, int r, int place) {
    const int first = threadIdx.x % TOKENS * 4, group = threadIdx.x / TOKENS;
    if (group >= KEY_GROUPS) return;
    float products[COUNT][4] = {};
#pragma unroll 1
    for (int channel = group; channel < KEY_DIM; channel += KEY_GROUPS) {
        const float *const own = keys + channel * BLOCK + first;
        float kept[4] = {};
        if (first + 4 <= place) {
            load_floats(kept, own);
        } else {
#pragma unroll
            for (int i = 0; i < 3; ++i)
                if (first + i < place) kept[i] = own[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = first + i - place;
            const float other = row < 0 ? kept[i] : row <= r ? of.pairs[row][0][channel] : 0.0f;
#pragma unroll
            for (int which = 0; which < COUNT; ++which)
                products[which][i] += of.pairs[r][2 - COUNT + which][channel] * other;
        }
    }
#pragma unroll
    for (int which = 0; which < COUNT; ++which)
        store_floats(sums + (COUNT * group + which) * BLOCK + first, products[which]);
}

// Row by row, computes GROUPS sums, with COUNT 2 of the update and of the result in turn, VALUE_DIM apart, from which
// finish(r, i) makes column i of row r's update and result. `held` has the first rows of the matrix.
template <int COUNT, class Finish>
__device__ __forceinline__ void add_rows(StepMemory<COUNT> &memory, float (&held)[HELD][4], const float *matrix,
                                         const float *keys, const float *updates, int rows, int place, Finish finish) {
    const int column = threadIdx.x % COLUMNS * 4, group = threadIdx.x / COLUMNS;
    for (int r = 0; r < rows; ++r) {
        const int token = place + r;
        multiply_keys<COUNT>(memory.sums, memory.rows, keys, r, place);
        __syncthreads();
        for (int i = threadIdx.x; i < COUNT * BLOCK; i += THREADS) {
            const int of_query = COUNT == 1 || i >= BLOCK, other = i % BLOCK;
            float weight = 0.0f;
            if (other < token + of_query) {
#pragma unroll 4
                for (int from = 0; from < KEY_GROUPS; ++from) weight += memory.sums[COUNT * from * BLOCK + i];
                weight *= expf(memory.decays[token] - memory.decays[other]) * (of_query ? 1.0f : -memory.factors[r]);
            }
            memory.weights[i / BLOCK][other] = weight;
        }
        __syncthreads();
        if (group < GROUPS) {
            float sums[COUNT][4] = {};
#pragma unroll 1
            for (int start = 0; start < OWN; start += HELD) {
                if (OWN > HELD && (r > 0 || start > 0)) load_rows(held, matrix, group, start, column);
#pragma unroll
                for (int i = 0; i < HELD; ++i) {
                    const int channel = (start + i) * GROUPS + group;
                    if (KEY_DIM % (GROUPS * HELD) && channel >= KEY_DIM) break;
#pragma unroll
                    for (int which = 0; which < COUNT; ++which) {
                        const float x = memory.rows.pairs[r][2 - COUNT + which][channel];
#pragma unroll
                        for (int e = 0; e < 4; ++e) sums[which][e] += x * held[i][e];
                    }
                }
            }
            const float since = expf(memory.decays[token]);
#pragma unroll
            for (int which = 0; which < COUNT; ++which)
#pragma unroll
                for (int e = 0; e < 4; ++e) sums[which][e] *= which + 1 < COUNT ? -memory.factors[r] * since : since;
#pragma unroll 1
            for (int other = group; other < token + (COUNT == 1); other += GROUPS) {
                float update[4];
                load_floats(update, other < place ? updates + other * VALUE_DIM + column
                                                  : memory.rows.values[other - place] + column);
#pragma unroll
                for (int which = 0; which < COUNT; ++which)
#pragma unroll
                    for (int e = 0; e < 4; ++e) sums[which][e] += memory.weights[which][other] * update[e];
            }
#pragma unroll
            for (int which = 0; which < COUNT; ++which)
                store_floats(memory.sums + (COUNT * group + which) * VALUE_DIM + column, sums[which]);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < VALUE_DIM; i += THREADS) finish(r, i);
        __syncthreads();
    }
}

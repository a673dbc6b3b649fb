// A row of logits: the order of its tokens, its mask, and what a block keeps of it in shared memory.
// A part of sample.cu.
typedef unsigned long long Mass, Place;

constexpr int ROOM = 4096, BINS = 256, DIGIT = 8;
constexpr float UNIT = 17592186044416.0f;  // 2^44: the mass of the best token
constexpr float LOG2_E = 1.44269504f;

// Larger for larger floats; -0 is 0.
__device__ __forceinline__ unsigned key(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_key(unsigned k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); }

struct Row {
    const float *logits;
    const unsigned *mask;
    int count, id_bits;
    float best;
    unsigned best_key;

    __device__ __forceinline__ Place place(float x, int id) const {
        return Place(best_key - key(x)) << id_bits | unsigned(id);
    }
};

// What the cuts so far have kept.
struct __align__(16) Kept {
    Place last;
    float floor;  // of x - best

    __device__ __forceinline__ bool holds(float difference, Place place) const {
        return place <= last && difference >= floor;
    }
};

struct __align__(16) Sum {
    Mass total;
    Place last;  // of what has any weight
};

struct Shared {
    Row row;
    Kept kept;
    Kept covered;        // what the list holds for certain
    float values[ROOM];  // the list: some tokens, among them all those up to a place, in any order
    int ids[ROOM];
    int listed;
    unsigned low[BINS], high[BINS], counts[BINS];  // all 0 but within a level of a descent
    Place places[BINS];                            // some token of each bin
    Sum sums[32];
    Mass target;  // the outcome of a level
    int bin, alone;
};
__shared__ Shared s;

// rate: e^(difference / temperature) = 2^(difference · rate); 0 counts tokens.
__device__ __forceinline__ Mass weight(float difference, float rate) {
    return rate > 0.0f ? Mass(exp2_fast(difference * rate) * UNIT) : 1;
}

struct Nothing {
    __device__ __forceinline__ void operator()(float) const {}
};

// visit(value, id) for every token of the list, or of the row; a thread's ids ascend in a row. With a mask, values of a
// row go to `look` as the model gave them before. AHEAD loads of a thread are on their way at once.
template <int AHEAD, class Visit, class Look = Nothing>
__device__ __forceinline__ void each(const Row &row, bool in_list, Visit visit, Look look = {}) {
    if (in_list) {
        for (int i = threadIdx.x; i < s.listed; i += blockDim.x) visit(s.values[i], s.ids[i]);
        return;
    }
    const int step = 4 * blockDim.x;
    for (int first = 4 * threadIdx.x; first < row.count; first += AHEAD * step) {
        Chunk<float> x[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a)
            if (first + a * step < row.count) load_floats(x[a].at, row.logits + first + a * step);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            const int id = first + a * step;
            if (row.mask && id < row.count) {
                const unsigned bits = row.mask[id / 32] >> id % 32;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    if (id + j < row.count) look(x[a].at[j]);
                    if (!(bits >> j & 1)) x[a].at[j] = NEGATIVE_INFINITY;
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (id + j < row.count) visit(x[a].at[j], id + j);
        }
    }
}

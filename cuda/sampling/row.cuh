// A row of logits: the rank of its tokens, its mask, and the state of a block in shared memory. Part of sample.cu.
typedef unsigned long long Mass, Rank;

constexpr int ROOM = 4096, BINS = 256, DIGIT = 8;
constexpr float UNIT = 17592186044416.0f;  // 2^44, the mass of the best token
constexpr float LOG2_E = 1.44269504f;

// An unsigned integer in the order of floats; -0 and 0 are equal.
__device__ __forceinline__ unsigned key(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(unsigned k) {
    return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k);
}

struct Row {
    const float *logits;
    const unsigned *mask;
    int count, id_bits;
    float best;
    unsigned best_key;

    // 0 for the best logit and id 0; larger for smaller logits, and among equal ones for larger ids.
    __device__ __forceinline__ Rank rank(float x, int id) const {
        return Rank(best_key - key(x)) << id_bits | unsigned(id);
    }
};

// The tokens kept so far by top-k, top-p and min-p: ranks up to `last`, and logits down to best + floor.
struct __align__(16) Kept {
    Rank last;
    float floor;  // of logit - best

    __device__ __forceinline__ bool holds(float difference, Rank rank) const {
        return rank <= last && difference >= floor;
    }
};

struct __align__(16) Sum {
    Mass total;
    Rank last;  // the largest rank with a weight above 0
};

struct Shared {
    Row row;
    Kept kept;
    Kept covered;        // all such tokens are in the list
    float values[ROOM];  // the list: the best tokens and perhaps others, in any order
    int ids[ROOM];
    int listed;
    unsigned low[BINS], high[BINS], counts[BINS];  // histogram of one digit; 0 between digits
    Rank ranks[BINS];                            // the rank of some token in each bin
    Sum sums[32];
    Mass target;     // what choose_bin has found: the target within the bin,
    int bin, alone;  // the bin, and whether it holds one token only
};
__shared__ Shared s;

// The mass of a token, in units of 2^-44 of the best token's: 2^(difference · rate) with rate = log₂e / temperature.
// With rate 0 every token weighs 1, which counts tokens.
__device__ __forceinline__ Mass weight(float difference, float rate) {
    return rate > 0.0f ? Mass(exp2_fast(difference * rate) * UNIT) : 1;
}

struct Ignore {
    __device__ __forceinline__ void operator()(float) const {}
};

// Calls visit(value, id) for every token of the list, or of the row; a thread sees ids of a row in ascending order. If
// the row has a mask, forbidden tokens have the value -infinity, and look(value) gets each value before the mask. A
// thread has AHEAD loads in flight.
template <int AHEAD, class Visit, class Look = Ignore>
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

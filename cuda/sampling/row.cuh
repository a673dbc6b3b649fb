// A row of logits: the rank of its tokens, its mask, and what one thread of the row's blocks has of it. Part of
// sample.cu.
typedef unsigned long long Mass, Rank;

constexpr int CHUNKS = PART / 4 / THREADS;  // chunks of 4 logits that a thread of a block has
constexpr float UNIT = 17592186044416.0f;  // 2^44, the mass of the best token
constexpr float LOG2_E = 1.44269504f;
constexpr Rank NONE = ~0ull;

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
    __device__ __forceinline__ float value(Rank rank) const { return from_key(best_key - unsigned(rank >> id_bits)); }
    __device__ __forceinline__ int id(Rank rank) const { return int(rank & ((Rank(1) << id_bits) - 1)); }

    // Four logits from `first` on, a multiple of 4; -infinity after the row's end.
    __device__ __forceinline__ void load(float (&x)[4], int first) const {
        if (first < count) load_floats(x, logits + first);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (first + j >= count) x[j] = NEGATIVE_INFINITY;
    }

    // Makes those that the mask forbids -infinity.
    __device__ __forceinline__ void forbid(float (&x)[4], int first) const {
        if (!mask || first >= count) return;
        const unsigned bits = mask[first / 32] >> first % 32;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (!(bits >> j & 1)) x[j] = NEGATIVE_INFINITY;
    }
};

// The first logit of a thread's chunk. Blocks take turns, so that each has logits from all over the row: vocabularies
// are sorted by how frequent tokens are.
__device__ __forceinline__ int chunk_at(int chunk) {
    return 4 * ((chunk * gridDim.x + blockIdx.x) * THREADS + threadIdx.x);
}

// The mass of a token, in units of 2^-44 of the best token's: 2^(difference · rate) with rate = log₂e / temperature.
// With rate 0 every token weighs 1, which counts tokens.
__device__ __forceinline__ Mass weight(float difference, float rate) {
    return rate > 0.0f ? Mass(exp2_fast(difference * rate) * UNIT) : 1;
}

__device__ __forceinline__ float rate_of(float temperature) { return LOG2_E / max(temperature, 1e-30f); }

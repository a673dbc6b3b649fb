// The inputs of log-probabilities, of a token and of the most likely tokens: with them `token_logprob` of
// engine/sampling/sample.py needs a few numbers from the GPU instead of the row of logits.
//
// out (rows, width) words: 64 bits, the sum of e^(x - best) over the row in units of 2^-44; 2 floats, best and the
// token's logit; then `count` pairs of int id and float logit, the largest first and equal ones by id; -1 and 0 after
// the last token.
// requested (rows, 3) int32: row of the logits, token, count. logits (B, V), rows `stride` floats apart.
//
// The logarithm of the sum is off by 2^-22 at most: expf by 2^-23 of a term, its correction by 2^-24, what is cut off
// below 2^-44 of all terms by 2^-25. Sums of integers do not depend on the order. Doubles would not be more exact than
// the logits are, and GPUs other than data centres' take 64 times as long for them.
// Cost: V is read twice, with an exponential for each logit. A thread keeps the best of its own tokens that is not
// listed yet, so each of `count` rounds is a maximum over the block, and one thread reads V / block logits again.
// Grid (rows), block 64 … 512: 512 for large V. DEFINES: none.
// PRECOND: 1 <= V <= 2^19; width % 4 == 0, width >= 4 + 2 count, out aligned to 16 bytes; 0 <= token < V; logits
// without NaN, the largest is finite.
typedef unsigned long long Mass, Rank;

constexpr float UNIT = 17592186044416.0f;  // 2^44, the mass of the best token
constexpr float LEAST = -31.0f;            // least x - best: others have no mass

struct __align__(16) Sums {
    Mass sum;
    float best, own;
};

struct Pair {
    int id;
    float logit;
};

__shared__ Mass sum_of_warp[16];
__shared__ Rank best_of_warp[16];

// Larger for larger logits, and among equal ones for smaller ids; never 0. -0 and 0 are equal.
__device__ __forceinline__ Rank rank(float x, int id) {
    const unsigned bits = __float_as_uint(x + 0.0f), key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return Rank(key) << 32 | ~unsigned(id);
}

// The largest rank below `last` of this thread's tokens; 0 where there is none.
__device__ __forceinline__ Rank best_after(const float *logits, int V, Rank last) {
    Rank best = 0;
    for (int id = threadIdx.x; id < V; id += blockDim.x) {
        const Rank at = rank(logits[id], id);
        if (at < last && at > best) best = at;
    }
    return best;
}

// The largest rank of all threads, in all of them.
__device__ __forceinline__ Rank over_block(Rank best) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) best_of_warp[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; ++warp) best = max(best, best_of_warp[warp]);
    return best;
}

// e^(x - best), with what the difference has lost to rounding.
__device__ __forceinline__ Mass mass(float x, float best) {
    const float difference = x - best;
    if (!(difference >= LEAST)) return 0;
    const float best_part = x - difference, x_part = difference + best_part, lost = (x - x_part) + (best_part - best);
    const float power = expf(difference);
    return Mass(__fmaf_rn(power, lost, power) * UNIT);
}

extern "C" __global__ void __launch_bounds__(512)
logprobs_kernel(int *out, const float *logits, const int *requested, int V, long long stride, int width) {
    requested += 3 * blockIdx.x;
    logits += requested[0] * stride;
    out += blockIdx.x * width;
    Pair *pairs = reinterpret_cast<Pair *>(out + sizeof(Sums) / sizeof(int));

    Rank own = best_after(logits, V, ~0ull), best = over_block(own);
    const float maximum = logits[~unsigned(best)];
    Mass sum = 0;
    for (int id = threadIdx.x; id < V; id += blockDim.x) sum += mass(logits[id], maximum);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) sum_of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < blockDim.x / 32; ++warp) sum += sum_of_warp[warp];
        *reinterpret_cast<Sums *>(out) = {sum, maximum, logits[requested[1]]};
    }
    for (int i = 0; i < requested[2]; ++i) {
        if (threadIdx.x == 0) {
            pairs[i].id = best ? int(~unsigned(best)) : -1;
            pairs[i].logit = best ? logits[~unsigned(best)] : 0.0f;
        }
        if (best && own == best) own = best_after(logits, V, best);
        best = over_block(own);
    }
}

// The inputs of log-probabilities, of a token and of the most likely tokens: with them `token_logprob` of
// engine/sampling/sample.py needs a few numbers from the GPU instead of the row of logits.
//
// out (rows, width) words: a double, the sum of e^(x - best) over the row; 2 floats, best and the token's logit; then
// `count` pairs of int id and float logit, the largest first and equal ones by id; -1 and 0 behind the last token.
// asked (rows, 3) int32: row of the logits, token, count. logits (B, V), rows `stride` floats apart.
//
// Cost: V is read twice, with a double exponential for each logit. A thread keeps the best of its own tokens that is
// not listed yet, so each of `count` rounds is a maximum over the block, and one thread reads V / block logits again.
// Grid (rows), block 64 … 512: 512 for large V. DEFINES: none.
// PRECOND: V >= 1; width % 4 == 0, width >= 4 + 2 count, out aligned to 16 bytes; 0 <= token < V; logits without NaN,
// the largest is finite.
typedef unsigned long long Rank;

struct __align__(16) Sums {
    double sum;
    float best, own;
};

struct Pair {
    int id;
    float logit;
};

__shared__ double sums[512];
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

extern "C" __global__ void __launch_bounds__(512)
logprobs_kernel(int *out, const float *logits, const int *asked, int V, long long stride, int width) {
    asked += 3 * blockIdx.x;
    logits += asked[0] * stride;
    out += blockIdx.x * width;
    Pair *pairs = reinterpret_cast<Pair *>(out + sizeof(Sums) / sizeof(int));

    Rank own = best_after(logits, V, ~0ull), best = over_block(own);
    const float maximum = logits[~unsigned(best)];
    double sum = 0.0;
    for (int id = threadIdx.x; id < V; id += blockDim.x) sum += exp(double(logits[id]) - double(maximum));
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int thread = 1; thread < blockDim.x; ++thread) sum += sums[thread];
        *reinterpret_cast<Sums *>(out) = {sum, maximum, logits[asked[1]]};
    }
    for (int i = 0; i < asked[2]; ++i) {
        if (threadIdx.x == 0) {
            pairs[i].id = best ? int(~unsigned(best)) : -1;
            pairs[i].logit = best ? logits[~unsigned(best)] : 0.0f;
        }
        if (best && own == best) own = best_after(logits, V, best);
        best = over_block(own);
    }
}

// The op `route`: the experts of each row, best first, and their weights.
//
// ids, weights (T, TOP_K): experts with the largest scores, plus bias where there is one, and their scores without
// bias, divided by their sum with RENORMALIZE, times scale, times the expert's factor. logits (T, COUNT). bias, factors
// (COUNT) or null. Of equal scores, the lowest number is chosen. A row whose logits are not finite has experts 0, 1, …
// and NaN for weights. A warp has a row; lane l has experts l, l + 32, ….
// With GROUPS > 1, experts come from TOP_GROUPS groups of as many neighbouring experts each: those whose BEST largest
// scores with bias have the largest sum.
// Grid (ceil(T / warps of a block)), block 128. DEFINES: COUNT, TOP_K, SIGMOID (1: scores are σ of logits; 0: their
// softmax), RENORMALIZE (0 or 1), GROUPS, TOP_GROUPS, BEST (1 or 2).
// PRECOND: TOP_K <= COUNT / GROUPS * TOP_GROUPS, BEST <= COUNT / GROUPS.

constexpr int OWN = (COUNT + 31) / 32, NONE = 1 << 30, WARPS = 4;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The larger of two scores, and the number of its expert: of equal ones, the lower number.
__device__ __forceinline__ void take_better(float &score, int &expert, float other, int other_expert) {
    if (other > score || (other == score && other_expert < expert)) score = other, expert = other_expert;
}

#if GROUPS > 1
// Whether expert `expert` is in a group that is among the best. sums (GROUPS): of each group.
__device__ __forceinline__ bool is_in_best_groups(const float *sums, int expert) {
    const int group = expert / (COUNT / GROUPS);
    int better = 0;
    for (int other = 0; other < GROUPS; ++other)
        better += sums[other] > sums[group] || (sums[other] == sums[group] && other < group);
    return better < TOP_GROUPS;
}

// The sum of the BEST largest of a group's ranks (COUNT / GROUPS).
__device__ __forceinline__ float sum_best(const float *ranks) {
    float best = NEGATIVE_INFINITY, second = NEGATIVE_INFINITY;
    for (int i = 0; i < COUNT / GROUPS; ++i)
        second = fmaxf(second, fminf(best, ranks[i])), best = fmaxf(best, ranks[i]);
    return BEST > 1 ? best + second : best;
}
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS)
route_kernel(int *ids, float *weights, const float *logits, const float *bias, const float *factors, int rows,
             float scale) {
    let_next_begin();
    wait_for_previous();
    const int lane = threadIdx.x % 32, row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= rows) return;
    ids += row * (long long)TOP_K, weights += row * (long long)TOP_K, logits += row * (long long)COUNT;

    float scores[OWN], highest = NEGATIVE_INFINITY;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int expert = 32 * i + lane;
        scores[i] = expert < COUNT ? logits[expert] : NEGATIVE_INFINITY;
        if (expert < COUNT && !(fabsf(scores[i]) <= 3.4028235e38f)) finite = false;
        highest = fmaxf(highest, scores[i]);
    }
    if (!__all_sync(ALL_LANES, finite)) {
        for (int j = lane; j < TOP_K; j += 32) ids[j] = j, weights[j] = __int_as_float(0x7fc00000);
        return;
    }
    if (SIGMOID) {
#pragma unroll
        for (int i = 0; i < OWN; ++i) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
    } else {
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, step));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i) sum += scores[i] = expf(scores[i] - highest);
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < OWN; ++i) scores[i] /= sum;
    }

    unsigned taken[(OWN + 31) / 32] = {};  // bit i: the lane's score i was chosen, or may not be
#if GROUPS > 1
    __shared__ float all_ranks[WARPS][COUNT], all_sums[WARPS][GROUPS];
    float *ranks = all_ranks[threadIdx.x / 32], *sums = all_sums[threadIdx.x / 32];
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (32 * i + lane < COUNT) ranks[32 * i + lane] = scores[i] + (bias ? bias[32 * i + lane] : 0.0f);
    __syncwarp();
    for (int group = lane; group < GROUPS; group += 32) sums[group] = sum_best(ranks + group * (COUNT / GROUPS));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (32 * i + lane < COUNT && !is_in_best_groups(sums, 32 * i + lane)) taken[i / 32] |= 1u << i % 32;
#endif
    float sum = 0.0f;
#pragma unroll 1
    for (int j = 0; j < TOP_K; ++j) {
        float best = NEGATIVE_INFINITY;
        int chosen = NONE;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int expert = 32 * i + lane;
            if (expert >= COUNT || taken[i / 32] >> i % 32 & 1) continue;
            const float rank = scores[i] + (bias ? bias[expert] : 0.0f);
            take_better(best, chosen, rank == rank ? rank : NEGATIVE_INFINITY, expert);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            take_better(best, chosen, __shfl_xor_sync(ALL_LANES, best, step),
                        __shfl_xor_sync(ALL_LANES, chosen, step));
        float score = 0.0f;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (chosen == 32 * i + lane) score = scores[i], taken[i / 32] |= 1u << i % 32;
        score = __shfl_sync(ALL_LANES, score, chosen % 32);
        sum += score;
        if (lane == 0) ids[j] = chosen, weights[j] = factors ? score * factors[chosen] : score;
    }
    __syncwarp();
    for (int j = lane; j < TOP_K; j += 32) weights[j] = (RENORMALIZE ? weights[j] / sum : weights[j]) * scale;
}

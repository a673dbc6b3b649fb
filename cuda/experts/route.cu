// The op `route`: the experts of each row, best first, and their weights.
//
// ids, weights (T, TOP_K): experts with the largest scores, plus bias where there is one, and their scores without
// bias, divided by their sum with RENORMALIZE, times scale, times the expert's factor. logits (T, COUNT). bias, factors
// (COUNT) or null. Of equal scores, the lowest number is chosen. A row whose logits are not finite has experts 0, 1, …
// and NaN for weights. A warp has a row; lane l has experts l, l + 32, ….
// Grid (ceil(T / warps of a block)), block a multiple of 32. DEFINES: COUNT, TOP_K, SIGMOID (1: scores are σ of logits;
// 0: their softmax), RENORMALIZE (0 or 1).
// PRECOND: TOP_K <= COUNT.

constexpr int OWN = (COUNT + 31) / 32, NONE = 1 << 30;
constexpr unsigned ALL_LANES = 0xffffffffu;

// The larger of two scores, and the number of its expert: of equal ones, the lower number.
__device__ __forceinline__ void take_better(float &score, int &expert, float other, int other_expert) {
    if (other > score || (other == score && other_expert < expert)) score = other, expert = other_expert;
}

extern "C" __global__ void __launch_bounds__(128)
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

    unsigned taken[(OWN + 31) / 32] = {};  // bit i: the lane's score i was chosen
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

// The end of the op `experts`: the weighted sum of the results of each row's experts, in the order of its choice.
//
// y: rows of n numbers, `pitch` numbers apart; with ADD, y += the sum. parts (T · k, n): the result of expert j of row
// t is in row places[t · k + j], or t · k + j where places is null. weights (T, k); a result whose weight is 0 is left
// out.
// Grid (ceil(n / block), T), block any. DEFINES: ADD (0 or 1).
// PRECOND: none.
extern "C" __global__ void __launch_bounds__(1024)
add_experts_kernel(float *y, const float *parts, const float *weights, const int *places, int k, int n,
                   long long pitch) {
    let_next_begin();
    wait_for_previous();
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const long long first = blockIdx.y * (long long)k;
    float sum = 0.0f;
    for (int j = 0; j < k; ++j) {
        const long long place = places ? places[first + j] : first + j;
        const float weight = weights[first + j];
        if (weight != 0.0f) sum += weight * parts[place * n + i];
    }
    float *const at = y + blockIdx.y * pitch + i;
    *at = ADD ? *at + sum : sum;
}

// The op `self_attention` after `transform_heads`: every row of a text attends to all of them. An image is a text, too.
//
// out (T, H, D): Σ softmax(scale · q·k) v over the rows of the text, of which those up to window / 2 away if window is
// not 0. q: H vectors of D at q + r · q_stride for row r; k and v: K vectors each. tiles (tiles, 3): the first row of a
// text, its end, and the first of the WARPS · 16 rows that a CTA has. GROUP query heads share a KV head. Products take
// halves and add in float.
// Grid (tiles, H), block WARPS · 32. DEFINES: HEAD_DIM (D), GROUP, WARPS.
// PRECOND: D and strides even; out, q, k aligned to 8 bytes.
//
// Lane 4 · g + tg of a warp has its rows g and g + 8, and columns 2 · tg and 2 · tg + 1 of every tile of 8.

constexpr int D = HEAD_DIM, DP = (D + 15) / 16 * 16, STEPS = DP / 16, ROWS = WARPS * 16, KEYS = 32;
constexpr int KEY_PITCH = DP + 8, VALUE_PITCH = KEYS + 8;  // halves, so that lanes read different banks
constexpr float HIDDEN = -1e30f, LOG2_E = 1.4426950408889634f;

// Two channels of a row times a factor; zeros beyond the rows and channels that there are.
__device__ __forceinline__ unsigned channels(const float *row, bool is_there, int channel, float factor) {
    if (!is_there || channel >= D) return 0;
    const float2 pair = *reinterpret_cast<const float2 *>(row + channel);
    return halves_within(pair.x * factor, pair.y * factor);
}

__device__ __forceinline__ void load_operand(unsigned (&b)[2], const __half *at) {
    b[0] = *reinterpret_cast<const unsigned *>(at);
    b[1] = *reinterpret_cast<const unsigned *>(at + 8);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
text_attention_kernel(float *out, const float *q, const float *k, const float *v, const int *tiles, int heads,
                      long long q_stride, long long k_stride, long long v_stride, int window, float scale) {
    __shared__ __align__(16) __half keys[KEYS * KEY_PITCH];
    __shared__ __align__(16) __half values[DP * VALUE_PITCH];  // channel by channel
    const int lane = threadIdx.x % 32, g = lane / 4, tg = lane % 4, head = blockIdx.y, kv_head = head / GROUP;
    const int begin = tiles[3 * blockIdx.x], end = tiles[3 * blockIdx.x + 1], first = tiles[3 * blockIdx.x + 2];
    const int own = first + threadIdx.x / 32 * 16 + g, reach = window / 2;
    const int start = window ? max(begin, first - reach) : begin, stop = window ? min(end, first + ROWS + reach) : end;
    unsigned queries[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = own + i % 2 * 8;
            const float *const at = q + row * q_stride + head * D;
            queries[step][i] = channels(at, row < end, 16 * step + 2 * tg + i / 2 * 8, scale * LOG2_E);
        }
    float sums[DP / 8][4] = {}, top[2] = {HIDDEN, HIDDEN}, total[2] = {};
#pragma unroll 1
    for (int at = start; at < stop; at += KEYS) {
        __syncthreads();
        for (int i = threadIdx.x; i < KEYS * DP / 2; i += WARPS * 32) {
            const int row = i / (DP / 2), channel = i % (DP / 2) * 2;
            const float *const key = k + (at + row) * k_stride + kv_head * D;
            *reinterpret_cast<unsigned *>(keys + row * KEY_PITCH + channel) =
                channels(key, at + row < stop, channel, 1.0f);
        }
        for (int i = threadIdx.x; i < KEYS * DP / 2; i += WARPS * 32) {
            const int row = i / DP * 2, channel = i % DP;
            const float *const value = v + (at + row) * v_stride + kv_head * D + channel;
            const float one = channel < D && at + row < stop ? value[0] : 0.0f;
            const float next = channel < D && at + row + 1 < stop ? value[v_stride] : 0.0f;
            *reinterpret_cast<unsigned *>(values + channel * VALUE_PITCH + row) = halves_within(one, next);
        }
        __syncthreads();
        float scores[KEYS / 8][4] = {};
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned b[2];
                load_operand(b, keys + (8 * n + g) * KEY_PITCH + 16 * step + 2 * tg);
                mma_m16n8k16_f16(scores[n], queries[step], b);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = at + 8 * n + 2 * tg + i % 2, distance = key - own - i / 2 * 8;
                if (key >= stop || (window && abs(distance) > reach)) scores[n][i] = HIDDEN;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float highest = top[r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) highest = fmaxf(highest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            for (int step = 1; step < 4; step *= 2)
                highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
            const float rescale = exp2_fast(top[r] - highest);
            top[r] = highest, total[r] *= rescale;
#pragma unroll
            for (int n = 0; n < DP / 8; ++n) sums[n][2 * r] *= rescale, sums[n][2 * r + 1] *= rescale;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; ++i) {
                    scores[n][i] = exp2_fast(scores[n][i] - highest);
                    total[r] += scores[n][i];
                }
        }
#pragma unroll
        for (int step = 0; step < KEYS / 16; ++step) {
            unsigned weights[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float *const pair = scores[2 * step + i / 2] + i % 2 * 2;
                weights[i] = halves_within(pair[0], pair[1]);
            }
#pragma unroll
            for (int n = 0; n < DP / 8; ++n) {
                unsigned b[2];
                load_operand(b, values + (8 * n + g) * VALUE_PITCH + 16 * step + 2 * tg);
                mma_m16n8k16_f16(sums[n], weights, b);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        for (int step = 1; step < 4; step *= 2) total[r] += __shfl_xor_sync(0xffffffffu, total[r], step);
        const int row = own + 8 * r;
        if (row >= end) continue;
        float *const to = out + ((long long)row * heads + head) * D + 2 * tg;
#pragma unroll
        for (int n = 0; n < DP / 8; ++n)
            if (8 * n + 2 * tg < D)
                *reinterpret_cast<float2 *>(to + 8 * n) =
                    make_float2(sums[n][2 * r] / total[r], sums[n][2 * r + 1] / total[r]);
    }
}

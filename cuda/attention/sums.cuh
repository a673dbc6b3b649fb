// Sums of decode_attention.cu over warps and CTAs, and the result of a head. Part of that file.
//
// A sum of a cell is acc [HEADS][row], Σ 2^(score − max) v, and ml [HEADS][2], max and Σ 2^(score − max). acc is
// undefined from channel D on.
#ifndef TO
#define TO float
#endif

// Sums in global memory: one for each cell, of the one warp that goes on behind the cell's last unit; then one for each
// cell and each CTA that has a part of it, at the sum of both numbers, which no other pair has since both only grow
// along the row of units.
struct Sums {
    float *acc, *ml;
    int cells;  // an upper bound

    __device__ __forceinline__ int part(int cell, int cta) const { return cells + cell + cta; }
    __device__ __forceinline__ float *acc_at(int number) const { return acc + (long long)number * HEADS * DP; }
    __device__ __forceinline__ float *ml_at(int number) const { return ml + (long long)number * HEADS * 2; }
};

// Writes a warp's sum; `row` floats lie between heads of acc.
__device__ __forceinline__ void store_sum(const ColumnState &state, float *acc, int row, float *ml, int columns,
                                          int lane) {
    const int g = lane >> 2, tg = lane & 3;
#pragma unroll
    for (int c = 0; c < OWN_COLUMNS; ++c) {
        float sum = state.sum[c];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        const int head = 2 * tg + c;
        if (head >= columns) continue;
        float *own = acc + head * row + 2 * g;
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
            *reinterpret_cast<float2 *>(own + 16 * j) = make_float2(state.acc[j][c], state.acc[j][c + 2]);
        if (g == 0) *reinterpret_cast<float2 *>(ml + 2 * head) = make_float2(state.top[c], sum);
    }
}

// The sum of one head; lane l has channels l, l + 32, ….
struct HeadSum {
    static constexpr int OWN = (D + 31) / 32, FAR_BATCH = D > 128 ? 8 : 16;  // FAR_BATCH: of sums in global memory
    float acc[OWN] = {}, top = LOWEST, sum = 0.0f;

    // Adds `count` sums in order. acc_stride, ml_stride: floats from one to the next. BATCH: sums whose loads are in
    // flight together, those of the first batch while the maximum is found.
    template <int BATCH>
    __device__ __forceinline__ void add(const float *other, int acc_stride, const float *ml, int ml_stride, int count) {
        if (count == 0) return;
        const int lane = threadIdx.x % 32;
        float loaded[BATCH][OWN];
        const auto load = [&](int first) {
#pragma unroll
            for (int j = 0; j < BATCH; ++j)
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (lane + 32 * i < D)
                        loaded[j][i] = other[(long long)min(first + j, count - 1) * acc_stride + lane + 32 * i];
        };
        load(0);
        float next = top;
        for (int i = lane; i < count; i += 32) next = fmaxf(next, ml[i * ml_stride]);
#pragma unroll
        for (int step = 16; step > 0; step /= 2) next = fmaxf(next, __shfl_xor_sync(ALL_LANES, next, step));
        const float rescale = exp2_fast(top - next);
        top = next, sum *= rescale;
#pragma unroll
        for (int i = 0; i < OWN; ++i) acc[i] *= rescale;
#pragma unroll 1
        for (int s = 0; s < count; s += BATCH) {
            if (s > 0) load(s);
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int number = min(s + j, count - 1);
                const float weight = s + j < count ? exp2_fast(ml[number * ml_stride] - next) : 0.0f;
                sum += ml[number * ml_stride + 1] * weight;
#pragma unroll
                for (int i = 0; i < OWN; ++i)
                    if (lane + 32 * i < D) acc[i] += loaded[j][i] * weight;
            }
        }
    }

    __device__ __forceinline__ void store(float *to, float *ml) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (lane + 32 * i < D) to[lane + 32 * i] = acc[i];
        if (lane == 0) ml[0] = top, ml[1] = sum;
    }
};

// What the result of a query head is multiplied by, and its sink score.
struct HeadScale {
    float factor, sink_score;
};

// The end of the op: the mean of values, times the head's factor, rotated back.
struct Result {
    TO *out;
    const float *factors, *sink_scores;
    float before[HeadSum::OWN], behind[HeadSum::OWN];  // the lane's signs, loaded long before they are used

    __device__ __forceinline__ Result(TO *out, const float *factors, const float *sink_scores, const float *before_all,
                                      const float *behind_all)
        : out(out), factors(factors), sink_scores(sink_scores) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < HeadSum::OWN; ++i)
            if (ORDER > 1 && lane + 32 * i < D)
                before[i] = before_all[lane + 32 * i], behind[i] = behind_all[lane + 32 * i];
    }

    __device__ __forceinline__ HeadScale scale(int head) const {
        return {factors ? factors[head] : 1.0f, SINK_SCORES ? sink_scores[head] : 0.0f};
    }

    __device__ __forceinline__ void write(HeadSum &head, long long vector, const HeadScale &scale) const {
        const int lane = threadIdx.x % 32;
        float share = head.sum > 0.0f ? scale.factor / head.sum : 0.0f;
        if constexpr (SINK_SCORES) share = scale.factor * share_beside(scale.sink_score, head.top, head.sum);
        float(&v)[HeadSum::OWN] = head.acc;
#pragma unroll
        for (int i = 0; i < HeadSum::OWN; ++i) {
            v[i] *= share;
            if (ORDER > 1 && lane + 32 * i < D) v[i] *= before[i];
        }
        if constexpr (ORDER > 1) hadamard<ORDER>(v);
#pragma unroll
        for (int i = 0; i < HeadSum::OWN; ++i)
            if (lane + 32 * i < D) {
                const float value = ORDER > 1 ? v[i] * behind[i] : v[i];
                out[vector * D + lane + 32 * i] = from_float<TO>(within<TO>(value));
            }
    }
};

// The warps' last sums in shared memory, in place of the tables.
struct WarpSums {
    float *acc, *ml;

    __device__ __forceinline__ WarpSums(unsigned char *shared)
        : acc(reinterpret_cast<float *>(shared)), ml(acc + WARPS * HEADS * MERGE_ROW) {}

    // The CTA's sum of column c of a cell, of whose units the CTA has begin … end − 1.
    __device__ __forceinline__ HeadSum head(const Shares &warps, int begin, int end, int c, const Sums &sums,
                                            int cell) const {
        const int first = warps.taker(begin), last = warps.taker(end - 1);
        const bool has_tail = warps.end(last) > end;  // that warp goes on
        HeadSum head;
        const int at = first * HEADS + c;
        head.add<8>(acc + at * MERGE_ROW, HEADS * MERGE_ROW, ml + 2 * at, 2 * HEADS, last - first + !has_tail);
        if (has_tail) {
            head.add<1>(sums.acc_at(cell) + c * DP, 0, sums.ml_at(cell) + 2 * c, 0, 1);
        }
        return head;
    }
};

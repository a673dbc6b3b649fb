// Sums of decode_attention.cu over warps and CTAs, and the result of a head. Part of that file.
//
// A sum of a cell is acc [HEADS][row], Σ 2^(score − max) v, and ml [HEADS][2], max and Σ 2^(score − max). acc is
// undefined from channel D on.
#ifndef TO
#define TO float
#endif

// Sums in global memory: one for each cell, of the one warp that goes on after the cell's last unit; then one for each
// cell and each CTA that has a part of it, at the sum of both numbers, which no other pair has since both only grow
// along the row of units.
struct Sums {
    float *acc;
    float2 *ml;
    int cells;  // an upper bound

    __device__ __forceinline__ int part(int cell, int cta) const { return cells + cell + cta; }
    // The place of column c of sum `number`.
    __device__ __forceinline__ float *acc_at(int number, int c = 0) const {
        return acc + ((long long)number * HEADS + c) * DP;
    }
    __device__ __forceinline__ float2 *ml_at(int number, int c = 0) const {
        return ml + (long long)number * HEADS + c;
    }
};

// What a lane has of neighbouring channels, and the type of one access to them.
template <class T, int COUNT>
struct __align__(sizeof(T) * COUNT) Neighbours {
    T at[COUNT];
};
template <int BYTES>
struct Access;
template <>
struct Access<16> {
    using Type = uint4;
};
template <>
struct Access<8> {
    using Type = uint2;
};
template <>
struct Access<4> {
    using Type = unsigned;
};
template <>
struct Access<2> {
    using Type = unsigned short;
};

// Writes a warp's sum; `row` floats lie between heads of acc.
__device__ __forceinline__ void store_sum(const ColumnState &state, float *acc, int row, float2 *ml, int columns,
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
        if (g == 0) ml[head] = make_float2(state.top[c], sum);
    }
}

// The sum of one head. Lane l has its NEAR channels from NEAR · l on, those 32 · NEAR after them, and so on.
struct HeadSum {
    static constexpr int OWN = (D + 31) / 32, NEAR = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;
    // Sums in shared memory, and in global memory, whose loads are in flight together. With 20 of 128 channels, 132 or
    // 148 CTAs that share 8 KV heads have all of theirs.
    static constexpr int BATCH = 4, REGISTERS = WARPS > 8 ? 80 : 160;
    static constexpr int FAR_BATCH = REGISTERS / OWN < 32 ? REGISTERS / OWN : 32;
    float acc[OWN] = {}, top = LOWEST, sum = 0.0f;

    // Adds the channels of a sum, and its sum of weights, times `weight`.
    __device__ __forceinline__ void add(const float (&other)[OWN], float other_sum, float weight) {
        sum += other_sum * weight;
#pragma unroll
        for (int i = 0; i < OWN; ++i) acc[i] += other[i] * weight;
    }

    // Adds one sum. ml: its maximum and its sum of weights.
    __device__ __forceinline__ void add(const float *other, float2 ml) {
        float loaded[OWN] = {};
        load_channels(loaded, other);
        const float highest = fmaxf(top, ml.x), rescale = exp2_fast(top - highest);
        top = highest, sum *= rescale;
#pragma unroll
        for (int i = 0; i < OWN; ++i) acc[i] *= rescale;
        add(loaded, ml.y, exp2_fast(ml.x - highest));
    }

    // Becomes the sum of `count` sums that other CTAs may have stored, added in order. acc, ml: of the first one.
    __device__ __forceinline__ void add_all(const float *acc, const float2 *ml, int count) {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int first = 0; first < count; first += FAR_BATCH) {
            // Lane j has the maximum and the sum of weights of sum first + j.
            const float2 own =
                lane < count - first ? ml[(long long)(first + lane) * HEADS] : make_float2(LOWEST, 0.0f);
            float loaded[FAR_BATCH][OWN] = {};
#pragma unroll
            for (int j = 0; j < FAR_BATCH; ++j)
                if (j < count - first) load_channels(loaded[j], acc + (long long)(first + j) * (HEADS * DP));
            if (first == 0) {
                top = own.x;
#pragma unroll 1
                for (int i = lane + 32; i < count; i += 32) top = fmaxf(top, ml[(long long)i * HEADS].x);
                top = warp_max(top);
            }
            const float weight = exp2_fast(own.x - top);
#pragma unroll
            for (int j = 0; j < FAR_BATCH; ++j)
                add(loaded[j], __shfl_sync(ALL_LANES, own.y, j), __shfl_sync(ALL_LANES, weight, j));
        }
    }

    __device__ __forceinline__ void store(float *to, float2 *ml) const {
        store_channels(to, acc);
        if (threadIdx.x % 32 == 0) *ml = make_float2(top, sum);
    }

    // The lane's channels of a vector of D numbers.
    static __device__ __forceinline__ void load_channels(float (&x)[OWN], const float *vector) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; i += NEAR) {
            if (NEAR == 1 && lane + 32 * i >= D) continue;
            const Neighbours<float, NEAR> own =
                *reinterpret_cast<const Neighbours<float, NEAR> *>(vector + 32 * i + NEAR * lane);
#pragma unroll
            for (int j = 0; j < NEAR; ++j) x[i + j] = own.at[j];
        }
    }
    template <class T>
    static __device__ __forceinline__ void store_channels(T *vector, const float (&x)[OWN]) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OWN; i += NEAR) {
            if (NEAR == 1 && lane + 32 * i >= D) continue;
            Neighbours<T, NEAR> own;
#pragma unroll
            for (int j = 0; j < NEAR; ++j) own.at[j] = from_float<T>(within<T>(x[i + j]));
            using One = typename Access<sizeof own>::Type;
            __stcg(reinterpret_cast<One *>(vector + 32 * i + NEAR * lane), *reinterpret_cast<const One *>(&own));
        }
    }
};

// What the result of a query head is multiplied by, and its sink score.
struct HeadScale {
    float factor, sink_score;
};

// Where results go, and what of the kernel's arguments changes them.
struct Target {
    TO *out;
    const float *factors, *input_signs, *output_signs, *sink_scores;
};

// The end of the op: the mean of values, times the head's factor, rotated back.
struct Result {
    TO *out;
    const float *factors, *sink_scores;
    // the lane's signs, loaded long before they are used
    float input_signs[HeadSum::OWN] = {}, output_signs[HeadSum::OWN] = {};

    __device__ __forceinline__ explicit Result(const Target &target)
        : out(target.out), factors(target.factors), sink_scores(target.sink_scores) {
        if constexpr (ORDER > 1) {
            HeadSum::load_channels(input_signs, target.input_signs);
            HeadSum::load_channels(output_signs, target.output_signs);
        }
    }

    __device__ __forceinline__ HeadScale scale(int head) const {
        return {factors ? factors[head] : 1.0f, SINK_SCORES ? sink_scores[head] : 0.0f};
    }

    __device__ __forceinline__ void write(HeadSum &head, int vector, const HeadScale &scale) const {
        float share = head.sum > 0.0f ? scale.factor / head.sum : 0.0f;
        if constexpr (SINK_SCORES) share = scale.factor * share_with_sink(scale.sink_score, head.top, head.sum);
        float(&v)[HeadSum::OWN] = head.acc;
#pragma unroll
        for (int i = 0; i < HeadSum::OWN; ++i) {
            v[i] *= share;
            if constexpr (ORDER > 1) v[i] *= input_signs[i];
        }
        if constexpr (ORDER > 1) {
            hadamard<ORDER, HeadSum::NEAR>(v);
#pragma unroll
            for (int i = 0; i < HeadSum::OWN; ++i) v[i] *= output_signs[i];
        }
        HeadSum::store_channels(out + (long long)vector * D, v);
    }
};

// The warps' last sums in shared memory, in place of the tables.
struct WarpSums {
    float *acc;
    float2 *ml;

    __device__ __forceinline__ WarpSums(unsigned char *shared)
        : acc(reinterpret_cast<float *>(shared)), ml(reinterpret_cast<float2 *>(acc + WARPS * HEADS * MERGE_ROW)) {}

    // The CTA's sum of column c of a cell, of whose units the CTA has begin … end − 1.
    __device__ __forceinline__ HeadSum head(const Shares &warps, int begin, int end, int c, const Sums &sums,
                                            int cell) const {
        // Lane w looks at the share of warp w: which ones have some of these units, and which one goes on after them.
        const int lane = threadIdx.x % 32, own_begin = warps.begin(lane), own_end = warps.end(lane);
        const bool is_part = lane < WARPS && own_begin < own_end && own_begin < end && own_end > begin;
        const bool is_here = is_part && own_end <= end;
        const unsigned here = __ballot_sync(ALL_LANES, is_here);
        const bool has_tail = __any_sync(ALL_LANES, is_part && !is_here);
        const float2 own = is_here ? ml[lane * HEADS + c] : make_float2(LOWEST, 0.0f);
        HeadSum head;
        head.top = warp_max(own.x);
        const float weight = exp2_fast(own.x - head.top);
        const unsigned last = 32 - __clz(here);
#pragma unroll 1
        for (unsigned first = __ffs(here) - 1; first < last; first += HeadSum::BATCH) {
            float loaded[HeadSum::BATCH][HeadSum::OWN] = {};
            const float *const first_row = acc + (first * HEADS + c) * MERGE_ROW;
#pragma unroll
            for (int j = 0; j < HeadSum::BATCH; ++j)
                if (first + j < last) HeadSum::load_channels(loaded[j], first_row + j * (HEADS * MERGE_ROW));
#pragma unroll
            for (int j = 0; j < HeadSum::BATCH; ++j)
                head.add(loaded[j], __shfl_sync(ALL_LANES, own.y, first + j),
                         __shfl_sync(ALL_LANES, weight, first + j));
        }
        if (has_tail) head.add(sums.acc_at(cell, c), *sums.ml_at(cell, c));
        return head;
    }
};


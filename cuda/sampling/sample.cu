// The next token of every sequence: `sample` of engine/sampling/sample.py without logit_bias and DRY, so that only ids
// leave the GPU.
//
// ids (B): the token, or -1 where the largest logit is not finite. logits (B, V), rows `stride` apart; penalised in
// place and restored at the end. draws (B, 8 + 64): float temperature, top_k, top_p, min_p, repeat_penalty,
// presence_penalty, frequency_penalty, uniform in [0, 1); int ids of the last tokens, -1 for none.
//
// Nothing is sorted. The order "largest first, equal ones by id" gives every token a place, one integer; what a cut
// keeps is all places up to a last one, which a descent finds digit by digit: a histogram of the digit, then the bin in
// which the count (top-k) or the mass (top-p, the draw) is reached. Masses are whole multiples of 2^-44 of the best
// token's: their sums are exact in any order, so the same input always gives the same token.
// Cost: V is read for the maximum, and to copy the best thousand or so tokens to shared memory, where the rest happens;
// once more for the sum of all masses if there is no top-k. The maxima of single threads tell which are the best: at
// least n tokens are not below the n-th largest of them, and not many more. Where the answer lies behind those (flat
// logits at high temperature) a descent reads V once per 8 bits of a place, seven times at most.
// Grid (B), block 64 ... 512: 512 for large V. DEFINES: none.
// PRECOND: 1 <= V <= 2^19, V <= stride; logits aligned to 16 bytes, stride % 4 == 0; recent tokens < V.
typedef unsigned long long Mass, Place;

constexpr int ROOM = 4096, BINS = 256, DIGIT = 8, RECENT = 64;
constexpr float UNIT = 17592186044416.0f;  // 2^44: the mass of the best token
constexpr float LOG2_E = 1.44269504f;
#define NEGATIVE_INFINITY __int_as_float(0xff800000)

struct Params {
    float temperature, top_k, top_p, min_p, repeat, presence, frequency, uniform;
};

// Larger for larger floats; -0 is 0.
__device__ __forceinline__ unsigned key(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float of_key(unsigned k) { return __uint_as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); }

struct Row {
    const float *logits;
    int count, id_bits;
    float best;
    unsigned best_key;

    __device__ __forceinline__ Place place(float x, int id) const {
        return Place(best_key - key(x)) << id_bits | unsigned(id);
    }
};

// What the cuts so far have kept.
struct __align__(16) Kept {
    Place last;
    float floor;  // of x - best

    __device__ __forceinline__ bool holds(float difference, Place place) const {
        return place <= last && difference >= floor;
    }
};

struct __align__(16) Sum {
    Mass total;
    Place last;  // of what has any weight
};

struct Shared {
    Row row;
    Kept kept;
    Kept covered;        // what the list holds for certain
    float values[ROOM];  // the list: some tokens, among them all those up to a place, in any order
    int ids[ROOM];
    int listed;
    unsigned low[BINS], high[BINS], counts[BINS];  // all 0 but within a level of a descent
    Place places[BINS];                            // some token of each bin
    Sum sums[32];
    Mass target;  // the outcome of a level
    int bin, alone;
};
__shared__ Shared s;

// rate: e^(difference / temperature) = 2^(difference · rate); 0 counts tokens.
__device__ __forceinline__ Mass weight(float difference, float rate) {
    return rate > 0.0f ? Mass(exp2_fast(difference * rate) * UNIT) : 1;
}

// visit(value, id) for every token of the list, or of the row; a thread's ids ascend in a row.
// AHEAD loads of a thread are on their way at once.
template <int AHEAD, class Visit>
__device__ __forceinline__ void each(const Row &row, bool in_list, Visit visit) {
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
        for (int a = 0; a < AHEAD; ++a)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (first + a * step + j < row.count) visit(x[a].at[j], first + a * step + j);
    }
}

// The sum of the totals and the last of the places, of all threads and in all of them.
__device__ __forceinline__ Sum over_block(Sum sum) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        sum.total += __shfl_xor_sync(0xffffffffu, sum.total, step);
        sum.last = max(sum.last, __shfl_xor_sync(0xffffffffu, sum.last, step));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = {0, 0};
    for (int warp = 0; warp < blockDim.x / 32; ++warp)
        sum = {sum.total + s.sums[warp].total, max(sum.last, s.sums[warp].last)};
    return sum;
}

// The weights of what is kept of the list or of the row, in all threads.
__device__ __noinline__ Sum measure(bool in_list, float rate) {
    const Row row = s.row;
    const Kept kept = s.kept;
    Sum sum = {0, 0};
    each<8>(row, in_list, [&](float x, int id) {
        const Place place = row.place(x, id);
        const Mass w = kept.holds(x - row.best, place) ? weight(x - row.best, rate) : 0;
        sum.total += w;
        if (w) sum.last = max(sum.last, place);
    });
    return over_block(sum);
}

// One warp: the bin that holds the target, what is left of the target in it, whether it has one token alone. Bins are 0
// afterwards.
__device__ __forceinline__ void choose_bin(Mass target) {
    constexpr int OWN = BINS / 32;
    const int lane = threadIdx.x % 32;
    Mass weights[OWN], sum = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) sum += weights[i] = Mass(s.high[lane * OWN + i]) << 32 | s.low[lane * OWN + i];
    Mass until = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Mass before = __shfl_up_sync(0xffffffffu, until, step);
        if (lane >= step) until += before;
    }
    Mass before = until - sum;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const int bin = lane * OWN + i;
        if (before <= target && target - before < weights[i]) {
            s.bin = bin;
            s.target = target - before;
            s.alone = s.counts[bin] == 1;
        }
        before += weights[i];
        s.low[bin] = s.high[bin] = s.counts[bin] = 0;
    }
}

// The first place at which the weights of what is kept come to more than `target`, which is below their sum.
// last: no place with a weight lies behind it.
__device__ __noinline__ Place descend(bool in_list, float rate, Place last, Mass target) {
    const Row row = s.row;
    const Kept kept = s.kept;
    int top = row.id_bits;
    while (last >> top) ++top;
    Place prefix = 0;  // the bits from `top` up of the place that is looked for
    while (top > 0) {
        const int shift = max(top - DIGIT, 0);
        each<2>(row, in_list, [&](float x, int id) {
            const Place place = row.place(x, id);
            if (place >> top != prefix || !kept.holds(x - row.best, place)) return;
            const Mass w = weight(x - row.best, rate);
            if (w == 0) return;
            const int bin = int(place >> shift) & ((1 << (top - shift)) - 1);
            // 64 bits in two sums of 32: exactly one addition sees each overflow of the lower one.
            const unsigned low = unsigned(w), carry = atomicAdd(&s.low[bin], low) + low < low;
            const unsigned high = unsigned(w >> 32) + carry;
            if (high) atomicAdd(&s.high[bin], high);
            atomicAdd(&s.counts[bin], 1u);
            atomicExch(&s.places[bin], place);
        });
        __syncthreads();
        if (threadIdx.x < 32) choose_bin(target);
        __syncthreads();
        prefix = prefix << (top - shift) | unsigned(s.bin);
        target = s.target;
        top = shift;
        if (s.alone) return s.places[s.bin];
    }
    return prefix;
}

// Lists the best tokens: `maximum` and `id` are the first largest of each thread. The list goes down to the smallest of
// the best 7/8 of these, or of the best top_k if that is fewer; it stays empty where it has no room for that.
__device__ __forceinline__ void list_best(float maximum, int id, int top_k) {
    const Row row = s.row;
    const int threads = min(int(blockDim.x), (row.count + 3) / 4);
    if (threadIdx.x < threads) s.values[threadIdx.x] = maximum, s.ids[threadIdx.x] = id;
    if (threadIdx.x == 0) s.listed = threads;
    __syncthreads();
    const int wanted = threads - threads / 8, enough = top_k ? min(top_k, wanted) : wanted;
    const Place worst = row.place(NEGATIVE_INFINITY, row.count - 1);
    const unsigned last = unsigned(descend(true, 0.0f, worst, enough - 1) >> row.id_bits);
    const float least = of_key(row.best_key - last);
    __syncthreads();
    if (threadIdx.x == 0) s.listed = 0;
    __syncthreads();
    each<8>(row, false, [&](float x, int i) {
        if (x < least) return;
        const int at = atomicAdd(&s.listed, 1);
        if (at < ROOM) s.values[at] = x, s.ids[at] = i;
    });
    __syncthreads();
    if (threadIdx.x > 0) return;
    const bool fits = s.listed <= ROOM;
    s.covered = {fits ? (Place(last) + 1 << row.id_bits) - 1 : 0, fits ? least - row.best : 1.0f};
    if (!fits) s.listed = 0;
}

// Of what is kept, only places up to `last` and values down to best + floor stay.
__device__ __forceinline__ void keep(Place last, float floor) {
    __syncthreads();
    if (threadIdx.x == 0) s.kept = {last, floor};
    __syncthreads();
}

__device__ __forceinline__ Place cut_by_count(int count) {
    const Sum of_list = measure(true, 0.0f);
    const bool in_list = count <= of_list.total;
    return descend(in_list, 0.0f, in_list ? of_list.last : measure(false, 0.0f).last, count - 1);
}

// The first place at which the masses come to `share` of their sum, or with `more` to more than that.
__device__ __forceinline__ Place cut_by_mass(float rate, float share, bool more) {
    const Sum of_list = measure(true, rate);
    const bool covered = s.kept.last <= s.covered.last || s.kept.floor > s.covered.floor;
    const Sum all = covered ? of_list : measure(false, rate);
    const double reached = double(share) * double(all.total);
    const Mass target = min(more ? Mass(reached) : max(Mass(ceil(reached)), Mass(1)) - 1, all.total - 1);
    const bool in_list = target < of_list.total;
    return descend(in_list, rate, in_list ? of_list.last : all.last, target);
}

// The token, in all threads. best and best_key of the row are still to be found.
__device__ __forceinline__ int draw(Row row, const Params &p) {
    float maximum = NEGATIVE_INFINITY;
    int id = 4 * threadIdx.x;
    bool is_nan = false;
    each<8>(row, false, [&](float x, int i) {
        is_nan |= x != x;
        if (x > maximum) maximum = x, id = i;
    });
    if (__syncthreads_or(is_nan)) return -1;
    const Place first = over_block({0, Place(key(maximum)) << 32 | ~unsigned(id)}).last;
    row.best_key = unsigned(first >> 32);
    row.best = of_key(row.best_key);
    if (row.best - row.best != 0.0f) return -1;  // an infinity
    const int top_k = p.top_k < row.count ? int(p.top_k) : 0;
    if (p.temperature == 0.0f || top_k == 1 || row.count == 1) return int(~unsigned(first));

    if (threadIdx.x == 0) s.row = row;
    keep(~0ull, NEGATIVE_INFINITY);
    list_best(maximum, id, top_k);
    __syncthreads();
    if (top_k) keep(cut_by_count(top_k), NEGATIVE_INFINITY);
    if (p.top_p < 1.0f) keep(cut_by_mass(LOG2_E, p.top_p, false), NEGATIVE_INFINITY);
    if (p.min_p > 0.0f) keep(s.kept.last, logf(p.min_p));
    const Place drawn = cut_by_mass(LOG2_E / max(p.temperature, 1e-30f), p.uniform, true);
    return int(drawn & ((Place(1) << row.id_bits) - 1));
}

extern "C" __global__ void __launch_bounds__(512)
sample_kernel(int *ids, float *logits, const int *draws, int V, long long stride) {
    draws += blockIdx.x * (sizeof(Params) / sizeof(int) + RECENT);
    const Params &p = *reinterpret_cast<const Params *>(draws);
    const int *recent = draws + sizeof(Params) / sizeof(int);
    logits += blockIdx.x * stride;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.low[i] = s.high[i] = s.counts[i] = s.places[i] = 0;

    // A thread for each of the recent tokens: the first one with a token penalises it.
    int token = threadIdx.x < RECENT ? recent[threadIdx.x] : -1, occurrences = 0;
    for (int i = 0; token >= 0 && i < RECENT; ++i) {
        const bool same = recent[i] == token;
        if (same && i < threadIdx.x) token = -1;
        occurrences += same;
    }
    const float before = token >= 0 ? logits[token] : 0.0f;
    if (token >= 0) {
        const float seen = before > 0.0f ? __fdiv_rn(before, p.repeat) : __fmul_rn(before, p.repeat);
        logits[token] = float(double(seen) - occurrences * double(p.frequency) - double(p.presence));
    }
    __syncthreads();
    const int id = draw({logits, V, 32 - __clz(V - 1), 0.0f, 0}, p);
    __syncthreads();
    if (token >= 0) logits[token] = before;
    if (threadIdx.x == 0) ids[blockIdx.x] = id;
}

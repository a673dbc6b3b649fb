// The best tokens of a row in the order of their ranks, in the shared memory of one block. Part of sample.cu.
constexpr int ROOM = 2048, BINS = 1024;

struct Shared {
    __align__(16) unsigned bins[BINS + 4];  // bins of `sort`, or histograms of `descend`
    __align__(16) Rank ranks[ROOM];         // tokens
    Mass partial[THREADS / 32];
    int found, base;    // ranks of this block, and their place in the row's list; or the place of a cut
    Row row;            // for `measure` and `descend`
    Mass target;        // what a step of `descend` has found: the target within the bin,
    int alone;          // and whether the bin holds one token only
};
__shared__ Shared s;

// The sum over the threads before this one; total: over all.
__device__ __forceinline__ Mass sum_before(Mass own, Mass &total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Mass until = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const Mass earlier = __shfl_up_sync(0xffffffffu, until, step);
        if (lane >= step) until += earlier;
    }
    __syncthreads();
    if (lane == 31) s.partial[warp] = until;
    __syncthreads();
    Mass earlier = until - own;
    total = 0;
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) {
        if (w == warp) earlier += total;
        total += s.partial[w];
    }
    return earlier;
}

// The largest of all threads' numbers, in all threads.
__device__ __forceinline__ Rank largest(Rank x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, step));
    __syncthreads();
    if (threadIdx.x % 32 == 0) s.partial[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < THREADS / 32; ++w) x = max(x, s.partial[w]);
    return x;
}

// Puts the ranks that all threads give into s.ranks, in ascending order, and returns how many there are. NONE is left
// out, and so must be logits of -infinity. Bins divide the logits evenly, so that few have more than some tokens, among
// which each token counts those before it.
template <int N>
__device__ __forceinline__ int sort(const Row &row, const Rank (&own_ranks)[N]) {
    Rank worst = 0;
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (own_ranks[i] != NONE) worst = max(worst, own_ranks[i]);
    uint4 &own_bins = *reinterpret_cast<uint4 *>(s.bins + 4 * threadIdx.x);
    own_bins = make_uint4(0, 0, 0, 0);
    const float scale = __fdiv_rn(float(BINS), row.best - row.value(largest(worst)));
    int bins[N], places[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (own_ranks[i] == NONE) continue;
        bins[i] = int(fminf((row.best - row.value(own_ranks[i])) * scale, BINS - 1.0f));  // NaN becomes the last bin
        places[i] = atomicAdd(&s.bins[bins[i]], 1u);
    }
    __syncthreads();
    const uint4 counts = own_bins;
    Mass total;
    const unsigned start = unsigned(sum_before(counts.x + counts.y + counts.z + counts.w, total));
    own_bins = make_uint4(start, start + counts.x, start + counts.x + counts.y, start + counts.x + counts.y + counts.z);
    if (threadIdx.x == 0) s.bins[BINS] = unsigned(total);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (own_ranks[i] != NONE) s.ranks[s.bins[bins[i]] + places[i]] = own_ranks[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (own_ranks[i] == NONE) continue;
        const int end = s.bins[bins[i] + 1];
        places[i] = s.bins[bins[i]];
        for (int other = places[i], first = other; other < end; ++other) places[i] += s.ranks[other] < own_ranks[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (own_ranks[i] != NONE) s.ranks[places[i]] = own_ranks[i];
    __syncthreads();
    return int(total);
}

// For a sum of masses: the target that is exceeded where the masses reach `share` of it; with `more`, exceed it.
__device__ __forceinline__ Mass target_of(Mass total, float share, bool more) {
    const double reached = double(share) * double(total);
    return min(more ? Mass(reached) : max(Mass(ceil(reached)), Mass(1)) - 1, total - 1);
}

// The best tokens, in s.ranks, that are kept so far.
struct Best {
    int count;
    bool all;     // no other token of the row is kept
    float floor;  // least logit - best: others are not kept

    __device__ __forceinline__ Mass mass(const Row &row, int i, float rate) const {
        const float difference = row.value(s.ranks[i]) - row.best;
        return difference >= floor ? weight(difference, rate) : 0;
    }

    // The place of the first token at which the masses reach `share` of the sum over all kept tokens (`more`: exceed
    // it); -1 if it is not among these. of_row: that sum, unless these are all.
    __device__ __forceinline__ int cut(const Row &row, float rate, float share, bool more, Mass row_mass) const {
        const int each = (count + THREADS - 1) / THREADS, first = threadIdx.x * each, end = min(first + each, count);
        Mass own = 0, total;
        for (int i = first; i < end; ++i) own += mass(row, i, rate);
        Mass earlier = sum_before(own, total);
        const Mass target = target_of(all ? total : row_mass, share, more);
        if (target >= total) return -1;
        if (earlier <= target && target - earlier < own) {
            int i = first;
            while ((earlier += mass(row, i, rate)) <= target) ++i;
            s.found = i;
        }
        __syncthreads();
        return s.found;
    }
};

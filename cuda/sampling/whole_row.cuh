// What one block finds by reading a whole row, several times. Part of sample.cu.
//
// The last rank is found by radix selection: for one digit after the other, a histogram of the digit, then the bin in
// which the count (top-k) or the mass (top-p, the draw) is reached.
constexpr int DIGIT = 8;
static_assert(1 << DIGIT == THREADS && 3 * THREADS <= BINS, "a thread has a bin, of three histograms");

// The tokens kept so far: ranks from `first` to `last`, and logits down to best + floor.
struct Kept {
    Rank last;
    float floor;  // least logit - best
    Rank first;   // 0 without XTC

    __device__ __forceinline__ bool holds(float difference, Rank rank) const {
        return rank <= last && difference >= floor && rank >= first;
    }
};

// Calls visit(value, id) for every token of the row. A thread has AHEAD loads in flight.
template <int AHEAD, class Visit>
__device__ __forceinline__ void each(const Row &row, Visit visit) {
    constexpr int STEP = 4 * THREADS;
    for (int first = 4 * threadIdx.x; first < row.count; first += AHEAD * STEP) {
        float x[AHEAD][4];
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) row.load(x[a], first + a * STEP);
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            row.forbid(x[a], first + a * STEP);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (first + a * STEP + j < row.count) visit(x[a][j], first + a * STEP + j);
        }
    }
}

// The sum of the kept tokens' masses.
__device__ __noinline__ Mass measure(Kept keeps, float rate) {
    const Row row = s.row;
    Mass own = 0, total;
    each<8>(row, [&](float x, int id) {
        if (keeps.holds(x - row.best, row.rank(x, id))) own += weight(x - row.best, rate);
    });
    sum_before(own, total);
    return total;
}

// The first rank at which the weights of the kept tokens add up to more than `target`, which is below their sum.
__device__ __noinline__ Rank descend(Kept keeps, float rate, Mass target) {
    const Row row = s.row;
    unsigned *const low = s.bins, *const high = low + THREADS, *const counts = high + THREADS;
    int top = row.id_bits;
    for (Rank worst = row.rank(NEGATIVE_INFINITY, row.count - 1); worst >> top;) ++top;
    Rank prefix = 0;  // bits of that rank from bit `top` up
    while (top > 0) {
        const int shift = max(top - DIGIT, 0);
        low[threadIdx.x] = high[threadIdx.x] = counts[threadIdx.x] = 0;
        s.ranks[threadIdx.x] = 0;
        __syncthreads();
        each<4>(row, [&](float x, int id) {
            const Rank rank = row.rank(x, id);
            if (rank >> top != prefix || !keeps.holds(x - row.best, rank)) return;
            const Mass w = weight(x - row.best, rate);
            if (w == 0) return;
            const int bin = int(rank >> shift) & ((1 << (top - shift)) - 1);
            // A 64-bit sum in two of 32 bits: each overflow of the lower one is seen by exactly one addition.
            const unsigned begin = unsigned(w), carry = atomicAdd(&low[bin], begin) + begin < begin;
            const unsigned rest = unsigned(w >> 32) + carry;
            if (rest) atomicAdd(&high[bin], rest);
            atomicAdd(&counts[bin], 1u);
            atomicExch(&s.ranks[bin], rank);
        });
        __syncthreads();
        const Mass own = Mass(high[threadIdx.x]) << 32 | low[threadIdx.x];
        Mass total;
        const Mass earlier = sum_before(own, total);
        if (earlier <= target && target - earlier < own) {
            s.found = threadIdx.x;
            s.target = target - earlier;
            s.alone = counts[threadIdx.x] == 1;
        }
        __syncthreads();
        prefix = prefix << (top - shift) | unsigned(s.found);
        target = s.target;
        top = shift;
        if (s.alone) return s.ranks[s.found];
        __syncthreads();
    }
    return prefix;
}

__device__ __forceinline__ Rank cut_row(Kept keeps, float rate, float share, bool more) {
    return descend(keeps, rate, target_of(measure(keeps, rate), share, more));
}

// The op `sample`: the next token of every sequence, as in engine/sampling/sample.py; only ids leave the GPU.
//
// ids (B): the token; -1 where the logits are not finite, -2 where biases and mask leave no token. logits (B, V), rows
// `stride` floats apart; biases, penalties and DRY change them in place and are undone at the end. draws: the table of
// adjust.cuh. saved: scratch, as many floats as the table has words, where rows have lists. newest (B), or null: the
// token behind which each row's logits come, for lists that do not know it.
//
// Nothing is sorted. The order "largest first, equal ones by id" gives every token a rank, one integer. Top-k and
// top-p keep all ranks up to a last one, which is found by radix selection: for one digit after the other, a histogram
// of the digit, then the bin in which the count (top-k) or the mass (top-p, the draw) is reached. Masses are integers,
// in units of 2^-44 of the best token's: sums do not depend on the order, so the same input gives the same token.
// Cost: V is read once for the maximum and once to copy the best tokens, about a thousand, to shared memory, where the
// rest happens; once more for the sum of all masses if there is no top-k. The maxima of single threads bound the best
// tokens: at least n tokens are not below the n-th largest maximum, and few more. If the last rank is not among them
// (flat logits at high temperature), the selection reads V once for each 8 bits of a rank, seven times at most.
// A list costs two accesses to each of its logits; a mask V / 8 bytes with every read of V.
// Grid (B), block 64 … 512: 512 for large V. DEFINES: none.
// JOINS: adjust.cuh, row.cuh.
// PRECOND: 1 <= V <= 2^19, V <= stride; logits aligned to 16 bytes, stride % 4 == 0; table aligned to 16 bytes; ids of
// lists < V, recent <= 64.
constexpr int NOT_FINITE = -1, NOTHING_LEFT = -2;  // instead of an id

// The sum of all threads' totals and the largest of their last ranks, in all threads.
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

// The weights of the kept tokens of the list, or of the row, in all threads.
__device__ __noinline__ Sum measure(bool in_list, float rate) {
    const Row row = s.row;
    const Kept kept = s.kept;
    Sum sum = {0, 0};
    each<8>(row, in_list, [&](float x, int id) {
        const Rank rank = row.rank(x, id);
        const Mass w = kept.holds(x - row.best, rank) ? weight(x - row.best, rate) : 0;
        sum.total += w;
        if (w) sum.last = max(sum.last, rank);
    });
    return over_block(sum);
}

// One warp chooses the bin in which the weights reach the target: s.bin, s.target within the bin, and s.alone. The
// histogram is 0 afterwards.
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

// The first rank at which the weights of the kept tokens add up to more than `target`, which is below their sum.
// last: no token with a weight has a larger rank.
__device__ __noinline__ Rank descend(bool in_list, float rate, Rank last, Mass target) {
    const Row row = s.row;
    const Kept kept = s.kept;
    int top = row.id_bits;
    while (last >> top) ++top;
    Rank prefix = 0;  // bits of that rank from bit `top` up
    while (top > 0) {
        const int shift = max(top - DIGIT, 0);
        each<2>(row, in_list, [&](float x, int id) {
            const Rank rank = row.rank(x, id);
            if (rank >> top != prefix || !kept.holds(x - row.best, rank)) return;
            const Mass w = weight(x - row.best, rate);
            if (w == 0) return;
            const int bin = int(rank >> shift) & ((1 << (top - shift)) - 1);
            // A 64-bit sum in two of 32 bits: each overflow of the lower one is seen by exactly one addition.
            const unsigned low = unsigned(w), carry = atomicAdd(&s.low[bin], low) + low < low;
            const unsigned high = unsigned(w >> 32) + carry;
            if (high) atomicAdd(&s.high[bin], high);
            atomicAdd(&s.counts[bin], 1u);
            atomicExch(&s.ranks[bin], rank);
        });
        __syncthreads();
        if (threadIdx.x < 32) choose_bin(target);
        __syncthreads();
        prefix = prefix << (top - shift) | unsigned(s.bin);
        target = s.target;
        top = shift;
        if (s.alone) return s.ranks[s.bin];
    }
    return prefix;
}

// Lists the best tokens. maximum, id: each thread's largest logit, the first of equal ones. The list goes down to the
// smallest of the best 7/8 of these maxima, or of the best top_k if that is fewer; it stays empty if it has no room.
__device__ __forceinline__ void list_best(float maximum, int id, int top_k) {
    const Row row = s.row;
    const int threads = min(int(blockDim.x), (row.count + 3) / 4);
    if (threadIdx.x < threads) s.values[threadIdx.x] = maximum, s.ids[threadIdx.x] = id;
    if (threadIdx.x == 0) s.listed = threads;
    __syncthreads();
    const int wanted = threads - threads / 8, enough = top_k ? min(top_k, wanted) : wanted;
    const Rank worst = row.rank(NEGATIVE_INFINITY, row.count - 1);
    const unsigned last = unsigned(descend(true, 0.0f, worst, enough - 1) >> row.id_bits);
    const float least = from_key(row.best_key - last);
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
    s.covered = {fits ? (Rank(last) + 1 << row.id_bits) - 1 : 0, fits ? least - row.best : 1.0f};
    if (!fits) s.listed = 0;
}

// Keeps ranks up to `last` and logits down to best + floor.
__device__ __forceinline__ void keep(Rank last, float floor) {
    __syncthreads();
    if (threadIdx.x == 0) s.kept = {last, floor};
    __syncthreads();
}

__device__ __forceinline__ Rank cut_by_count(int count) {
    const Sum listed = measure(true, 0.0f);
    const bool in_list = count <= listed.total;
    return descend(in_list, 0.0f, in_list ? listed.last : measure(false, 0.0f).last, count - 1);
}

// The first rank at which the masses reach `share` of their sum; with `more`, at which they exceed it.
__device__ __forceinline__ Rank cut_by_mass(float rate, float share, bool more) {
    const Sum listed = measure(true, rate);
    const bool covered = s.kept.last <= s.covered.last || s.kept.floor > s.covered.floor;
    const Sum all = covered ? listed : measure(false, rate);
    const double reached = double(share) * double(all.total);
    const Mass target = min(more ? Mass(reached) : max(Mass(ceil(reached)), Mass(1)) - 1, all.total - 1);
    const bool in_list = target < listed.total;
    return descend(in_list, rate, in_list ? listed.last : all.last, target);
}

// The drawn token, in all threads. row: without best and best_key, which are computed here. possible: whether this
// thread has seen a logit above -infinity before biases and mask.
__device__ __forceinline__ int draw(Row row, const Params &p, bool possible) {
    float maximum = NEGATIVE_INFINITY;
    int id = 4 * threadIdx.x;
    bool broken = false;
    each<8>(row, false, [&](float x, int i) {
        broken |= x != x;
        if (x > maximum) maximum = x, id = i;
    }, [&](float x) {
        broken |= !(x < -NEGATIVE_INFINITY);
        possible |= x > NEGATIVE_INFINITY;
    });
    if (__syncthreads_or(broken)) return NOT_FINITE;
    const Rank first = over_block({0, Rank(key(maximum)) << 32 | ~unsigned(id)}).last;
    row.best_key = unsigned(first >> 32);
    row.best = from_key(row.best_key);
    if (row.best == NEGATIVE_INFINITY) return __syncthreads_or(possible) ? NOTHING_LEFT : NOT_FINITE;
    if (row.best == -NEGATIVE_INFINITY) return NOT_FINITE;
    const int top_k = p.top_k < row.count ? int(p.top_k) : 0;
    if (p.temperature == 0.0f || top_k == 1 || row.count == 1) return int(~unsigned(first));

    if (threadIdx.x == 0) s.row = row;
    keep(~0ull, NEGATIVE_INFINITY);
    list_best(maximum, id, top_k);
    __syncthreads();
    if (top_k) keep(cut_by_count(top_k), NEGATIVE_INFINITY);
    if (p.top_p < 1.0f) keep(cut_by_mass(LOG2_E, p.top_p, false), NEGATIVE_INFINITY);
    if (p.min_p > 0.0f) keep(s.kept.last, logf(p.min_p));
    const Rank drawn = cut_by_mass(LOG2_E / max(p.temperature, 1e-30f), p.uniform, true);
    return int(drawn & ((Rank(1) << row.id_bits) - 1));
}

extern "C" __global__ void __launch_bounds__(512)
sample_kernel(int *ids, float *logits, const int *draws, float *saved, const int *newest, int V, long long stride) {
    let_next_begin();
    wait_for_previous();
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.x];
    const Lists lists = lists_of(draws, p);
    logits += blockIdx.x * stride;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.low[i] = s.high[i] = s.counts[i] = s.ranks[i] = 0;

    // In the order of sample.py, and undone in the opposite order.
    float *saved_biased = saved + (lists.bias_ids - draws), *saved_dry = saved + (lists.dry_ids - draws);
    bool possible = change_logits(logits, lists.bias_ids, p.biases, saved_biased,
                                  [&](float x, int i) { return x + lists.biases[i]; });
    const Penalised penalised = penalise(logits, lists.recent, newest ? newest + blockIdx.x : nullptr, p);
    possible |= penalised.before > NEGATIVE_INFINITY;
    possible |= change_logits(logits, lists.dry_ids, p.dry, saved_dry,
                              [&](float x, int i) { return float(double(x) - lists.dry[i]); });
    __syncthreads();
    const int id = draw({logits, lists.mask, V, 32 - __clz(V - 1), 0.0f, 0}, p, possible);
    __syncthreads();
    restore_logits(logits, lists.dry_ids, p.dry, saved_dry);
    if (penalised.token >= 0) logits[penalised.token] = penalised.before;
    __syncthreads();
    restore_logits(logits, lists.bias_ids, p.biases, saved_biased);
    if (threadIdx.x == 0) ids[blockIdx.x] = id;
}

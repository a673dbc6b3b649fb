// The next token of every sequence: `sample` of engine/sampling/sample.py, so that only ids leave the GPU.
//
// ids (B): the token; -1 where the logits are not finite, -2 where bias and mask leave none. logits (B, V), rows
// `stride` apart; biases, penalties and DRY are applied in place and taken back at the end. draws: the table of
// adjust.cuh. saved: a float for each word of the table where rows have lists; anything.
//
// Nothing is sorted. The order "largest first, equal ones by id" gives every token a place, one integer; what a cut
// keeps is all places up to a last one, which a descent finds digit by digit: a histogram of the digit, then the bin in
// which the count (top-k) or the mass (top-p, the draw) is reached. Masses are whole multiples of 2^-44 of the best
// token's: their sums are exact in any order, so the same input always gives the same token.
// Cost: V is read for the maximum, and to copy the best thousand or so tokens to shared memory, where the rest happens;
// once more for the sum of all masses if there is no top-k. The maxima of single threads tell which are the best: at
// least n tokens are not below the n-th largest of them, and not many more. Where the answer lies behind those (flat
// logits at high temperature) a descent reads V once per 8 bits of a place, seven times at most.
// A list costs an access to each of its logits, before and behind; a mask V / 8 bytes with every read of V, which sees
// forbidden tokens as -infinity.
// Grid (B), block 64 ... 512: 512 for large V. DEFINES: none.
// JOINS: adjust.cuh, row.cuh.
// PRECOND: 1 <= V <= 2^19, V <= stride; logits aligned to 16 bytes, stride % 4 == 0; table aligned to 16 bytes; ids of
// lists < V, recent <= 64.
constexpr int NOT_FINITE = -1, NOTHING_LEFT = -2;  // in the place of an id

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

// The token, in all threads. best and best_key of the row are still to be found. possible: whether this thread knows of
// a token that the model finds possible.
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
    const Place first = over_block({0, Place(key(maximum)) << 32 | ~unsigned(id)}).last;
    row.best_key = unsigned(first >> 32);
    row.best = of_key(row.best_key);
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
    const Place drawn = cut_by_mass(LOG2_E / max(p.temperature, 1e-30f), p.uniform, true);
    return int(drawn & ((Place(1) << row.id_bits) - 1));
}

extern "C" __global__ void __launch_bounds__(512)
sample_kernel(int *ids, float *logits, const int *draws, float *saved, int V, long long stride) {
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.x];
    const Lists lists = lists_of(draws, p);
    logits += blockIdx.x * stride;
    for (int i = threadIdx.x; i < BINS; i += blockDim.x) s.low[i] = s.high[i] = s.counts[i] = s.places[i] = 0;

    // In the order of sample.py, and back in the opposite one.
    float *saved_biased = saved + (lists.bias_ids - draws), *saved_dry = saved + (lists.dry_ids - draws);
    bool possible = change_logits(logits, lists.bias_ids, p.biases, saved_biased,
                                  [&](float x, int i) { return x + lists.biases[i]; });
    const Penalised penalised = penalise(logits, lists.recent, p);
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

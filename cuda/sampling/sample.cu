// The op `sample`: the next token of every sequence, as in engine/sampling/sample.py; only ids leave the GPU.
//
// ids (B): the token; -1 where the logits are not finite, NOTHING_LEFT where biases and mask leave no token. logits (B,
// V), rows `stride` floats apart. draws: the table of adjust.cuh. scratch (B, SCRATCH_WORDS): of 8 bytes.
// Kernels in this order; the first and the last only where rows have lists, with `saved`, as many floats as the table
// has words (null without lists), and newest (B), or null: the token behind which each row's logits come, for lists
// that do not know it.
//   sample_adjust   biases, penalties and DRY change logits in place
//   sample_maxima   the largest logits of many small sets of tokens
//   sample_list     the best tokens, and the sum of all masses
//   sample          the token
//   sample_restore  the logits as they were
//
// The order "largest first, equal ones by id" gives every token a rank, one integer. Top-k and top-p keep all ranks up
// to a last one, at which the count (top-k) or the mass (top-p, the draw) is reached. Masses are integers, in units of
// 2^-44 of the best token's: sums do not depend on the order, so the same input gives the same token.
// The maxima of sets bound the best tokens: at least n tokens are not below the n-th largest maximum, and few more. All
// blocks of a row list those, about a thousand, and add up all masses if there is no top-k; then one block sorts the
// list and draws. If the last rank is not in the list (flat logits at high temperature), that block alone reads V once
// for each 8 bits of a rank (whole_row.cuh), up to seven times for each cut.
// Cost: V is read twice, once for greedy rows; up to ROOM ranks are written and read. A list of biases, penalties or
// DRY costs two accesses to each of its logits; a mask V / 8 bytes with every read of V.
// Grid (ceil(V / PART), B) of sample_maxima and sample_list, (B) of the others. Block THREADS. DEFINES: THREADS (256),
// PART (logits of a block), SCRATCH_WORDS, ROW_WORDS (of a row's parameters), NOTHING_LEFT (below -1).
// JOINS: row.cuh, adjust.cuh, best.cuh, whole_row.cuh.
// PRECOND: 1 <= V <= 2^19, V <= stride; logits aligned to 16 bytes, stride % 4 == 0; table aligned to 16 bytes; ids of
// lists < V, recent <= 64.
constexpr int NOT_FINITE = -1;                     // instead of an id, as NOTHING_LEFT is
constexpr int TOPS = 3 * THREADS;                  // sets of a row, at most
constexpr int BOUND = 448;                         // the list goes down to the maximum in this place, or one before it
constexpr unsigned INFINITE = 0xff800000u, MINUS_INFINITE = 0x007fffffu;  // keys

struct Scratch {
    Mass total;         // of all tokens, if there is no top-k
    int listed;         // ranks that are in the list, or would be if it had room
    int is_drawn;       // whether the token did not need a list
    float best, least;  // the largest logit, and the smallest of the list
    Rank tops[TOPS];    // of each set: key and inverted id of its best token
    Rank list[ROOM];
};
static_assert(sizeof(Scratch) == SCRATCH_WORDS * sizeof(Rank) && sizeof(Params) == 4 * ROW_WORDS, "as Python has them");

__device__ __forceinline__ Scratch &scratch_of(Rank *scratch, int row) {
    return *reinterpret_cast<Scratch *>(scratch + static_cast<long long>(row) * SCRATCH_WORDS);
}
__device__ __forceinline__ const Scratch &scratch_of(const Rank *scratch, int row) {
    return *reinterpret_cast<const Scratch *>(scratch + static_cast<long long>(row) * SCRATCH_WORDS);
}

// 0 for all tokens.
__device__ __forceinline__ int top_k_of(const Params &p, int V) { return p.top_k < V ? int(p.top_k) : 0; }
__device__ __forceinline__ int id_bits(int V) { return 32 - __clz(V - 1); }

// Sets of a block, a power of two: those of all blocks fit.
__device__ __forceinline__ int sets_of_block() {
    int sets = THREADS;
    while (sets * gridDim.x > TOPS) sets /= 2;
    return sets;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_adjust_kernel(float *logits, float *saved, const int *draws, const int *newest, long long stride) {
    let_next_begin();
    wait_for_previous();
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.x];
    const Lists lists = lists_of(draws, p);
    const Saved own = saved_of(saved, draws, lists);
    logits += blockIdx.x * stride;
    // In the order of sample.py.
    change_logits(logits, lists.bias_ids, p.biases, own.biased, [&](float x, int i) { return x + lists.biases[i]; });
    penalise(logits, lists.recent, newest ? newest + blockIdx.x : nullptr, p, own.recent);
    change_logits(logits, lists.dry_ids, p.dry, own.dry,
                  [&](float x, int i) { return float(double(x) - lists.dry[i]); });
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_restore_kernel(float *logits, float *saved, const int *draws, const int *newest, long long stride) {
    let_next_begin();
    wait_for_previous();
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.x];
    const Lists lists = lists_of(draws, p);
    const Saved own = saved_of(saved, draws, lists);
    logits += blockIdx.x * stride;
    restore_logits(logits, lists.dry_ids, p.dry, own.dry);
    unpenalise(logits, lists.recent, newest ? newest + blockIdx.x : nullptr, p, own.recent);
    restore_logits(logits, lists.bias_ids, p.biases, own.biased);
}

// A set is every so many threads of a block. Its top is the largest NONE if a logit is not finite, and 0 if all are
// -infinity even without a mask.
extern "C" __global__ void __launch_bounds__(THREADS)
sample_maxima_kernel(Rank *scratch, const float *logits, const int *draws, int V, long long stride) {
    __shared__ Rank tops[THREADS];
    let_next_begin();
    wait_for_previous();
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.y];
    const Row row = {logits + blockIdx.y * stride, lists_of(draws, p).mask, V, 0, 0.0f, 0};
    float x[CHUNKS][4], maximum = NEGATIVE_INFINITY;
    int id = 0;
    bool broken = false, possible = false;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) row.load(x[c], chunk_at(c));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) broken |= !(x[c][j] < -NEGATIVE_INFINITY), possible |= x[c][j] > NEGATIVE_INFINITY;
        row.forbid(x[c], chunk_at(c));
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (x[c][j] > maximum) maximum = x[c][j], id = chunk_at(c) + j;
    }
    tops[threadIdx.x] = broken ? NONE : possible ? Rank(key(maximum)) << 32 | ~unsigned(id) : 0;
    __syncthreads();
    Scratch &own = scratch_of(scratch, blockIdx.y);
    if (blockIdx.x == 0 && threadIdx.x == 0) own.total = 0, own.listed = 0;
    const int sets = sets_of_block();
    if (threadIdx.x >= sets) return;
    Rank top = 0;
    for (int i = threadIdx.x; i < THREADS; i += sets) top = max(top, tops[i]);
    own.tops[blockIdx.x * sets + threadIdx.x] = top;
}

// The smallest logit of the list: the n-th largest of the maxima, or the top_k-th; -infinity if there are fewer.
__device__ __forceinline__ float bound(const Row &row, const Rank (&tops)[TOPS / THREADS], int count, int top_k) {
    Rank ranks[TOPS / THREADS];
#pragma unroll
    for (int i = 0; i < TOPS / THREADS; ++i) {
        const unsigned of_top = unsigned(tops[i] >> 32);
        ranks[i] = of_top > MINUS_INFINITE ? Rank(row.best_key - of_top) << row.id_bits | ~unsigned(tops[i]) : NONE;
    }
    const int finite = sort(row, ranks), wanted = min(BOUND, count - count / 8);
    const int enough = top_k ? min(top_k, wanted) : wanted;
    return enough <= finite ? row.value(s.ranks[enough - 1]) : NEGATIVE_INFINITY;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_list_kernel(int *ids, Rank *scratch, const float *logits, const int *draws, float *saved, int V,
                   long long stride) {
    let_next_begin();
    wait_for_previous();
    Scratch &own = scratch_of(scratch, blockIdx.y);
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.y];
    const Lists lists = lists_of(draws, p);
    const int count = sets_of_block() * gridDim.x, top_k = top_k_of(p, V);
    const bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
    Rank tops[TOPS / THREADS], top = 0;
#pragma unroll
    for (int i = 0; i < TOPS / THREADS; ++i) {
        const int set = i * THREADS + threadIdx.x;
        tops[i] = set < count ? own.tops[set] : 0;
        top = max(top, tops[i]);
    }
    const bool is_greedy = p.temperature == 0.0f || top_k == 1 || V == 1;
    Row row = {logits + blockIdx.y * stride, lists.mask, V, id_bits(V), 0.0f, 0};
    float x[CHUNKS][4];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (is_greedy) break;
        row.load(x[c], chunk_at(c));
        row.forbid(x[c], chunk_at(c));
    }
    top = largest(top);
    row.best_key = unsigned(top >> 32);
    row.best = from_key(row.best_key);
    const bool is_finite = row.best_key > MINUS_INFINITE && row.best_key < INFINITE;
    const bool is_drawn = is_greedy || !is_finite;
    if (is_first) own.is_drawn = is_drawn;
    if (is_drawn) {
        if (!is_first) return;
        const bool was_possible = top || any_saved(saved_of(saved, draws, lists), p);
        const bool is_left_nothing = row.best_key <= MINUS_INFINITE && was_possible;
        ids[blockIdx.y] = is_finite ? int(~unsigned(top)) : is_left_nothing ? NOTHING_LEFT : NOT_FINITE;
        return;
    }
    const float least = bound(row, tops, count, top_k);
    if (is_first) own.best = row.best, own.least = least;
    if (threadIdx.x == 0) s.found = 0;
    __syncthreads();
    // The sum that a cut needs if the list does not have all kept tokens; only the first cut can be such a one.
    const bool sums = top_k == 0 && least > NEGATIVE_INFINITY, by_top_p = p.top_p < 1.0f;
    const float rate = by_top_p ? LOG2_E : rate_of(p.temperature);
    const float floor = !by_top_p && p.min_p > 0.0f ? logf(p.min_p) : NEGATIVE_INFINITY;
    Mass mass = 0, total = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float difference = x[c][j] - row.best;
            if (sums && difference >= floor) mass += weight(difference, rate);
            if (x[c][j] < least || x[c][j] == NEGATIVE_INFINITY) continue;
            const int place = atomicAdd(&s.found, 1);
            if (place < ROOM) s.ranks[place] = row.rank(x[c][j], chunk_at(c) + j);
        }
    }
    if (sums) sum_before(mass, total);
    __syncthreads();
    if (threadIdx.x == 0) {
        s.base = atomicAdd(&own.listed, s.found);
        if (sums) atomicAdd(&own.total, total);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < min(s.found, ROOM - s.base); i += THREADS) own.list[s.base + i] = s.ranks[i];
}

// The token; -1 where the list does not suffice.
__device__ __forceinline__ int draw_from_list(const Row &row, const Scratch &own, const Params &p, int top_k,
                                              const Rank (&ranks)[ROOM / THREADS]) {
    if (own.listed > ROOM) return -1;
    Best best = {sort(row, ranks), own.least == NEGATIVE_INFINITY, NEGATIVE_INFINITY};
    if (top_k && top_k <= best.count) best.count = top_k, best.all = true;
    if (top_k && !best.all) return -1;
    if (p.top_p < 1.0f) {
        const int last = best.cut(row, LOG2_E, p.top_p, false, own.total);
        if (last < 0) return -1;
        best.count = last + 1, best.all = true;
    }
    if (p.min_p > 0.0f) {
        best.floor = logf(p.min_p);
        best.all |= best.floor > own.least - row.best;
    }
    const int drawn = best.cut(row, rate_of(p.temperature), p.uniform, true, own.total);
    return drawn < 0 ? -1 : row.id(s.ranks[drawn]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_kernel(int *ids, const Rank *scratch, const float *logits, const int *draws, int V, long long stride) {
    let_next_begin();
    wait_for_previous();
    const Scratch &own = scratch_of(scratch, blockIdx.x);
    const int listed = own.listed;
    Rank ranks[ROOM / THREADS];
#pragma unroll
    for (int i = 0; i < ROOM / THREADS; ++i) {
        const int place = i * THREADS + threadIdx.x;
        const Rank rank = own.list[place];  // before it is known whether there is one: one wait for both
        ranks[i] = place < listed ? rank : NONE;
    }
    if (own.is_drawn) return;
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.x];
    const Row row = {logits + blockIdx.x * stride, lists_of(draws, p).mask, V, id_bits(V), own.best, key(own.best)};
    const int top_k = top_k_of(p, V);
    int id = draw_from_list(row, own, p, top_k, ranks);
    if (id < 0) id = draw_from_row(row, p, top_k);
    if (threadIdx.x == 0) ids[blockIdx.x] = id;
}

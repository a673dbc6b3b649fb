// The op `sample`: the next token of every sequence, as in engine/sampling/sample.py; only ids leave the GPU.
//
// ids (B): the token; -1 where the logits are not finite, NOTHING_LEFT where biases and mask leave no token. logits (B,
// V), rows `stride` floats apart. draws: the table of adjust.cuh. scratch (B, blocks of a row, PART_WORDS): of 8 bytes.
// counts (B): zero before the launch, and again after it. Kernels in this order; all but `sample` only where rows have
// lists, with `saved`, as many floats as the table has words (null without lists), and newest (B), or null: the token
// after which each row's logits come, for lists that do not know it.
//   sample_adjust   biases, penalties and DRY change logits in place
//   sample          the token; the best one where a row has a shape
//   sample_shaped   the token of these rows (shape.cuh)
//   sample_restore  the logits as they were
//
// The order "largest first, equal ones by id" gives every token a rank, one integer. Top-k and top-p keep all ranks up
// to a last one, at which the count (top-k) or the mass (top-p, the draw) is reached. Masses are integers, in units of
// 2^-44 of the best token's: sums do not depend on the order, so the same input gives the same token.
// Every block reads its logits once. A warp lists its best tokens, down to the logit that a number of its lanes reach;
// a block adds up its masses relative to its own best token. Then the last block of a row to be done, by `counts`, has
// the row's best token: it scales the sums by each block's best relative to that, takes the tokens that are not
// below the end of any list, some hundred, sorts them and draws. If the last rank is not among them (flat logits at
// high temperature), it reads V once for each 8 bits of a rank (whole_row.cuh), up to seven times for each cut.
// Cost: V is read once; LISTED to PLACES ranks of each warp are written, and PLACES are read. A list of biases,
// penalties or DRY costs two accesses to each of its logits; a mask V / 8 bytes.
// Grid (ceil(V / PART), B) of sample, (B) of the others. Block THREADS. DEFINES: THREADS (256), PART (logits of a
// block), PART_WORDS, ROW_WORDS (of a row's parameters), NOTHING_LEFT (below -1), SHAPE (names of options).
// JOINS: row.cuh, adjust.cuh, best.cuh, whole_row.cuh, shape.cuh.
// PRECOND: 1 <= V <= 2^19, V <= stride; logits aligned to 16 bytes, stride % 4 == 0; table aligned to 16 bytes; ids of
// lists < V, recent <= 64.
constexpr int NOT_FINITE = -1;  // instead of an id, as NOTHING_LEFT is
constexpr int WARPS = THREADS / 32, PLACES = 32;
constexpr int AT_ONCE = 16;  // lists that a warp has on their way
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr unsigned INFINITE = 0xff800000u, MINUS_INFINITE = 0x007fffffu;  // keys

// What a block has found. A top is the key and the inverted id of a token: the larger one is better.
struct Part {
    Rank top;  // the best token's; NONE if a logit is not finite, 0 if all are -infinity without a mask
    Mass mass;                  // mass of all tokens, in units of 2^-44 of the best token's
    unsigned least[WARPS];      // key of the smallest logit of each warp's list, which has all that are larger
    Rank lists[WARPS][PLACES];  // tops; 0 after the last one
};
static_assert(sizeof(Part) == PART_WORDS * sizeof(Rank) && sizeof(Params) == 4 * ROW_WORDS, "as Python has them");
static_assert(PLACES == 32, "a lane has a place");

// 0 for all tokens.
__device__ __forceinline__ int top_k_of(const Params &p, int V) { return p.top_k < V ? int(p.top_k) : 0; }
__device__ __forceinline__ int id_bits(int V) { return 32 - __clz(V - 1); }
__device__ __forceinline__ Rank top_of(float x, int id) { return Rank(key(x)) << 32 | ~unsigned(id); }

// Lanes that have a token in their warp's list, if so many have one: then some hundred tokens are not below the end of
// any list, since the more warps there are, the further above the others is the end of one.
__device__ __forceinline__ int listed() { return gridDim.x <= 8 ? 16 : gridDim.x <= 32 ? 11 : 7; }

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

// Lists the best tokens of the warp's logits. maximum: the lane's largest.
__device__ __forceinline__ void list(Part &part, const float (&x)[CHUNKS][4], float maximum) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int place = 0;  // place of the lane's largest among all lanes' largest
#pragma unroll
    for (int step = 1; step < 32; ++step) {
        const int from = (lane + step) % 32;
        const float other = __shfl_sync(ALL_LANES, maximum, from);
        place += other > maximum || (other == maximum && from < lane);
    }
    float least;
    int own, all;
    for (int lanes = listed();; lanes /= 2) {
        least = __shfl_sync(ALL_LANES, maximum, __ffs(__ballot_sync(ALL_LANES, place == lanes - 1)) - 1);
        own = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int j = 0; j < 4; ++j) own += x[c][j] >= least && x[c][j] > NEGATIVE_INFINITY;
        all = __reduce_add_sync(ALL_LANES, own);
        if (all <= PLACES || lanes == 1) break;
    }
    int end = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int earlier = __shfl_up_sync(ALL_LANES, end, step);
        if (lane >= step) end += earlier;
    }
    Rank *at = part.lists[warp] + end - own, *const stop = part.lists[warp] + PLACES;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const bool is_listed = x[c][j] >= least && x[c][j] > NEGATIVE_INFINITY && at < stop;
            if (is_listed) *at++ = top_of(x[c][j], chunk_at(c) + j);
        }
    if (lane >= all) part.lists[warp][lane] = 0;
    // No list has room for all of too many equal ones.
    if (lane == 0) part.least[warp] = all > PLACES ? INFINITE : key(least);
}

// What the masses of a row are sums of, if the list of a row may lack kept tokens.
struct Masses {
    float rate;
    bool are_needed;  // only the first cut can be such a one; of tokens down to min-p they are not known

    __device__ __forceinline__ Masses(const Params &p, int top_k)
        : rate(p.top_p < 1.0f ? LOG2_E : rate_of(p.temperature)),
          are_needed(top_k == 0 && (p.top_p < 1.0f || p.min_p <= 0.0f)) {}
};

// Finds this block's part of the row.
__device__ __forceinline__ void find(Part &part, const Row &row, const Masses &masses, bool is_greedy) {
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
    const Rank top = largest(broken ? NONE : possible ? top_of(maximum, id) : 0);
    if (threadIdx.x == 0) part.top = top;
    if (is_greedy) return;
    list(part, x, maximum);
    const unsigned best = unsigned(top >> 32);
    if (!masses.are_needed || best <= MINUS_INFINITE || best >= INFINITE) return;
    Mass own = 0, total;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) own += weight(x[c][j] - from_key(best), masses.rate);
    sum_before(own, total);
    if (threadIdx.x == 0) part.mass = total;
}

// Puts the tokens of all lists that are not below `least` into s.ranks; returns how many there are, also if there is no
// room for them.
__device__ __forceinline__ int gather(const Row &row, const Part *parts, unsigned least) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = gridDim.x * WARPS;
    int all = 0;
    for (int first = warp; first - warp < count; first += AT_ONCE * WARPS) {
        Rank tops[AT_ONCE];
        Mass own = 0, total;
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int list = first + i * WARPS;
            tops[i] = list < count ? parts[list / WARPS].lists[warp][lane] : 0;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) own += tops[i] && unsigned(tops[i] >> 32) >= least;
        int at = all + int(sum_before(own, total));
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const unsigned top_key = unsigned(tops[i] >> 32);
            if (!tops[i] || top_key < least) continue;
            if (at < ROOM) s.ranks[at] = Rank(row.best_key - top_key) << row.id_bits | ~unsigned(tops[i]);
            ++at;
        }
        all += int(total);
    }
    __syncthreads();
    return all;
}

// The token, from the row's best ones; -1 where these do not suffice. least: key of the last of them; all: how many
// there are; total: of the row, 0 if it is not known.
__device__ __forceinline__ int draw_from_list(const Row &row, const Params &p, int top_k, unsigned least, int all,
                                              Mass total) {
    if (all > ROOM || least >= INFINITE) return -1;
    Rank ranks[ROOM / THREADS];
#pragma unroll
    for (int i = 0; i < ROOM / THREADS; ++i) {
        const int place = i * THREADS + threadIdx.x;
        ranks[i] = place < all ? s.ranks[place] : NONE;
    }
    Best best = {sort(row, ranks), least <= MINUS_INFINITE, NEGATIVE_INFINITY};
    if (top_k && top_k <= best.count) best.count = top_k, best.all = true;
    if (top_k && !best.all) return -1;
    if (p.top_p < 1.0f) {
        const int last = best.cut(row, LOG2_E, p.top_p, false, total);
        if (last < 0) return -1;
        best.count = last + 1, best.all = true;
    }
    if (p.min_p > 0.0f) {
        best.floor = logf(p.min_p);
        best.all |= best.floor > from_key(least) - row.best;
        if (!best.all) return -1;
    }
    const int drawn = best.cut(row, rate_of(p.temperature), p.uniform, true, total);
    return drawn < 0 ? -1 : row.id(s.ranks[drawn]);
}

// The token of a row whose parts all blocks have found. any_was_possible(): asked of rows without a token that is left.
template <class Condition>
__device__ __forceinline__ int draw(Row &row, const Part *parts, const Params &p, const Masses &masses, int top_k,
                                    bool is_greedy, const Condition &any_was_possible) {
    const bool has_part = threadIdx.x < gridDim.x;
    const Rank own_top = has_part ? parts[threadIdx.x].top : 0;
    Mass own_mass = has_part && masses.are_needed && !is_greedy ? parts[threadIdx.x].mass : 0, total = 0;
    unsigned own_least = 0;
    for (int i = threadIdx.x; !is_greedy && i < gridDim.x * WARPS; i += THREADS)
        own_least = max(own_least, parts[i / WARPS].least[i % WARPS]);
    const Rank top = largest(own_top);
    row.best_key = unsigned(top >> 32);
    row.best = from_key(row.best_key);
    if (row.best_key <= MINUS_INFINITE) return top || any_was_possible() ? NOTHING_LEFT : NOT_FINITE;
    if (row.best_key >= INFINITE) return NOT_FINITE;
    if (is_greedy) return int(~unsigned(top));
    const unsigned least = unsigned(largest(own_least));
    if (masses.are_needed) {
        const unsigned top_key = unsigned(own_top >> 32);
        const float difference = from_key(top_key) - row.best;
        const bool counts = top_key > MINUS_INFINITE;
        sum_before(counts ? Mass(double(own_mass) * double(exp2_fast(difference * masses.rate))) : 0, total);
    }
    const int id = draw_from_list(row, p, top_k, least, gather(row, parts, least), total);
    return id < 0 ? draw_from_row(row, p, nullptr, top_k) : id;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_kernel(int *ids, Rank *scratch, int *counts, const float *logits, const int *draws, const float *saved, int V,
              long long stride) {
    let_next_begin();
    wait_for_previous();
    const int number = blockIdx.y;
    const Params &p = reinterpret_cast<const Params *>(draws)[number];
    const Lists lists = lists_of(draws, p);
    const int top_k = top_k_of(p, V);
    const bool is_greedy = p.temperature == 0.0f || top_k == 1 || V == 1 || p.shaped;
    const Masses masses(p, top_k);
    Row row = {logits + number * stride, lists.mask, V, id_bits(V), 0.0f, 0};
    Part *const parts = reinterpret_cast<Part *>(scratch) + number * (long long)gridDim.x;
    find(parts[blockIdx.x], row, masses, is_greedy);
    __syncthreads();
    if (threadIdx.x == 0) s.found = arrives_last(counts + number, gridDim.x);
    __syncthreads();
    if (!s.found) return;
    const auto any_was_possible = [&] {
        return threadIdx.x == 0 && any_saved(saved_of(const_cast<float *>(saved), draws, lists), p);
    };
    const int id = draw(row, parts, p, masses, top_k, is_greedy, any_was_possible);
    if (threadIdx.x == 0) ids[number] = id;
}

extern "C" __global__ void __launch_bounds__(THREADS)
sample_shaped_kernel(int *ids, const float *logits, const int *draws, int V, long long stride) {
    let_next_begin();
    wait_for_previous();
    const Params &p = reinterpret_cast<const Params *>(draws)[blockIdx.x];
    const int greedy = ids[blockIdx.x], top_k = top_k_of(p, V);
    if (!p.shaped || greedy < 0 || top_k == 1 || V == 1) return;
    const Lists lists = lists_of(draws, p);
    logits += blockIdx.x * stride;
    const Row row = {logits, lists.mask, V, id_bits(V), logits[greedy], key(logits[greedy])};
    const int id = draw_from_row(row, p, lists.shape, top_k);
    if (threadIdx.x == 0) ids[blockIdx.x] = id;
}

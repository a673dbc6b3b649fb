// Top-n-sigma and XTC, and the draw of a row by one block that reads the whole row several times: for rows with one of
// the two, or whose last rank is not among the best tokens. Part of sample.cu.
constexpr float FINITE = -3.4e38f;

// The sum over all threads, in all threads; each adds in the same order.
__device__ __forceinline__ double sum(double x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    double *const partial = reinterpret_cast<double *>(s.partial), total = 0.0;
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; ++w) total += partial[w];
    return total;
}

// Calls visit(how far its logit is below the best, rank) for every kept token of the row.
template <class Visit>
__device__ __forceinline__ void each_kept(const Kept &keeps, Visit visit) {
    const Row row = s.row;
    each<8>(row, [&](float x, int id) {
        const Rank rank = row.rank(x, id);
        if (keeps.holds(x - row.best, rank)) visit(row.best - x, rank);
    });
}

// The standard deviation of the kept logits.
__device__ __noinline__ double deviation(Kept keeps) {
    double count = 0.0, values = 0.0, squares = 0.0;
    each_kept(keeps, [&](float below, Rank) { count += 1.0, values += below, squares += double(below) * below; });
    count = sum(count), values = sum(values) / count, squares = sum(squares) / count;
    return sqrt(max(squares - values * values, 0.0));
}

// XTC: of the kept tokens that reach the threshold, the last one becomes the first. `best` is then its logit, so that
// the masses of the others stay exact.
__device__ __forceinline__ void exclude_top(Kept &keeps, float threshold) {
    const Mass least = Mass(ceil(double(threshold) * double(measure(keeps, LOG2_E))));
    Rank first = 0;
    each_kept(keeps, [&](float below, Rank rank) {
        if (weight(-below, LOG2_E) >= least) first = max(first, rank);
    });
    keeps.first = largest(first);
    const float before = s.row.best, best = s.row.value(keeps.first);
    keeps.floor = max(keeps.floor + (before - best), FINITE);
    __syncthreads();
    if (threadIdx.x == 0) s.row.best = best;
    __syncthreads();
}

// The draw, in the order of CHAIN in engine/sampling/sample.py. shape: null if none of its samplers is on.
__device__ __forceinline__ int draw_from_row(const Row &row, const Params &p, const Shape *shape, int top_k) {
    __syncthreads();
    if (threadIdx.x == 0) s.row = row;
    __syncthreads();
    Kept keeps = {NONE, FINITE, 0};
    if (shape && shape->top_n_sigma > 0.0f) keeps.floor = max(float(-shape->top_n_sigma * deviation(keeps)), FINITE);
    if (top_k) keeps.last = descend(keeps, 0.0f, min(Mass(top_k), measure(keeps, 0.0f)) - 1);
    if (p.top_p < 1.0f) keeps.last = cut_row(keeps, LOG2_E, p.top_p, false);
    if (p.min_p > 0.0f) keeps.floor = max(keeps.floor, logf(p.min_p));
    if (shape && shape->xtc_probability > 0.0f) exclude_top(keeps, shape->xtc_threshold);
    return row.id(cut_row(keeps, rate_of(p.temperature), p.uniform, true));
}

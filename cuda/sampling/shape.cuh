// The draw of a row with top-n-sigma, typical-p, XTC or a dynamic temperature, by one block that reads the whole row
// several times: a bit of typical-p's cut, or 8 bits of a rank, each time. Part of sample.cu.
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

// The kept tokens' mass, and how far the logit of a token is below the best on average, in nats.
struct Spread {
    Mass mass;
    double below;
};

__device__ __noinline__ Spread spread(Kept keeps) {
    Mass own = 0, all_below = 0, total, all;
    each_kept(keeps, [&](float below, Rank) {
        const Mass w = weight(-below, LOG2_E);
        own += w, all_below += Mass(double(w) * double(below));
    });
    sum_before(own, total);
    sum_before(all_below, all);
    return {total, double(all) / double(total)};
}

// Keeps the ranks from `first` on; `best` is then the first one's logit, so that the masses of the others stay exact.
__device__ __forceinline__ void begin_at(Kept &keeps, Rank first) {
    const float before = s.row.best, best = s.row.value(first);
    keeps.first = first;
    keeps.floor = max(keeps.floor + (before - best), FINITE);
    __syncthreads();
    if (threadIdx.x == 0) s.row.best = best;
    __syncthreads();
}

// Typical-p: a token's surprise is as far from the entropy as its logit is from the average one. The largest distance
// is found bit by bit: floats of one sign are in the order of their bits.
__device__ __forceinline__ void keep_typical(Kept &keeps, float share) {
    const Spread all = spread(keeps);
    const Mass target = target_of(all.mass, share, true);
    const auto distance = [&](float below) { return __float_as_uint(fabsf(below - float(all.below))); };
    unsigned farthest = 0;
    for (unsigned bit = 1u << 30; bit > 0; bit >>= 1) {
        Mass own = 0, nearer;
        each_kept(keeps, [&](float below, Rank) {
            if (distance(below) < (farthest | bit)) own += weight(-below, LOG2_E);
        });
        sum_before(own, nearer);
        if (nearer <= target) farthest |= bit;
    }
    Rank first = NONE, last = 0;
    each_kept(keeps, [&](float below, Rank rank) {
        if (distance(below) <= farthest) first = min(first, rank), last = max(last, rank);
    });
    keeps.last = largest(last);
    begin_at(keeps, ~largest(~first));
}

// XTC: of the kept tokens that reach the threshold, the last one becomes the first.
__device__ __forceinline__ void exclude_top(Kept &keeps, float threshold) {
    const Mass least = Mass(ceil(double(threshold) * double(measure(keeps, LOG2_E))));
    Rank first = keeps.first;
    each_kept(keeps, [&](float below, Rank rank) {
        if (weight(-below, LOG2_E) >= least) first = max(first, rank);
    });
    begin_at(keeps, largest(first));
}

// It grows with the entropy of the kept tokens, relative to the largest of so many.
__device__ __forceinline__ float dynamic_temperature(const Kept &keeps, float temperature, const Shape &shape) {
    const Mass count = measure(keeps, 0.0f);
    if (count == 1) return temperature;
    const Spread all = spread(keeps);
    const double entropy = (log(double(all.mass) / UNIT) + all.below) / log(double(count));
    const float low = max(temperature - shape.range, 0.0f), high = temperature + shape.range;
    return low + (high - low) * powf(max(float(entropy), 0.0f), shape.exponent);
}

__device__ __forceinline__ int draw_shaped(const Row &row, const Params &p, const Shape &shape, int top_k) {
    if (threadIdx.x == 0) s.row = row;
    __syncthreads();
    Kept keeps = {NONE, FINITE, 0};
    if (shape.sigma > 0.0f) keeps.floor = max(float(-shape.sigma * deviation(keeps)), FINITE);
    if (top_k) keeps.last = descend(keeps, 0.0f, min(Mass(top_k), measure(keeps, 0.0f)) - 1);
    if (shape.typical < 1.0f) keep_typical(keeps, shape.typical);
    if (p.top_p < 1.0f) keeps.last = cut_row(keeps, LOG2_E, p.top_p, false);
    if (p.min_p > 0.0f) keeps.floor = max(keeps.floor, logf(p.min_p));
    if (shape.xtc <= 0.5f) exclude_top(keeps, shape.xtc);
    const float temperature = shape.range > 0.0f ? dynamic_temperature(keeps, p.temperature, shape) : p.temperature;
    return row.id(cut_row(keeps, rate_of(temperature), p.uniform, true));
}

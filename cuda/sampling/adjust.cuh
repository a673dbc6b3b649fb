// The table of draws, and the changes of single logits before a draw: biases, penalties, DRY. Part of sample.cu.
//
// The table is int32, made by engine/backends/cuda/sampling.py: a `Params` for each row, then the lists of the
// rows that have any. A row's lists begin at word `lists`, a multiple of 4:
//   shape       if `shaped`: a `Shape`
//   DRY         double amounts (dry), int ids (dry)
//   biases      int ids (biases), float amounts (biases)
//   penalties   int ids of the last tokens (recent); an id may be there several times; −1: the row's newest token
//   mask        if `masked`: ceil(V / 32) words; bit i % 32 of word i / 32 allows token i.
struct __align__(16) Params {
    float temperature, top_k, top_p, min_p, uniform, repeat;
    int lists, biases, recent, dry, masked, shaped;
    double presence, frequency;
};

// The options of the samplers that are off by default, by name. xtc_probability: whether XTC drops tokens.
struct __align__(16) Shape {
    float SHAPE;
};

struct Lists {
    const Shape *shape;
    const double *dry;
    const int *dry_ids, *bias_ids;
    const float *biases;
    const int *recent;
    const unsigned *mask;  // null where all tokens are allowed
};

__device__ __forceinline__ Lists lists_of(const int *table, const Params &p) {
    const int *dry = table + p.lists + (p.shaped ? sizeof(Shape) / sizeof(int) : 0);
    const int *dry_ids = dry + 2 * p.dry, *bias_ids = dry_ids + p.dry;
    const int *biases = bias_ids + p.biases, *recent = biases + p.biases, *mask = recent + p.recent;
    return {reinterpret_cast<const Shape *>(table + p.lists),
            reinterpret_cast<const double *>(dry),
            dry_ids,
            bias_ids,
            reinterpret_cast<const float *>(biases),
            recent,
            p.masked ? reinterpret_cast<const unsigned *>(mask) : nullptr};
}

// Where the lists of a row save the logits that they change: as many floats as the table has words.
struct Saved {
    float *biased, *recent, *dry;
};

__device__ __forceinline__ Saved saved_of(float *saved, const int *table, const Lists &lists) {
    return {saved + (lists.bias_ids - table), saved + (lists.recent - table), saved + (lists.dry_ids - table)};
}

// Saves each x = logits[ids[i]] to saved[i] and replaces it by change(x, i). PRECOND: ids are distinct.
template <class Change>
__device__ __forceinline__ void change_logits(float *logits, const int *ids, int count, float *saved, Change change) {
    if (count == 0) return;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float x = logits[ids[i]];
        saved[i] = x;
        logits[ids[i]] = change(x, i);
    }
    __syncthreads();
}

__device__ __forceinline__ void restore_logits(float *logits, const int *ids, int count, const float *saved) {
    if (count == 0) return;
    for (int i = threadIdx.x; i < count; i += blockDim.x) logits[ids[i]] = saved[i];
    __syncthreads();
}

// A token that this thread penalises, and how often it is among the recent ones; token −1 where the thread has none.
struct Repeated {
    int token, occurrences;
};

// One thread for each recent token; of equal ones the first.
// newest: what -1 stands for in `recent`; null where there is none. It may be negative itself: then it is left out.
__device__ __forceinline__ Repeated repeated(const int *recent, const int *newest, int count) {
    const auto recent_at = [&](int i) { return recent[i] < 0 && newest ? *newest : recent[i]; };
    int token = threadIdx.x < count ? recent_at(threadIdx.x) : -1, occurrences = 0;
    for (int i = 0; token >= 0 && i < count; ++i) {
        const bool same = recent_at(i) == token;
        if (same && i < threadIdx.x) token = -1;
        occurrences += same;
    }
    return {token, occurrences};
}

// Penalises the recent tokens; of those without a thread -infinity is saved.
__device__ __forceinline__ void penalise(float *logits, const int *recent, const int *newest, const Params &p,
                                         float *saved) {
    if (p.recent == 0) return;
    const auto [token, occurrences] = repeated(recent, newest, p.recent);
    const float logit = token >= 0 ? logits[token] : NEGATIVE_INFINITY;
    if (token >= 0) {
        const float penalized = logit > 0.0f ? __fdiv_rn(logit, p.repeat) : __fmul_rn(logit, p.repeat);
        logits[token] = float(__dsub_rn(__dsub_rn(double(penalized), __dmul_rn(occurrences, p.frequency)), p.presence));
    }
    if (threadIdx.x < p.recent) saved[threadIdx.x] = logit;
    __syncthreads();
}

__device__ __forceinline__ void unpenalise(float *logits, const int *recent, const int *newest, const Params &p,
                                           const float *saved) {
    if (p.recent == 0) return;
    const int token = repeated(recent, newest, p.recent).token;
    if (token >= 0) logits[token] = saved[threadIdx.x];
    __syncthreads();
}

// Whether a logit of a list was larger than -infinity before its change.
__device__ __forceinline__ bool any_saved(const Saved &saved, const Params &p) {
    bool any = false;
    const auto look = [&](const float *logit, int count) {
        for (int i = 0; i < count; ++i) any |= logit[i] > NEGATIVE_INFINITY;
    };
    look(saved.biased, p.biases), look(saved.recent, p.recent), look(saved.dry, p.dry);
    return any;
}

// The table of draws, and the changes of single logits before a draw: biases, penalties, DRY. Part of sample.cu.
//
// The table is int32, made by engine/backends/cuda/draws.py: a `Params` for each row, then the lists of the rows that
// have any. A row's lists begin at word `lists`, a multiple of 4:
//   DRY         double amounts (dry), int ids (dry)
//   biases      int ids (biases), float amounts (biases)
//   penalties   int ids of the last tokens (recent); an id may be there several times; −1: the row's newest token
//   mask        if `masked`: ceil(V / 32) words; bit i % 32 of word i / 32 allows token i.
struct __align__(16) Params {
    float temperature, top_k, top_p, min_p, uniform, repeat;
    int lists, biases, recent, dry, masked, unused;
    double presence, frequency;
};

struct Lists {
    const double *dry;
    const int *dry_ids, *bias_ids;
    const float *biases;
    const int *recent;
    const unsigned *mask;  // null where all tokens are allowed
};

__device__ __forceinline__ Lists lists_of(const int *table, const Params &p) {
    const int *dry = table + p.lists, *dry_ids = dry + 2 * p.dry, *bias_ids = dry_ids + p.dry;
    const int *biases = bias_ids + p.biases, *recent = biases + p.biases, *mask = recent + p.recent;
    return {reinterpret_cast<const double *>(dry),
            dry_ids,
            bias_ids,
            reinterpret_cast<const float *>(biases),
            recent,
            p.masked ? reinterpret_cast<const unsigned *>(mask) : nullptr};
}

// Saves each x = logits[ids[i]] to saved[i] and replaces it by change(x, i). PRECOND: ids are distinct.
// Returns whether one of this thread's logits was larger than -infinity.
template <class Change>
__device__ __forceinline__ bool change_logits(float *logits, const int *ids, int count, float *saved, Change change) {
    if (count == 0) return false;
    bool possible = false;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float x = logits[ids[i]];
        saved[i] = x;
        possible |= x > NEGATIVE_INFINITY;
        logits[ids[i]] = change(x, i);
    }
    __syncthreads();
    return possible;
}

__device__ __forceinline__ void restore_logits(float *logits, const int *ids, int count, const float *saved) {
    if (count == 0) return;
    for (int i = threadIdx.x; i < count; i += blockDim.x) logits[ids[i]] = saved[i];
    __syncthreads();
}

// A recent token and its logit before the penalties; token −1 where the thread has none.
struct Penalised {
    int token;
    float before;
};

// Penalises the recent tokens, one thread for each; of equal ones only the first is penalised, for all occurrences.
// newest: what -1 stands for in `recent`; null where there is none. It may be negative itself: then it is left out.
__device__ __forceinline__ Penalised penalise(float *logits, const int *recent, const int *newest, const Params &p) {
    if (p.recent == 0) return {-1, NEGATIVE_INFINITY};
    const auto recent_at = [&](int i) { return recent[i] < 0 && newest ? *newest : recent[i]; };
    int token = threadIdx.x < p.recent ? recent_at(threadIdx.x) : -1, occurrences = 0;
    for (int i = 0; token >= 0 && i < p.recent; ++i) {
        const bool same = recent_at(i) == token;
        if (same && i < threadIdx.x) token = -1;
        occurrences += same;
    }
    const float before = token >= 0 ? logits[token] : NEGATIVE_INFINITY;
    if (token >= 0) {
        const float seen = before > 0.0f ? __fdiv_rn(before, p.repeat) : __fmul_rn(before, p.repeat);
        logits[token] = float(__dsub_rn(__dsub_rn(double(seen), __dmul_rn(occurrences, p.frequency)), p.presence));
    }
    __syncthreads();
    return {token, before};
}

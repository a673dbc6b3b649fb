// Attention over codes without any optimisation, to be read first: each step is one of the formulas below. The engine
// runs decode_attention.cu; `python -m scripts.run_naive` runs this kernel without a GPU and checks it against NumPy.
//
// A step has one new token for each sequence b. Its query q of head h attends to keys k_t and values v_t of all tokens:
//     s_t = scale · q·k_t        out = Σ_t e^(s_t) v_t / Σ_t e^(s_t)
// Tokens lie in blocks of N. The first block of a sequence (the sink) and the last (the current block) are in full
// precision; the blocks between them are codes of `ring4`. A vector of D channels, rotated before, is stored as a norm
// n and, for each pair of neighbouring channels, one of 256 points:
//     y = n · (points[c_0], points[c_1], …, points[c_(D/2−1)])        n = norms[its byte], c_j a byte
// The mean m of a block was subtracted from its keys before: k = m + y. So q·k = q·m + n · Σ_j q_j·points[c_j], where
// q_j is a pair of channels of q, and q·m is computed once for the block.
//
// out, q (B, H, D): q rotated as the keys are, out as the values are. lengths (B): tokens, including the new one.
// block_table (B, width): indices of a sequence's blocks, in order: the first and the last in the full pools, the
// others in the pools of codes. Pools of codes: key_codes, value_codes (blocks, K, N, D/2), key_norms, value_norms
// (blocks, K, N), key_means (blocks, K, D) times key_mean_scales (blocks, K). full_keys, full_values (slots, K, N, D).
// Tables of the codec: points (256, 2), norms (256). K KV heads; GROUP = H / K query heads share one.
//
// Grid (H, B), block 32: one warp for each query head of each sequence. Lane l has pairs l, l + 32, … of every vector.
// DEFINES: D, BLOCK_SIZE (N), GROUP. PRECOND: D is a multiple of 64; every length is at least 1.

constexpr int N = BLOCK_SIZE, PER_LANE = D / 64;  // tokens of a block; pairs of a vector that a lane has

struct Vector {
    float2 pairs[PER_LANE];
};

__device__ float to_float(signed char x) { return x; }

// Reads a vector of floats, halves or bytes.
template <class T>
__device__ Vector read(const T *x) {
    Vector v;
    for (int i = 0; i < PER_LANE; ++i) {
        const T *pair = x + 2 * (threadIdx.x + 32 * i);
        v.pairs[i] = make_float2(to_float(pair[0]), to_float(pair[1]));
    }
    return v;
}

// Reads the points of D/2 codes; the norm is not applied.
__device__ Vector read_points(const unsigned char *codes, const float *points) {
    Vector v;
    for (int i = 0; i < PER_LANE; ++i) {
        const int code = codes[threadIdx.x + 32 * i];
        v.pairs[i] = make_float2(points[2 * code], points[2 * code + 1]);
    }
    return v;
}

// a·b, in every lane.
__device__ float dot(const Vector &a, const Vector &b) {
    float sum = 0.0f;
    for (int i = 0; i < PER_LANE; ++i) sum += a.pairs[i].x * b.pairs[i].x + a.pairs[i].y * b.pairs[i].y;
    return warp_sum(sum);
}

// Online softmax. e^(s_t) would overflow, so all weights are e^(s_t − maximum) with the largest score so far. When a
// larger score comes, the sums are multiplied by e^(old maximum − new maximum).
struct Softmax {
    Vector sum;     // Σ e^(s_t − maximum) v_t
    float total;    // Σ e^(s_t − maximum)
    float maximum;  // max s_t

    // One more token, whose value is norm · v.
    __device__ void add(float score, float norm, const Vector &v) {
        const float new_maximum = fmaxf(maximum, score);
        const float rescale = expf(maximum - new_maximum), weight = expf(score - new_maximum);
        maximum = new_maximum;
        total = total * rescale + weight;
        for (int i = 0; i < PER_LANE; ++i) {
            sum.pairs[i].x = sum.pairs[i].x * rescale + weight * norm * v.pairs[i].x;
            sum.pairs[i].y = sum.pairs[i].y * rescale + weight * norm * v.pairs[i].y;
        }
    }
};

extern "C" __global__ void __launch_bounds__(32)
naive_attention_kernel(float *out, const float *q, const int *block_table, const int *lengths,
                       const unsigned char *key_codes, const unsigned char *key_norms, const signed char *key_means,
                       const __half *key_mean_scales, const unsigned char *value_codes,
                       const unsigned char *value_norms, const __half *full_keys, const __half *full_values,
                       const float *points, const float *norms, int width, int kv_heads, float scale) {
    const int head = blockIdx.x, sequence = blockIdx.y, kv_head = head / GROUP;
    const long long row = ((long long)sequence * gridDim.x + head) * D;  // row of q and of out
    const int length = lengths[sequence], blocks = (length + N - 1) / N;

    const Vector query = read(q + row);
    Softmax softmax = {{}, 0.0f, -1e30f};

    for (int block = 0; block < blocks; ++block) {
        const long long place = (long long)block_table[sequence * width + block] * kv_heads + kv_head;
        const int tokens = min(N, length - block * N);
        if (block == 0 || block == blocks - 1) {
            for (int t = 0; t < tokens; ++t) {
                const long long at = (place * N + t) * D;
                softmax.add(scale * dot(query, read(full_keys + at)), 1.0f, read(full_values + at));
            }
        } else {
            const float query_mean = dot(query, read(key_means + place * D)) * to_float(key_mean_scales[place]);
            for (int t = 0; t < tokens; ++t) {
                const long long token = place * N + t;
                const Vector k = read_points(key_codes + token * (D / 2), points);
                const Vector v = read_points(value_codes + token * (D / 2), points);
                const float score = query_mean + norms[key_norms[token]] * dot(query, k);
                softmax.add(scale * score, norms[value_norms[token]], v);
            }
        }
    }

    for (int i = 0; i < PER_LANE; ++i) {
        const int pair = threadIdx.x + 32 * i;
        out[row + 2 * pair] = softmax.sum.pairs[i].x / softmax.total;
        out[row + 2 * pair + 1] = softmax.sum.pairs[i].y / softmax.total;
    }
}

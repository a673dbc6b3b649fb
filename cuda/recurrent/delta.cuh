// What the kernels of gated delta rules and of Mamba 2 share. Letters as in engine/backends/delta.py: Q key heads, H
// value heads, A key dim (KEY_DIM), D value dim (VALUE_DIM), C channels of q, k and v, N tokens of a block (BLOCK). D
// is a multiple of 4, A and N are of 8, so that rows of all arrays are aligned to 16 bytes if their arrays are.

// The heads of a layer, and where a projected row [q | k | v | z | b | a] has what belongs to them.
struct DeltaHeads {
    int keys, values, tiled;  // Q, H; tiled: value head i has the key of head i mod Q, otherwise neighbours share a key

    __device__ __forceinline__ int key_of(int head) const { return tiled ? head % keys : head / (values / keys); }
    // Value head number `member` of those that share a key.
    __device__ __forceinline__ int member(int key, int member) const {
        return tiled ? key + member * keys : key * (values / keys) + member;
    }
    __device__ __forceinline__ bool is_first(int head) const { return member(key_of(head), 0) == head; }

    __device__ __forceinline__ int first_channel() const { return 0; }  // of a row
    __device__ __forceinline__ int channels() const { return 2 * keys * KEY_DIM + values * VALUE_DIM; }
    __device__ __forceinline__ int query(int key) const { return key * KEY_DIM; }
    __device__ __forceinline__ int key(int key) const { return (keys + key) * KEY_DIM; }
    __device__ __forceinline__ int value(int head) const { return 2 * keys * KEY_DIM + head * VALUE_DIM; }
    __device__ __forceinline__ int gate(int head) const { return channels() + head * VALUE_DIM; }
    __device__ __forceinline__ int beta(int head) const { return channels() + values * VALUE_DIM + head; }
    __device__ __forceinline__ int decay(int head) const { return beta(head) + values; }
};

// Where a projected row [z | x | B | C | dt] of Mamba 2 has what belongs to its heads. Their queries, keys and values
// are C, B and x; channels are counted from the first of x.
struct Mamba2Heads : DeltaHeads {
    __device__ __forceinline__ int value(int head) const { return head * VALUE_DIM; }
    __device__ __forceinline__ int key(int key) const { return values * VALUE_DIM + key * KEY_DIM; }
    __device__ __forceinline__ int query(int key) const { return values * VALUE_DIM + (keys + key) * KEY_DIM; }

    __device__ __forceinline__ int first_channel() const { return values * VALUE_DIM; }  // after z
    __device__ __forceinline__ int decay(int head) const { return first_channel() + channels() + head; }
};

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
__device__ __forceinline__ float silu_of(float x) { return x / (1.0f + __expf(-x)); }

// log(1 + e^x). NaN stays.
__device__ __forceinline__ float softplus(float x) { return (x > 0.0f ? x : 0.0f) + log1pf(__expf(-fabsf(x))); }

// The inputs of the convolution. Tokens are counted from the beginning of the slot's block: those before `place` are in
// the slot, the others are the first C numbers of rows that are `pitch` numbers apart.
struct ConvInputs {
    const float *slot, *rows;
    long long pitch;
    int channels, place;
    const float *bias;  // (C,), or null

    __device__ __forceinline__ float at(int token, int channel) const {
        return token >= place ? rows[(token - place) * pitch + channel]
                              : slot[(token + WIDTH - 1) * static_cast<long long>(channels) + channel];
    }

    // Calls keep(token, silu of bias and the sum over WIDTH tokens) for tokens first … end − 1 of a channel.
    // conv (WIDTH, C).
    template <class Keep>
    __device__ __forceinline__ void convolve(const float *conv, int channel, int first, int end, Keep keep) const {
        float weights[WIDTH], conv_inputs[WIDTH];
#pragma unroll
        for (int back = 0; back < WIDTH; ++back) {
            weights[back] = conv[back * static_cast<long long>(channels) + channel];
            if (back > 0) conv_inputs[back] = at(first - WIDTH + back, channel);
        }
        const float start = bias ? bias[channel] : 0.0f;
        for (int token = first; token < end; ++token) {
            float sum = start;
#pragma unroll
            for (int back = 0; back < WIDTH; ++back) {
                conv_inputs[back] = back < WIDTH - 1 ? conv_inputs[back + 1] : at(token, channel);
                sum += weights[back] * conv_inputs[back];
            }
            keep(token, silu_of(sum));
        }
    }
};

// The convolution's inputs, of a channel, of the block's last tokens move to its beginning.
__device__ __forceinline__ void shift_inputs(float *inputs, int channels, int channel) {
    for (int back = 0; back < WIDTH - 1; ++back)
        inputs[back * static_cast<long long>(channels) + channel] =
            inputs[(BLOCK + back) * static_cast<long long>(channels) + channel];
}

// A warp calls keep(token, g) for the tokens of a block. `stored_decays` has g of those before `low`; each of the
// tokens low … high − 1 adds change(token), and later ones nothing.
template <class Change, class Keep>
__device__ __forceinline__ void add_decays(const float *stored_decays, int low, int high, Change change, Keep keep) {
    const int lane = threadIdx.x % 32;
    float total = low > 0 ? stored_decays[low - 1] : 0.0f;
    for (int first = 0; first < BLOCK; first += 32) {
        const int token = first + lane;
        float sum = token >= low && token < high ? change(token) : 0.0f;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float earlier_sum = __shfl_up_sync(0xffffffffu, sum, step);
            if (lane >= step) sum += earlier_sum;
        }
        if (token < BLOCK) keep(token, token < low ? stored_decays[token] : total + sum);
        total += __shfl_sync(0xffffffffu, sum, 31);
    }
}

// The largest number x >= 0 of all threads of a block of WARPS warps. partial may be reused after the next barrier.
template <int WARPS>
__device__ __forceinline__ float block_max(float x, float (&partial)[WARPS]) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) x = fmaxf(x, partial[warp]);
    return x;
}

// A warp gives a vector (KEY_DIM,) in shared memory this length.
__device__ __forceinline__ void set_length(float *x, float length) {
    const int lane = threadIdx.x % 32;
    float squares = 0.0f;
    for (int i = lane; i < KEY_DIM; i += 32) squares += x[i] * x[i];
    const float factor = length * rsqrtf(warp_sum(squares) + 1e-6f);
    for (int i = lane; i < KEY_DIM; i += 32) x[i] *= factor;
}

// A warp writes RMSNorm(results) · activate(gate) of a head, all (VALUE_DIM,), to y, which may be `results`.
template <class Activate>
__device__ __forceinline__ void write_gated(float *y, const float *results, const float *gate, const float *norm,
                                            float eps, Activate activate) {
    const int lane = threadIdx.x % 32;
    float squares = 0.0f;
    for (int i = lane; i < VALUE_DIM; i += 32) squares += results[i] * results[i];
    const float factor = rsqrtf(warp_sum(squares) / VALUE_DIM + eps);
    for (int i = lane; i < VALUE_DIM; i += 32) y[i] = results[i] * factor * norm[i] * activate(gate[i]);
}

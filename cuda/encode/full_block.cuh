// Loads a full-precision block into shared memory, computes the mean of its tokens and stores it. Part of
// encode_blocks.cu, which explains letters and DEFINES.

constexpr int THREADS = WARPS * 32;

// The keys or the values of one layer, as the head of encode_blocks.cu lists them.
struct SideArrays {
    unsigned char *quantized;
    const unsigned char *full, *tables;
    const unsigned short *candidates;
    const float *feedback, *mean_query, *residues;
};

// The block and KV head of this CTA. Addresses are computed again at each call, which is cheaper than keeping them in
// registers. job: row of the side, slot of the full-precision record, id of the block.
template <class L, class Full>
struct Move {
    const SideArrays *side;
    const int *job;
    int kv_heads;

    __device__ __forceinline__ long long index(int slot) const { return slot * (long long)kv_heads + blockIdx.y; }
    __device__ __forceinline__ const unsigned char *full() const { return side->full + index(job[1]) * Full::NBYTES; }
    __device__ __forceinline__ unsigned char *record() const { return side->quantized + index(job[2]) * L::NBYTES; }
};

// Loads tokens first … first + count − 1 of a full-precision record into x: channel c of token first + t goes to
// x[t · ALONG + c · ACROSS].
template <class L, int ALONG, int ACROSS>
__device__ void load_tokens(float *x, const unsigned char *full, int first, int count) {
#pragma unroll 1
    for (int at = threadIdx.x; at < L::PARTS * L::TILES * 32; at += THREADS) {
        const int lane = at % 32, g = lane / 4, tg = lane % 4, tile = at / 32 % L::TILES;
        const int record_offset = at / 32 / L::TILES * L::PART +
                                  16 * (L::VALUES ? tile / L::STEPS : tile % L::PT) - first;
        if (record_offset < 0 || record_offset >= count) continue;
        const int token = record_offset + (L::VALUES ? 2 * tg : g);
        const int channel = 16 * (L::VALUES ? tile % L::STEPS : tile / L::PT) + 2 * (L::VALUES ? g : tg);
        const Chunk<__half> chunk = reinterpret_cast<const Chunk<__half> *>(full)[at];
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int t = token + (L::VALUES ? r / 2 * 8 + h : r % 2 * 8);
                const int c = channel + (L::VALUES ? r % 2 : r / 2 * 8 + h);
                if (c < L::D) x[t * ALONG + c * ACROSS] = to_float(chunk.at[2 * f16_order(r) + h]);
            }
    }
}

// One value of a full-precision record.
template <class L>
__device__ __forceinline__ float full_value(const unsigned char *full, int token, int channel) {
    return to_float(reinterpret_cast<const __half *>(full)[full_index<L>(token, channel)]);
}

// Adds the tokens of x to sums (D), one after the other; `first` clears the sums before. x as in `load_tokens`.
template <int D, int ALONG, int ACROSS>
__device__ void add_tokens(float *sums, const float *x, int count, bool first) {
#pragma unroll 1
    for (int c = threadIdx.x; c < D; c += THREADS) {
        float sum = first ? 0.0f : sums[c];
#pragma unroll 8
        for (int t = 0; t < count; ++t) sum = __fadd_rn(sum, x[t * ALONG + c * ACROSS]);
        sums[c] = sum;
    }
}

// mean (D): in, the sums over the block; out, the mean as it is read back from the record, to which it is written.
// Called by all threads, between two barriers.
template <class L>
__device__ void store_mean(unsigned char *record, float *mean) {
    const auto mean_of = [&](int c) { return fminf(fmaxf(__fdiv_rn(mean[c], float(L::N)), -65504.0f), 65504.0f); };
    float largest = 0.0f;
    for (int c = threadIdx.x % 32; c < L::D; c += 32) largest = fmaxf(largest, fabsf(mean_of(c)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    const __half scale = __float2half_rn(__fdiv_rn(largest, 127.0f));
    const float step = to_float(scale) > 0.0f ? to_float(scale) : 1.0f;
    __syncthreads();
    for (int c = threadIdx.x; c < L::DP; c += THREADS) {
        const int at = (c % 8 / 2 * L::STEPS + c / 16) * 4 + c % 16 / 8 * 2 + c % 2;
        const float unrounded = c < L::D ? mean_of(c) : 0.0f;
        float stored;
        if constexpr (L::MEAN_BITS == 16) {
            const __half half = __float2half_rn(unrounded);
            reinterpret_cast<__half *>(record + L::MEAN)[at] = half;
            stored = to_float(half);
        } else {
            const int code = __float2int_rn(fminf(fmaxf(rintf(__fdiv_rn(unrounded, step)), -127.0f), 127.0f));
            reinterpret_cast<signed char *>(record + L::MEAN)[at] = static_cast<signed char>(code);
            stored = __fmul_rn(float(code), to_float(scale));
        }
        if (c < L::D) mean[c] = stored;
    }
    if (L::MEAN_BITS == 8 && threadIdx.x == 0) *reinterpret_cast<__half *>(record + L::MEAN_SCALE) = scale;
}

// The mean of a block, as it is read back from the record, to which it is written. x: room for `count` tokens.
template <class L, int STRIDE, class Block>
__device__ __forceinline__ void mean_of_block(float *mean, float *x, const Block &block, int count) {
    for (int first = 0; first < L::N; first += count) {
        load_tokens<L, 1, STRIDE>(x, block.full(), first, count);
        __syncthreads();
        add_tokens<L::D, 1, STRIDE>(mean, x, count, first == 0);
        __syncthreads();
    }
    store_mean<L>(block.record(), mean);
    __syncthreads();
}

// Sums of squares of channels from … to − 1 of a token, whose column of x begins at `column`: see `measure`.
template <class L, int STRIDE>
__device__ __forceinline__ float sum_squares(float *column, const float *mean, int from, int to, bool clipped) {
    float sum = 0.0f;
    for (int c = from + thread_read_anew() % 8; c < to; c += 8) {
        float value = column[c * STRIDE];
        if (L::MEAN_BITS) value = __fsub_rn(value, mean[c]);
        if (clipped) value = fminf(fmaxf(value, -LARGEST), LARGEST);
        column[c * STRIDE] = value;
        sum = __fadd_rn(sum, __fmul_rn(value, value));
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, step));
    return sum;
}

// Subtracts the mean, if there is one, from the first `count` tokens of x (D, STRIDE), a multiple of four, clips them
// if `clipped`, and writes their rms. Eight lanes share a token and add in NumPy's order.
template <class L, int STRIDE>
__device__ void measure(float *sizes, float *x, const float *mean, int count, bool clipped) {
    constexpr int head = L::D <= 128 ? L::D : L::D / 2 / 8 * 8;
    for (int four = threadIdx.x / 32; four < count / 4; four += WARPS) {
        const int t = 4 * four + threadIdx.x % 32 / 8;
        float sum = sum_squares<L, STRIDE>(x + t, mean, 0, head, clipped);
        if (head < L::D) sum = __fadd_rn(sum, sum_squares<L, STRIDE>(x + t, mean, head, L::D, clipped));
        if (threadIdx.x % 8 == 0) sizes[t] = __fsqrt_rn(__fdiv_rn(sum, float(L::D)));
    }
}

// Subtracts the mean, if there is one, from the first `count` tokens of x (D, STRIDE), a multiple of four, and writes
// the norms that cover their largest values.
template <class L, class Codec, int STRIDE>
__device__ void cover(float *sizes, float *x, const float *mean, int count, const unsigned char *tables) {
    for (int four = threadIdx.x / 32; four < count / 4; four += WARPS) {
        const int t = 4 * four + threadIdx.x % 32 / 8;
        float largest = 0.0f;
        for (int c = threadIdx.x % 8; c < L::D; c += 8) {
            float value = x[c * STRIDE + t];
            if (L::MEAN_BITS) x[c * STRIDE + t] = value = __fsub_rn(value, mean[c]);
            largest = fmaxf(largest, fabsf(value));
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
        if (threadIdx.x % 8 == 0) sizes[t] = Codec::cover(largest, tables);
    }
}

// The mean of a block, the rms of its tokens, their inverses, and the codec's points. COUNT: tokens in x.
template <class L, class Codec, int COUNT, class Arrays, class Block>
__device__ __forceinline__ void measure_block(Arrays &arrays, const Block &block) {
    if constexpr (L::MEAN_BITS != 0) mean_of_block<L, Arrays::STRIDE>(arrays.mean, arrays.x, block, COUNT);
#pragma unroll 1
    for (int token = 0; token < L::N; token += COUNT) {
        load_tokens<L, 1, Arrays::STRIDE>(arrays.x, block.full(), token, COUNT);
        __syncthreads();
        measure<L, Arrays::STRIDE>(arrays.sizes + token, arrays.x, arrays.mean, COUNT, true);
        __syncthreads();
    }
    const float *table = reinterpret_cast<const float *>(block.side->tables + Codec::POINTS_F32);
    for (int i = threadIdx.x; i < Codec::POINTS * Codec::WIDTH; i += THREADS) arrays.points[i] = table[i];
    for (int i = threadIdx.x; i < L::N; i += THREADS)
        arrays.inverses[i] = arrays.sizes[i] > 0.0f ? 1.0f / arrays.sizes[i] : 0.0f;
}

// Queries and keys of a block of a prompt, and their products.

constexpr int TILE = BLOCK / 4;  // a thread has 4 × 4 products of tokens, TILE tokens apart

// Shared memory: queries, then keys, of LOADED channels. Tokens are so far apart that neighbours are in other banks.
template <int LOADED>
using Pairs = float[2][BLOCK][LOADED + 4];

// All threads convolve queries and keys of the tokens low … high − 1 of the block that begins with token `begin`, from
// channel `first` on. Keys of earlier tokens are the slot's, (A, N); all else is 0.
template <int LOADED, class Heads>
__device__ __forceinline__ void load_pairs(float (&pairs)[2][BLOCK][LOADED + 4], const Heads &heads, int key_head,
                                           const ConvInputs &conv_inputs, const float *conv, const float *kept_keys,
                                           int begin, int low, int high, int first = 0) {
    constexpr int ROW = LOADED + 4;
    for (int i = threadIdx.x; i < 2 * LOADED; i += THREADS) {
        const int is_key = i / LOADED, own = first + i % LOADED;
        float *const column = &pairs[is_key][0][i % LOADED];
        if (KEY_DIM % LOADED && own >= KEY_DIM) {
            for (int token = 0; token < BLOCK; ++token) column[token * ROW] = 0.0f;
            continue;
        }
        for (int token = 0; token < low; ++token) column[token * ROW] = is_key ? kept_keys[own * BLOCK + token] : 0.0f;
        conv_inputs.convolve(conv, own + (is_key ? heads.key(key_head) : heads.query(key_head)), begin + low,
                             begin + high,
                             [&](int token, float x) { column[(token - begin) * ROW] = x; });
        for (int token = high; token < BLOCK; ++token) column[token * ROW] = 0.0f;
    }
}

// products[0][r][s] += the product of the query of token own + TILE · r and the key of token other + TILE · s; with
// COUNT 2, products[1] likewise of the keys of both.
template <int COUNT, int ROW>
__device__ __forceinline__ void multiply_tokens(float (&products)[COUNT][4][4], const float (&pairs)[2][BLOCK][ROW],
                                                int own, int other) {
#pragma unroll 1
    for (int channel = 0; channel < ROW - 4; channel += 4) {
        float right[4][4];
#pragma unroll
        for (int s = 0; s < 4; ++s) load_floats(right[s], pairs[1][other + TILE * s] + channel);
#pragma unroll
        for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int which = 0; which < COUNT; ++which) {
                float left[4];
                load_floats(left, pairs[which][own + TILE * r] + channel);
#pragma unroll
                for (int s = 0; s < 4; ++s)
#pragma unroll
                    for (int e = 0; e < 4; ++e) products[which][r][s] += left[e] * right[s][e];
            }
    }
}

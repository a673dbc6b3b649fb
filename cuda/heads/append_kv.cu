// The op `append_kv`: writes new keys and values, transformed before, into the blocks that hold their positions.
//
// k, v float: row r holds K vectors of D at k + r · k_stride, v + r · v_stride. They are stored as halves, clipped to
// ±65504; NaN stays.
// current_k, current_v: pools (records, K, bytes) of full-precision records. spans int32 (B, span_stride): a Span for
// each sequence.
//
// A CTA writes one KV head of 16 positions that begin at a multiple of 16: on each side one tile for every 16 channels.
// A thread makes 16 bytes of a tile: of keys, four channels of two tokens; of values, two channels of four tokens. It
// stores them in one access if the launch has all of these tokens, else only the halves of those that it has.
// Grid (B · groups, K), where groups is ceil((rows + 15) / 16) for the most rows of a sequence: they touch no more.
// Block: whole warps; with 2 · DP / 16 of them every thread makes 16 bytes. DEFINES: none.
// PRECOND: k, v aligned to 8 bytes, D and strides even.

constexpr int APPEND_STEPS = FullKeyLayout::STEPS, APPEND_SLOTS = APPEND_STEPS * 32;

__device__ __forceinline__ unsigned clipped_halves(float x, float y) {
    return as_bits(__floats2half2_rn(within<__half>(x), within<__half>(y)));
}

// One KV head at 16 positions: token t of these is row `first` + t of the sequence, where 0 <= `first` + t < `rows`.
struct NewTokens {
    const float *head;
    long long stride;
    int first, rows;

    __device__ bool has(int token) const { return first + token >= 0 && first + token < rows; }

    // Channels `channel` and channel + 1; zero for a token that the launch does not have, and from channel D on.
    __device__ float2 pair(int token, int channel) const {
        if (!has(token) || channel >= FullKeyLayout::D) return make_float2(0.0f, 0.0f);
        return *reinterpret_cast<const float2 *>(head + (first + token) * stride + channel);
    }
};

// Registers a[0..3] of lane 4 · g + tg in key tile `step`.
__device__ __forceinline__ void append_keys(unsigned *slot, const NewTokens &k, int step, int g, int tg) {
    unsigned a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const float2 x = k.pair(g + r % 2 * 8, 16 * step + r / 2 * 8 + 2 * tg);
        a[r] = clipped_halves(x.x, x.y);
    }
    if (k.has(g) && k.has(g + 8)) {
        *reinterpret_cast<uint4 *>(slot) = f16_words(a);
        return;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
        if (k.has(g + r % 2 * 8)) slot[f16_order(r)] = a[r];
}

// Registers a[0..3] of lane 4 · g + tg in value tile `step`.
__device__ __forceinline__ void append_values(unsigned *slot, const NewTokens &v, int step, int g, int tg) {
    unsigned a[4];
    bool has[4];  // tokens 2tg, 2tg + 1, 2tg + 8, 2tg + 9
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = 8 * half + 2 * tg, channel = 16 * step + 2 * g;
        const float2 x = v.pair(token, channel), y = v.pair(token + 1, channel);
        a[2 * half] = clipped_halves(x.x, y.x);
        a[2 * half + 1] = clipped_halves(x.y, y.y);
        has[2 * half] = v.has(token);
        has[2 * half + 1] = v.has(token + 1);
    }
    if (has[0] && has[1] && has[2] && has[3]) {
        *reinterpret_cast<uint4 *>(slot) = f16_words(a);
        return;
    }
    unsigned short *const halves = reinterpret_cast<unsigned short *>(slot);
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (has[r / 2 * 2 + i]) halves[2 * f16_order(r) + i] = static_cast<unsigned short>(a[r] >> 16 * i);
}

extern "C" __global__ void __launch_bounds__(1024)
append_kv_kernel(unsigned char *current_k, unsigned char *current_v, const float *k, const float *v, const int *spans,
                 int span_stride, int groups, int kv_heads, long long k_stride, long long v_stride) {
    let_next_begin();
    wait_for_previous();
    using Layout = FullKeyLayout;
    const int head = blockIdx.y;
    const Span &span = span_at(spans, span_stride, blockIdx.x / groups);
    const int first_row = span.first_row, rows = span.rows, position = span.position;
    const int start = (position / 16 + blockIdx.x % groups) * 16;  // the first of the 16 positions
    if (start >= position + rows) return;

    const NewTokens keys = {k + first_row * k_stride + head * Layout::D, k_stride, start - position, rows};
    const NewTokens values = {v + first_row * v_stride + head * Layout::D, v_stride, start - position, rows};
    const long long record = (long long)span.record(start / Layout::N) * kv_heads + head;
    const int token = start % Layout::N, part = token / Layout::PART, tile_row = token % Layout::PART / 16;
    const int part_at = part * Layout::TILES * 512;
    for (int i = threadIdx.x; i < (current_v ? 2 : 1) * APPEND_SLOTS; i += blockDim.x) {
        const int step = i / 32 % APPEND_STEPS, lane = i % 32, g = lane / 4, tg = lane % 4;
        const bool is_key = i < APPEND_SLOTS;
        const int tile = is_key ? step * Layout::PT + tile_row : tile_row * APPEND_STEPS + step;
        unsigned char *const pool = is_key ? current_k : current_v;
        unsigned char *const at = pool + record * Layout::NBYTES + part_at + tile * 512 + lane * 16;
        unsigned *const slot = reinterpret_cast<unsigned *>(at);
        if (is_key) append_keys(slot, keys, step, g, tg);
        else append_values(slot, values, step, g, tg);
    }
}

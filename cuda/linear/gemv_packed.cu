// The op `linear` for one or two rows and packed weights on tensor cores, with RMS norm before it and the residual sum
// after it: y = x @ weightᵀ + bias.
//
// y: rows of `out` numbers, `pitch` numbers apart; x (rows, in), weight (out, in), bias (out) float or null. x is
// rounded to half precision, clipped to ±65504; sums are float. With NORMED, x is replaced by x / rms(x) · norm, norm
// (in) float: every block computes 1 / rms(x) while its first weights are on their way. With ADD, y += instead of y =.
// With an ACTIVATION (GATED), weight and bias are [gate | up], 2 · out rows, and y is ACTIVATION(gate, up).
// Codes are multiplied as they are, as halves base + code, and the factors of a group of inputs with the group's sum:
//     Σ w x = scale · (Σ (base + code) x − Σ (base + ZERO) x) + offset · Σ x
// so that weights are not rounded, and a group costs as many instructions as eight weights. Tensor cores keep 8
// groups' sums apart: in mma.m16n8k16, column n of B has the inputs of group n, and is zero while other groups are
// multiplied. One product of those columns with a constant A gives all Σ (base + ZERO) x and Σ x.
// Blocks stay: block b multiplies every gridDim.x-th set of TILES tiles of 16 rows, from set b on. Of the inputs of a
// set, its warps take turns at units of UNIT, whole blocks of the format, and their sums are added in shared memory;
// they copy the units of the next set while they multiply and add.
// Grid (sets of tiles, or fewer), 32 · WARPS threads. With EXPERTS (0 or 1, default 0) it has pairs in z, and more
// arguments: chosen_expert.cuh. With SECOND it has more blocks and arguments: output_tile.cuh.
// DEFINES: WEIGHT (a packed format), ROWS (most rows: 1, 2), UNIT (128 or 256, a multiple of VALUES), TILES (even if
// GATED), SLOTS (more than TILES), WARPS, RESIDENT (blocks of a multiprocessor), SHARED (bytes of dynamic shared
// memory), NORMED (0 or 1), ADD (0 or 1), ACTIVATION (a function of activation.cuh, or not defined), TO (type of y, see
// output_tile.cuh), SECOND.
// JOINS: activation.cuh, inverse_rms.cuh, output_tile.cuh, chosen_expert.cuh.
// Cost: bytes of the weights; at least WARPS · (SLOTS − TILES) units per block are in flight. Each block reads x
// from L2 or L1 for each set.
// PRECOND: 1 <= rows <= ROWS; in % VALUES == 0; x, norm aligned to 16 bytes; out % 16 == 0 if GATED or EXPERTS.

// Floats between the sums of neighbouring rows of x, in shared memory: 8 of them are in different banks.
constexpr int pitch_of(int tile) { return tile + 4; }

// Adds the sums of all warps, `warp_sums` [WARPS][ROWS][pitch_of(TILE_ROWS)], and writes them to y. thread: the
// caller's number; the first threads write.
template <int TILE_ROWS>
__device__ __forceinline__ void store_tile(TO *y, const float *warp_sums, const Tile &tile, const float *bias,
                                           int rows, long long pitch, int thread) {
    constexpr int COLUMNS_OF_Y = GATED ? TILE_ROWS / 2 : TILE_ROWS;
    const auto product = [&](int row, int c) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < WARPS; ++k) total += warp_sums[(k * ROWS + row) * pitch_of(TILE_ROWS) + c];
        return bias ? total + bias[tile.row_of(c)] : total;
    };
    for (int i = thread; i < rows * COLUMNS_OF_Y; i += blockDim.x) {
        const int row = i / COLUMNS_OF_Y, place = i % COLUMNS_OF_Y, c = GATED ? place / 16 * 32 + place % 16 : place;
        if (tile.column_of(c) >= tile.out) continue;
        float total = product(row, c);
        if (GATED) total = ACTIVATION(total, product(row, c + 16));
        store(y + row * pitch + tile.column_of(c), total);
    }
}

constexpr int THREADS = 32 * WARPS;

// A row of x: lane l has inputs 8l … 8l + 7 of a unit, and zeros after it.
struct Inputs {
    const float *row;
    float factor;     // 1 / rms
    float values[8];  // x of the next unit

    // Loads inputs k … k + 7, or zeros from `in` on.
    __device__ __forceinline__ void fetch(int k, int in) {
        if (k < in) {
            load_floats(values, row + k);
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) values[j] = 0.0f;
        }
    }
    __device__ __forceinline__ uint4 rounded(const float (&norm)[8]) {
        if (NORMED) {
#pragma unroll
            for (int j = 0; j < 8; ++j) values[j] = values[j] * factor * norm[j];
        }
        uint4 octet;
        store_within(reinterpret_cast<__half *>(&octet), values);
        return octet;
    }
};

// d += the A operand (w0, w1) of 16 rows and 32 inputs, rows 0 … 7 in w0, times x.
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&w0)[4], const unsigned (&w1)[4],
                                         const uint4 &x) {
    mma_m16n8k16_f16(d, {w0[0], w1[0], w0[1], w1[1]}, {x.x, x.y});
    mma_m16n8k16_f16(d, {w0[2], w1[2], w0[3], w1[3]}, {x.z, x.w});
}

// What a block does with a matrix of the format W. U, M, S: its UNIT, TILES and SLOTS.
template <class W, int U, int M, int S>
struct Product {
    static constexpr int TILE = 16 * M;
    static constexpr int BYTES = U / W::VALUES * W::BLOCK;               // a unit of a tile has
    static constexpr int SPAN = 8 * W::GROUP < U ? 8 * W::GROUP : U;     // inputs of up to 8 groups
    static constexpr int UNROLLED = ROWS == 1 && M == 1 ? U / SPAN : 1;  // spans: more would need more registers
    static constexpr bool WHOLE = U == W::VALUES;                        // then the inputs are whole units
    static constexpr int JOINED = WARPS * ROWS * pitch_of(TILE);         // floats: the sums of all warps
    static constexpr int ALL_BYTES = WARPS * S * BYTES + 2 * JOINED * 4;  // slots of all warps, sums of two sets
    static_assert(S > M && !(GATED && M % 2) && U % W::VALUES == 0 && U <= 256, "as the head says");
    static_assert(W::GROUP == 32 || W::GROUP == 16, "a step has one group or two");

    // The lane's part of B for a span of a unit whose inputs the warp has in `octet`: column n = lane / 4 has group
    // n's inputs, and zeros elsewhere.
    static __device__ __forceinline__ uint4 columns_of(const uint4 &octet, int span) {
        if (W::GROUP == 32) return octet;
        const int lane = threadIdx.x % 32, from = span * 16 + lane / 8 * 4 + lane % 4;
        const bool own = lane % 4 / 2 == lane / 4 % 2;  // a step has the inputs of two groups
        const uint4 other = {__shfl_sync(0xffffffffu, octet.x, from), __shfl_sync(0xffffffffu, octet.y, from),
                             __shfl_sync(0xffffffffu, octet.z, from), __shfl_sync(0xffffffffu, octet.w, from)};
        return own ? other : make_uint4(0, 0, 0, 0);
    }
    // For columns 2t and 2t + 1, t = lane % 4: Σ x in [0] and [1], Σ (base + ZERO) x in [2] and [3].
    static __device__ __forceinline__ void add_up(float (&sums)[4], const uint4 &columns) {
        unsigned ones[4], bases[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) ones[p] = 0x3c003c00u, bases[p] = as_bits(__float2half2_rn(W::zero(p)));
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] = 0.0f;
        multiply(sums, ones, bases, columns);
    }

    // Multiplies all rows of x and writes y. number: the block's, of the `blocks` that multiply the matrix. partial: of
    // shared memory, for 1 / rms. wait: for the launch before, while the first weights are on their way.
    template <class Wait>
    static __device__ __forceinline__ void run(TO *y, const float *x, const unsigned char *weight, const float *bias,
                                               const float *norm, int rows, int in, int out, long long pitch, float eps,
                                               int first_tile, int number, int blocks, unsigned char *shared,
                                               float (*partial)[32], Wait wait) {
        const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        const int units = (in + U - 1) / U, sets = ((GATED ? 2 : 1) * out + TILE - 1) / TILE;
        const auto tile_of = [&](int set) { return Tile{set * (GATED ? TILE / 2 : TILE), out}; };
        unsigned char *const places = shared + warp * (S * BYTES);

        // The unit and the set whose weights are copied next.
        int next_unit = warp, next_set = number;
        const unsigned char *tiles[M];
        const auto point = [&] {
            const Tile tile = tile_of(next_set);
#pragma unroll
            for (int m = 0; m < M; ++m)
                tiles[m] = W::block_at(weight, first_tile + tile.row_of(16 * m) / 16, in, 0) + 16 * lane;
        };
        // Commits one group of copies, of that unit of tile m; it is empty after the last unit.
        const auto copy = [&](int slot, int m) {
            if (next_unit < units && next_set < sets) {
                const int left = WHOLE ? U : min(U, in - next_unit * U);
                const int end = left / W::VALUES * W::BLOCK;
                const unsigned char *const from = tiles[m] + next_unit * (long long)BYTES;
#pragma unroll
                for (int at = 0; at < BYTES; at += 512)
                    if (at + 16 * lane < end) cp_async<16>(places + slot + 16 * lane + at, from + at);
            }
            cp_async_commit();
            if (m < M - 1) return;
            next_unit += WARPS;
            if (next_unit >= units) next_unit = warp, next_set += blocks, point();
        };
        point();
#pragma unroll
        for (int i = 0; i < S; ++i) copy(i * BYTES, i % M);
        wait();

        Inputs inputs[ROWS];
        float norms[8];  // norm weights of the next unit
        const auto fetch = [&](int unit) {
            const int k = 8 * lane < U ? unit * U + 8 * lane : in;
#pragma unroll
            for (int r = 0; r < ROWS; ++r) inputs[r].fetch(k, in);
            if (NORMED && k < in) load_floats(norms, norm + k);
        };
#pragma unroll
        for (int r = 0; r < ROWS; ++r) inputs[r].row = x + min(r, rows - 1) * (long long)in;
        fetch(warp);
#if NORMED
#pragma unroll
        for (int r = 0; r < ROWS; ++r) inputs[r].factor = inverse_rms(inputs[r].row, in, eps, partial[r]);
#endif
        const unsigned zero = unsigned(rows) >> 31;  // see PackedWeights::unpack
        int slots[M];                            // slots of the unit's tiles
#pragma unroll
        for (int m = 0; m < M; ++m) slots[m] = m * BYTES;
        float *warp_sums = reinterpret_cast<float *>(shared + WARPS * S * BYTES);
        int first = 0;  // the first thread that writes y: others do for the next set, whose sums have another place
        for (int set = number; set < sets; set += blocks) {
            float sums[M][ROWS][2] = {};  // for rows lane / 4 and lane / 4 + 8 of a tile, over the lane's groups
            for (int unit = warp; unit < units; unit += WARPS) {
                uint4 octets[ROWS];
#pragma unroll
                for (int r = 0; r < ROWS; ++r) octets[r] = inputs[r].rounded(norms);
                fetch(unit + WARPS < units ? unit + WARPS : warp);
                const int left = WHOLE ? U : min(U, in - unit * U);
                cp_async_wait<S - M>();
                __syncwarp();
#pragma unroll UNROLLED
                for (int span = 0; span < U / SPAN; ++span) {
                    uint4 columns[ROWS];
                    float constants[ROWS][4], products[M][ROWS][4] = {};
#pragma unroll
                    for (int r = 0; r < ROWS; ++r) {
                        columns[r] = columns_of(octets[r], span);
                        add_up(constants[r], columns[r]);
                    }
#pragma unroll
                    for (int step = 0; step < SPAN / 32; ++step) {
                        const int k = span * SPAN + 32 * step;
                        if (!WHOLE && k >= left) break;
                        uint4 x[ROWS];
#pragma unroll
                        for (int r = 0; r < ROWS; ++r)
                            x[r] = lane / 4 * W::GROUP / 32 == step ? columns[r] : make_uint4(0, 0, 0, 0);
#pragma unroll
                        for (int m = 0; m < M; ++m) {
                            const unsigned char *const block = places + slots[m] + k / W::VALUES * W::BLOCK;
                            const unsigned char *const plane = block + W::plane(k % W::VALUES);
                            const auto low = W::unpack(plane, lane, 0, zero);
                            const auto high = W::unpack(plane, lane, 1, zero);
#pragma unroll
                            for (int r = 0; r < ROWS; ++r) multiply(products[m][r], low.pairs, high.pairs, x[r]);
                        }
                    }
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const int k = span * SPAN + (lane % 4 * 2 + c) * W::GROUP;
                        if (!WHOLE && k >= left) continue;
#pragma unroll
                        for (int m = 0; m < M; ++m)
#pragma unroll
                            for (int half = 0; half < 2; ++half) {
                                const unsigned char *const block = places + slots[m] + k / W::VALUES * W::BLOCK;
                                const int group = k % W::VALUES / W::GROUP;
                                const float2 f = W::products(W::factors(block, half * 8 + lane / 4, group));
#pragma unroll
                                for (int r = 0; r < ROWS; ++r) {
                                    float &sum = sums[m][r][half];
                                    sum += f.x * (products[m][r][2 * half + c] - constants[r][2 + c]);
                                    if (W::OFFSETS) sum += f.y * constants[r][c];
                                }
                            }
                    }
                }
                __syncwarp();
#pragma unroll
                for (int m = 0; m < M; ++m) {
                    copy(slots[m], (m + S) % M);
                    slots[m] += slots[m] >= (S - M) * BYTES ? (M - S) * BYTES : M * BYTES;
                }
            }

#pragma unroll
            for (int m = 0; m < M; ++m)
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        float sum = sums[m][r][half];
#pragma unroll
                        for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
                        float *const to = warp_sums + (warp * ROWS + r) * pitch_of(TILE) + m * 16;
                        if (lane % 4 == 0) to[half * 8 + lane / 4] = sum;
                    }
            __syncthreads();
            store_tile<TILE>(y, warp_sums, tile_of(set), bias, rows, pitch, (threadIdx.x + first) % THREADS);
            warp_sums += first % 64 == 0 ? JOINED : -JOINED;
            first += 32;
        }
    }
};

using Own = Product<WEIGHT, UNIT, TILES, SLOTS>;
#ifdef SECOND
using Second = Product<SECOND, SECOND_UNIT, SECOND_TILES, SECOND_SLOTS>;
static_assert(SHARED == (Own::ALL_BYTES > Second::ALL_BYTES ? Own::ALL_BYTES : Second::ALL_BYTES), "for either");
#else
static_assert(SHARED == Own::ALL_BYTES, "the slots of each warp, and the sums of two sets");
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
gemv_packed_kernel(TO *y, const float *x, const unsigned char *weight, const float *bias, const float *norm, int rows,
                   int in, int out, long long pitch, float eps EXPERT_ARGUMENTS SECOND_ARGUMENTS) {
    let_next_begin();
    DYNAMIC_SHARED(unsigned char, shared);
#if NORMED
    __shared__ float partial[ROWS][32];
#else
    float(*const partial)[32] = nullptr;
#endif
#if EXPERTS
    const int size = (GATED ? 2 : 1) * out;
    const int first_tile = begin_pair(x, y, bias, experts, sharing, bias_pitch, in, size, pitch) / 16;
#else
    constexpr int first_tile = 0;
#endif
    const auto wait = [] { wait_for_previous(); };
#ifdef SECOND
    if (int(blockIdx.x) >= border) {
        Second::run(y + out, x, second, bias ? bias + out : nullptr, norm, rows, in, second_out, pitch, eps, 0,
                    blockIdx.x - border, gridDim.x - border, shared, partial, wait);
        return;
    }
    const int blocks = border;
#else
    const int blocks = gridDim.x;
#endif
    Own::run(y, x, weight, bias, norm, rows, in, out, pitch, eps, first_tile, blockIdx.x, blocks, shared, partial,
             wait);
}

// The search for the best path of a token: `engine.codecs.parts.viterbi`. Part of encode_blocks.cu.
//
// Four neighbouring lanes share a token, one for the survivor of each state. A step extends each survivor to each
// state, and three shuffles leave the best extension into a state with that state's lane. A survivor is its links: each
// one the state before and a code. With a metric, targets of the next BATCH pairs are in registers, and move from lane
// to lane with their path. For errors before them a survivor goes back along its links, computes each error from its
// code and adds its feedback.

// A point, or a target, with the signs of a state: the two lowest bits of the code before.
__device__ __forceinline__ float2 flipped(float2 p, unsigned state) {
    return make_float2(__uint_as_float(__float_as_uint(p.x) ^ (state & 1) << 31),
                       __uint_as_float(__float_as_uint(p.y) ^ (state & 2) << 30));
}

template <class L, class Codec>
struct PathSearch {
    using R = RounderMemory<L, Codec>;
    static constexpr int D = L::D, PAIRS = R::PAIRS, STRIDE = R::STRIDE, STATES = 4, BATCH = PAIRS % 8 ? 4 : 8;
    static constexpr int CELLS = 256, PER_UNIT = 32;  // cells along a side of the square [−4, 4)²
    static constexpr float CLIP = 1e6f, UNREACHABLE = 1e30f;

    const float *x;          // the token's column: channels are STRIDE apart
    const float2 *points;    // (POINTS)
    unsigned short *links;   // the token's, (PAIRS, TOKENS, STATES): the state a survivor comes from * 256 + its code
    const unsigned *cells;   // (CELLS, CELLS): for each state that is entered, a byte with its candidate's code
    const float *feedback, *weights;  // the metric's; null without one
    float size;              // the token's; with a metric, 1 / size
    float total;             // cost of this lane's survivor

    __device__ __forceinline__ void run() {
        total = threadIdx.x % STATES ? UNREACHABLE : 0.0f;
#pragma unroll 1
        for (int pair = 0; pair < PAIRS; pair += BATCH) {
            float targets[2 * BATCH];
#pragma unroll
            for (int i = 0; i < 2 * BATCH; ++i) targets[i] = unit(2 * pair + i);
            if (feedback) {
                __syncwarp();  // the links of the other lanes
                feed_back(targets, pair);
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) step(targets, i, pair);
        }
        __syncwarp();
    }

    // Writes the codes of the best survivor, CODE_STRIDE apart; of equal ones the first counts. is_there: whether this
    // token has not been searched for by other lanes as well.
    __device__ __forceinline__ void trace(unsigned short *codes, bool is_there) const {
        const int lane = threadIdx.x % 32;
        unsigned survivor = 0;
        float best = __shfl_sync(0xffffffffu, total, lane & 28);
#pragma unroll
        for (int s = 1; s < STATES; ++s) {
            const float other = __shfl_sync(0xffffffffu, total, lane & 28 | s);
            if (other < best) best = other, survivor = s;
        }
        if (lane % STATES || !is_there) return;
#pragma unroll 1
        for (int pair = PAIRS - 1; pair >= 0; --pair) {
            const unsigned link = links[pair * TOKENS * STATES + survivor];
            codes[pair * R::CODE_STRIDE] = link & 255;
            survivor = link >> 8;
        }
    }

private:
    // One value of the vector that is rounded.
    __device__ __forceinline__ float unit(int channel) const {
        const float own = x[channel * STRIDE];
        return fminf(fmaxf(feedback ? __fmul_rn(own, size) : __fdiv_rn(own, size), -CLIP), CLIP);
    }

    // Adds the feedback of the errors of all pairs before `pair` to the targets of BATCH pairs from there on.
    __device__ __forceinline__ void feed_back(float (&targets)[2 * BATCH], int pair) const {
        unsigned state = threadIdx.x % STATES;
#pragma unroll 1
        for (int earlier = pair - 1; earlier >= 0; --earlier) {
            const unsigned link = links[earlier * TOKENS * STATES + state];
            state = link >> 8;
            const float2 point = flipped(points[link & 255], state);
            const float errors[2] = {unit(2 * earlier) - point.x, unit(2 * earlier + 1) - point.y};
#pragma unroll
            for (int w = 0; w < 2; ++w)
#pragma unroll
                for (int i = 0; i < 2 * BATCH; i += 4) {
                    float factors[4];
                    load_floats(factors, feedback + (2 * earlier + w) * D + 2 * pair + i);
#pragma unroll
                    for (int k = 0; k < 4; ++k) targets[i + k] += factors[k] * errors[w];
                }
        }
    }

    static __device__ __forceinline__ int cell_of(float value) {
        return static_cast<int>(fminf(fmaxf(__fadd_rn(__fmul_rn(value, PER_UNIT), CELLS / 2), 0.0f), CELLS - 1.0f));
    }

    // Extends survivors by pair first + i.
    __device__ __forceinline__ void step(float (&targets)[2 * BATCH], int i, int first) {
        const unsigned all = 0xffffffffu, state = threadIdx.x % STATES;
        const float2 aim = flipped(make_float2(targets[2 * i], targets[2 * i + 1]), state);
        const unsigned entered = __ldg(cells + cell_of(aim.x) * CELLS + cell_of(aim.y));
        const float weight = feedback ? weights[first + i] : 1.0f;
        // Floats >= 0 compare like their bits. The lowest ones are replaced by the state, so that the least of four
        // numbers is the least cost together with the state. All bits count: sums are NumPy's, and none is fused.
        unsigned tagged[STATES];
#pragma unroll
        for (int s = 0; s < STATES; ++s) {
            const float2 point = points[entered >> 8 * s & 255];
            const float dx = __fsub_rn(point.x, aim.x), dy = __fsub_rn(point.y, aim.y);
            const float squared = __fadd_rn(__fmul_rn(dx, dx), __fmul_rn(dy, dy));
            tagged[s] = __float_as_uint(__fadd_rn(__fmul_rn(squared, weight), total)) & ~3u | state;
        }
        // Each lane keeps the costs of entering two states, then of one, and gives away the others.
        const bool odd = state & 1, upper = state & 2;
        const unsigned low = min(odd ? tagged[1] : tagged[0], __shfl_xor_sync(all, odd ? tagged[0] : tagged[1], 1));
        const unsigned high = min(odd ? tagged[3] : tagged[2], __shfl_xor_sync(all, odd ? tagged[2] : tagged[3], 1));
        const unsigned best = min(upper ? high : low, __shfl_xor_sync(all, upper ? low : high, 2));
        const unsigned origin = best & 3, source = threadIdx.x % 32 & 28 | origin;
        const unsigned code = __shfl_sync(all, entered, source) >> 8 * state & 255;
        total = __uint_as_float(best);
        links[(first + i) * TOKENS * STATES + state] = static_cast<unsigned short>(origin << 8 | code);
        if (!feedback) return;
        const float2 point = flipped(points[code], origin);
        const int channel = 2 * (first + i);
        const float errors[2] = {unit(channel) - point.x, unit(channel + 1) - point.y};
#pragma unroll
        for (int later = i + 1; later < BATCH; ++later) {
#pragma unroll
            for (int k = 0; k < 2; ++k) targets[2 * later + k] = __shfl_sync(all, targets[2 * later + k], source);
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                float factors[2];
                load_cell(factors, feedback + (channel + w) * D + 2 * (first + later));
#pragma unroll
                for (int k = 0; k < 2; ++k) targets[2 * later + k] += factors[k] * errors[w];
            }
        }
    }
};

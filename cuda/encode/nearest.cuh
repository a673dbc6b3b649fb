// Finds the point of a codec that is nearest to a value, or a pair of values, of unit variance. Part of
// encode_blocks.cu.

template <bool IS_BYTE>
struct CodeOf { using Type = unsigned short; };
template <>
struct CodeOf<true> { using Type = unsigned char; };

// points (POINTS, WIDTH): in shared memory. candidates: from engine/backends/cuda/kv/store.py, unread for WIDTH 1.
template <class Codec>
struct Nearest {
    static constexpr int CELLS = 64, PER_UNIT = 8;                // cells along a side of the square [−4, 4)²
    static constexpr int MOST = Codec::POINTS <= 256 ? 4 : 12;    // candidates of a cell, ascending
    static constexpr unsigned short ALL = 0xffff;                 // in place of the first one: there are more

    const float *points;
    const unsigned short *candidates;

    __device__ __forceinline__ unsigned operator()(const float (&u)[Codec::WIDTH]) const {
        if constexpr (Codec::WIDTH == 1 && Codec::POINTS == 256) {  // evenly spaced: linear
            return unsigned(fminf(fmaxf(u[0] * 32.0f + 128.5f, 0.0f), 255.0f));
        } else if constexpr (Codec::WIDTH == 1) {
            unsigned code = 0;  // a value in the middle between two levels takes the lower one
#pragma unroll
            for (int i = 1; i < Codec::POINTS; ++i) code += u[0] > __fmul_rn(__fadd_rn(points[i], points[i - 1]), 0.5f);
            return code;
        } else {
            const float x = u[0] * PER_UNIT + CELLS / 2, y = u[1] * PER_UNIT + CELLS / 2;
            const bool inside = x >= 0.0f && x < CELLS && y >= 0.0f && y < CELLS;
            const int cell = inside ? int(x) * CELLS + int(y) : 0;
            const uint2 *row = reinterpret_cast<const uint2 *>(candidates + cell * MOST);
            uint2 four = __ldg(row);
            float best = 3e38f;
            unsigned code = 0;
            if (inside && (four.x & 0xffff) != ALL) {
#pragma unroll
                for (int i = 0; i < MOST / 4; ++i) {
                    if (i > 0) four = __ldg(row + i);
                    compare(u, four.x & 0xffff, best, code), compare(u, four.x >> 16, best, code);
                    compare(u, four.y & 0xffff, best, code), compare(u, four.y >> 16, best, code);
                }
            } else {  // seldom
#pragma unroll 1
                for (unsigned i = 0; i < Codec::POINTS; ++i) compare(u, i, best, code);
            }
            return code;
        }
    }

private:
    // Compares |p|²/2 − u·p with the best so far; of equally near points the first one stays.
    __device__ __forceinline__ void compare(const float (&u)[Codec::WIDTH], unsigned other, float &best,
                                            unsigned &code) const {
        const float2 p = reinterpret_cast<const float2 *>(points)[other];
        const float half = __fmul_rn(__fadd_rn(__fmul_rn(p.x, p.x), __fmul_rn(p.y, p.y)), 0.5f);
        const float score = __fsub_rn(__fsub_rn(half, __fmul_rn(u[0], p.x)), __fmul_rn(u[1], p.y));
        if (score < best) best = score, code = other;
    }
};

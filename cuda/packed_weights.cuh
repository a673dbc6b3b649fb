// Weight formats of codes and scales, in tiles: what kernels read of a matrix, and how the bytes of a file become it.
//
//   w = scale · sub_scale · (code − ZERO) + offset · sub_offset
//
// A tile is 16 rows, a run of blocks of VALUES inputs. A block has, of each row in turn:
//   scale        half, or bfloat16 for scales that are powers of two (POWERS); with OFFSETS followed by
//   offset       half
// then, with SUBS, for each group of GROUP inputs of each row in turn:
//   sub_scale    signed byte with 128 added; with OFFSETS followed by
//   sub_offset   byte
// and then the codes of 32 inputs at a time, in planes of 8, 4, 2 or 1 bits, low bits first. In a plane, a warp's lane
// 4 · r + t has the inputs 8t … 8t + 7 of row r and then of row r + 8, as the A operands of products take them. The
// even ones of 8 codes lie in the low half of the bits and the odd ones in the high half, so that a shift and a mask
// give a pair of neighbours, each in its 16 bits; in codes of 8 bits, two pairs have a word.
//
// F are a format's constants, which Python writes: VALUES, BITS, GROUP and ZERO; SUBS, OFFSETS, POWERS and TABLED, each
// 0 or 1; with TABLED, TABLE_0 … TABLE_3 are the 16 numbers of codes, as bytes with 128 added, and ZERO is 128.
//
// A tile is aligned to 16 bytes, and in % VALUES == 0.
template <class F>
struct PackedWeights {
    using Product = __half;
    static constexpr bool PACKED = true;
    static constexpr int VALUES = F::VALUES, BITS = F::BITS, GROUP = F::GROUP;
    static constexpr int LOW = BITS == 8 ? 8 : BITS >= 4 ? 4 : 2, HIGH = BITS - LOW;  // bits of the planes
    static constexpr int PART_GROUPS = 32 / GROUP;
    static constexpr bool OFFSETS = F::OFFSETS;

    // Bytes of scales and offsets, of a group's parts of them, and of both, in a block of `groups` groups.
    static constexpr int NUMBERS = F::OFFSETS ? 64 : 32, SUB_NUMBERS = F::SUBS ? NUMBERS / 2 : 0;
    static constexpr int codes(int groups) { return NUMBERS + SUB_NUMBERS * groups; }
    static constexpr int BLOCK = codes(VALUES / GROUP) + 2 * BITS * VALUES;

    // Where the codes of inputs k … k + 31 of a block are in it.
    static constexpr int plane(int k) { return codes(VALUES / GROUP) + k / 32 * 64 * BITS; }

    // Copies for one part, 32 inputs of a tile: a block of PART_GROUPS groups, PIECES times 16 bytes.
    static constexpr int PIECES = codes(PART_GROUPS) / 16 + 4 * BITS;

    static __device__ __forceinline__ const unsigned char *block_at(const unsigned char *matrix, int tile, int in,
                                                                    int k) {
        return matrix + (tile * (long long)(in / VALUES) + k / VALUES) * BLOCK;
    }
    // Where piece i of the part that begins with input k is in its block.
    static __device__ __forceinline__ int piece(int k, int i) {
        const int part = k % VALUES / 32, at = 16 * i;
        if (at < NUMBERS) return at;
        if (at < codes(PART_GROUPS)) return at + part * PART_GROUPS * SUB_NUMBERS;
        return codes(VALUES / GROUP) + part * 64 * BITS + at - codes(PART_GROUPS);
    }

    // The factors of 8 neighbouring weights of a row as they are stored: scale and sub_scale in the low half.
    struct Factors {
        unsigned numbers, sub_numbers;
    };
    static __device__ __forceinline__ Factors factors(const unsigned char *block, int row, int group) {
        const unsigned char *const sub = block + NUMBERS + SUB_NUMBERS * group;
        Factors f = {};
        if (F::OFFSETS) {
            f.numbers = reinterpret_cast<const unsigned *>(block)[row];
            if (F::SUBS) f.sub_numbers = reinterpret_cast<const unsigned short *>(sub)[row];
        } else {
            f.numbers = reinterpret_cast<const unsigned short *>(block)[row];
            if (F::SUBS) f.sub_numbers = sub[row];
        }
        return f;
    }
    // The exact scale · sub_scale, and offset · sub_offset.
    static __device__ __forceinline__ float2 products(const Factors &f) {
        float scale = F::POWERS ? __uint_as_float(f.numbers << 16)
                                : __half2float(__ushort_as_half((unsigned short)(f.numbers & 0xffff)));
        float offset = __half2float(__ushort_as_half((unsigned short)(f.numbers >> 16)));
        if (F::SUBS) {
            const float2 subs = __half22float2(sub_products(f));
            scale = __fmul_rn(scale, subs.x), offset = __fmul_rn(offset, subs.y);
        }
        return make_float2(scale, offset);
    }
    // sub_scale and sub_offset.
    static __device__ __forceinline__ __half2 sub_products(const Factors &f) {
        const unsigned pair = __byte_perm(f.sub_numbers, 0x64u, 0x4140);  // as halves, 1024 + byte
        return __hsub2(*reinterpret_cast<const __half2 *>(&pair), __floats2half2_rn(1024.0f + 128.0f, 1024.0f));
    }
    // The same in half precision, rounded once.
    static __device__ __forceinline__ __half2 rounded_products(const Factors &f) {
        if (F::POWERS) return __floats2half2_rn(within<__half>(__uint_as_float(f.numbers << 16)), 0.0f);
        __half2 numbers = *reinterpret_cast<const __half2 *>(&f.numbers);
        return F::SUBS ? __hmul2(numbers, sub_products(f)) : numbers;
    }

    // 8 neighbouring codes, numbers of the table in their place, in pairs: as halves, base(pair) + code. Codes with
    // a small base lie `code_shift` bits higher; a mask finds them there with few shifts before it.
    struct Codes {
        unsigned pairs[4];
    };
    static constexpr int code_shift(int p) { return F::TABLED || LOW == 8 ? 0 : LOW == 4 ? p % 2 * 4 : p * 2; }
    static constexpr float base(int p) { return 1024 >> code_shift(p); }
    static constexpr float zero(int p) { return base(p) + F::ZERO; }  // the pair of weights 0 without an offset
    static constexpr unsigned bits_of_base(int p) { return 0x64006400u - code_shift(p) * 0x04000400u; }

    // plane: the codes of 32 inputs. lane: 4 · (row % 8) + (k % 32) / 8; half: row / 8. zero: 0. Where the compiler
    // does not know that, it keeps the constants below in registers instead of moving them there for every use.
    static __device__ __forceinline__ Codes unpack(const unsigned char *plane, int lane, int half,
                                                   unsigned zero = 0) {
        const unsigned char *const low = plane + (2 * lane + half) * LOW;
        Codes c;
        if (F::TABLED) {
            const unsigned w = *reinterpret_cast<const unsigned *>(low);
            const unsigned even = table_bytes(w), odd = table_bytes(w >> 16);
#pragma unroll
            for (int p = 0; p < 4; ++p)
                c.pairs[p] = (__byte_perm(even, odd, p | (4 + p) << 8) & 0x00ff00ffu) | 0x64006400u;
            return c;
        }
        if (LOW == 8) {
            const uint2 w = *reinterpret_cast<const uint2 *>(low);
#pragma unroll
            for (int p = 0; p < 4; ++p) c.pairs[p] = __byte_perm(p < 2 ? w.x : w.y, 0x64u, 0x4240 + p % 2 * 0x0101);
            return c;
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) c.pairs[p] = bits_of_base(p) + zero;
        add_plane<LOW, 0>(c, low);
        if (HIGH) add_plane<HIGH, LOW>(c, plane + 64 * LOW + (2 * lane + half) * HIGH);
        return c;
    }
    // Adds bits SHIFT … SHIFT + B − 1 of the codes.
    template <int B, int SHIFT>
    static __device__ __forceinline__ void add_plane(Codes &c, const unsigned char *at) {
        unsigned w = 0;
        if (B == 4) w = *reinterpret_cast<const unsigned *>(at);
        if (B == 2) w = __byte_perm(*reinterpret_cast<const unsigned short *>(at), 0, 0x4140);
        if (B == 1) w = (*at & 15u) | (*at & 240u) << 12;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const int to = SHIFT + code_shift(p), from = B * p;
            c.pairs[p] |= (from < to ? w << (to - from) : w >> (from - to)) & (((1u << B) - 1) << to) * 0x00010001u;
        }
    }
    // The numbers of the four codes in the low 16 bits, as bytes.
    static __device__ __forceinline__ unsigned table_bytes(unsigned w) {
        const unsigned low = __byte_perm(F::TABLE_0, F::TABLE_1, w & 0x7777u);
        const unsigned high = __byte_perm(F::TABLE_2, F::TABLE_3, w & 0x7777u);
        return __byte_perm(low, high, 0x3210u | (w & 0x8888u) >> 1);
    }

    // 8 weights in half precision: the products of factors are rounded to it, and then each weight once. Numbers beyond
    // ±65504 are infinite.
    static __device__ __forceinline__ uint4 halves(const Codes &c, const Factors &f) {
        const __half2 numbers = rounded_products(f), scale = __low2half2(numbers), offset = __high2half2(numbers);
        uint4 weights;
        unsigned *const to[4] = {&weights.x, &weights.y, &weights.z, &weights.w};
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            const __half2 pair = *reinterpret_cast<const __half2 *>(&c.pairs[p]);
            const __half2 code = __hsub2(pair, __float2half2_rn(zero(p)));  // exact
            const __half2 w = F::OFFSETS ? __hfma2(code, scale, offset) : __hmul2(code, scale);
            *to[p] = *reinterpret_cast<const unsigned *>(&w);
        }
        return weights;
    }

    struct Eight {
        Codes codes;
        Factors factors;
    };
    static __device__ __forceinline__ Eight load8(const unsigned char *matrix, int row, int in, int k) {
        const unsigned char *const block = block_at(matrix, row / 16, in, k);
        return {unpack(block + plane(k % VALUES), row % 8 * 4 + k % 32 / 8, row % 16 / 8),
                factors(block, row % 16, k % VALUES / GROUP)};
    }
    // Exactly the numbers of the file: factors are multiplied in the order of the formula, and nothing is fused.
    static __device__ __forceinline__ void floats(float (&out)[8], const Eight &eight) {
        const float2 factors = products(eight.factors);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int code = (eight.codes.pairs[j / 2] >> 16 * (j % 2) & 0x3ff) >> code_shift(j / 2);
            out[j] = __fmul_rn(float(code - F::ZERO), factors.x);
            if (F::OFFSETS) out[j] = __fadd_rn(out[j], factors.y);
        }
    }
};

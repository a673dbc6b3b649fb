// Types and arithmetic of CUDA C++: vectors, half, bfloat16, conversions, intrinsics. Results are rounded as on the
// device where CUDA defines it (…_rn, half arithmetic); approximate intrinsics (__expf, rsqrtf) are accurate here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>  // memcpy and memset are known to CUDA as well
#include <type_traits>
#include <utility>

#include "runtime.h"

#define EMULATOR_INLINE static inline __attribute__((always_inline, unused))

#define EMULATOR_VECTORS(type, name)                                                                              \
    struct alignas(2 * sizeof(type)) name##2 {                                                                    \
        type x, y;                                                                                                \
    };                                                                                                            \
    struct name##3 {                                                                                              \
        type x, y, z;                                                                                             \
    };                                                                                                            \
    struct alignas(4 * sizeof(type) < 16 ? 4 * sizeof(type) : 16) name##4 {                                       \
        type x, y, z, w;                                                                                          \
    };                                                                                                            \
    EMULATOR_INLINE name##2 make_##name##2(type x, type y) { return {x, y}; }                                     \
    EMULATOR_INLINE name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                          \
    EMULATOR_INLINE name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
#define uint3 emulator_uint3_of_vectors  // runtime.h has uint3 already
EMULATOR_VECTORS(unsigned, uint)
#undef uint3
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(signed char, char)
EMULATOR_VECTORS(unsigned char, uchar)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(unsigned short, ushort)

// Reinterprets the bits of a value as another type of the same size.
template <class To, class From>
EMULATOR_INLINE To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, value);
}
EMULATOR_INLINE int __float_as_int(float x) { return emulator_bits<int>(x); }
EMULATOR_INLINE unsigned __float_as_uint(float x) { return emulator_bits<unsigned>(x); }
EMULATOR_INLINE float __int_as_float(int x) { return emulator_bits<float>(x); }
EMULATOR_INLINE float __uint_as_float(unsigned x) { return emulator_bits<float>(x); }

template <class A, class B>
EMULATOR_INLINE std::common_type_t<A, B> min(A a, B b) {
    return a < b ? a : b;
}
template <class A, class B>
EMULATOR_INLINE std::common_type_t<A, B> max(A a, B b) {
    return a < b ? b : a;
}

#define EMULATOR_FLOAT1(name, result) EMULATOR_INLINE float name(float a) { return result; }
#define EMULATOR_FLOAT2(name, result) EMULATOR_INLINE float name(float a, float b) { return result; }
// glibc declares functions of these names for its own use.
#define __expf emulator_expf
#define __exp10f emulator_exp10f
#define __logf emulator_logf
#define __log2f emulator_log2f
#define __sinf emulator_sinf
#define __cosf emulator_cosf
#define __powf emulator_powf
EMULATOR_FLOAT1(__expf, std::exp(a))
EMULATOR_FLOAT1(__exp10f, std::pow(10.0f, a))
EMULATOR_FLOAT1(__logf, std::log(a))
EMULATOR_FLOAT1(__log2f, std::log2(a))
EMULATOR_FLOAT1(__sinf, std::sin(a))
EMULATOR_FLOAT1(__cosf, std::cos(a))
EMULATOR_FLOAT1(rsqrtf, float(1 / std::sqrt(double(a))))
EMULATOR_FLOAT1(__frsqrt_rn, float(1 / std::sqrt(double(a))))
EMULATOR_FLOAT1(__fsqrt_rn, std::sqrt(a))
EMULATOR_FLOAT1(__frcp_rn, 1 / a)
EMULATOR_FLOAT1(__saturatef, a > 0 ? (a < 1 ? a : 1) : 0)
EMULATOR_FLOAT2(__powf, std::pow(a, b))
EMULATOR_FLOAT2(__fdividef, a / b)
EMULATOR_FLOAT2(__fdiv_rn, a / b)
EMULATOR_FLOAT2(__fmul_rn, a * b)
EMULATOR_FLOAT2(__fadd_rn, a + b)
EMULATOR_FLOAT2(__fsub_rn, a - b)
EMULATOR_INLINE double __dmul_rn(double a, double b) { return a * b; }
EMULATOR_INLINE double __dsub_rn(double a, double b) { return a - b; }
EMULATOR_INLINE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// Conversion of floats to integers saturates; NaN becomes 0.
EMULATOR_INLINE int emulator_to_int(double x) {
    return x != x ? 0 : x < -2147483648.0 ? INT32_MIN : x > 2147483647.0 ? INT32_MAX : int(x);
}
EMULATOR_INLINE unsigned emulator_to_uint(double x) {
    return !(x > 0) ? 0 : x > 4294967295.0 ? UINT32_MAX : unsigned(x);
}
EMULATOR_INLINE int __float2int_rn(float x) { return emulator_to_int(std::nearbyint(x)); }
EMULATOR_INLINE int __float2int_rz(float x) { return emulator_to_int(std::trunc(x)); }
EMULATOR_INLINE int __float2int_rd(float x) { return emulator_to_int(std::floor(x)); }
EMULATOR_INLINE int __float2int_ru(float x) { return emulator_to_int(std::ceil(x)); }
EMULATOR_INLINE unsigned __float2uint_rn(float x) { return emulator_to_uint(std::nearbyint(x)); }
EMULATOR_INLINE unsigned __float2uint_rz(float x) { return emulator_to_uint(std::trunc(x)); }
EMULATOR_INLINE float __int2float_rn(int x) { return float(x); }
EMULATOR_INLINE float __uint2float_rn(unsigned x) { return float(x); }

EMULATOR_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATOR_INLINE int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
EMULATOR_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMULATOR_INLINE unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
EMULATOR_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
EMULATOR_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned((uint64_t(high) << 32 | low) << (shift & 31) >> 32);
}
EMULATOR_INLINE unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i);
    return r;
}
// Selects four bytes of the eight of b:a, one for each nibble; the nibble's top bit replicates the byte's sign.
EMULATOR_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = uint64_t(b) << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned pick = selector >> 4 * i & 15, byte = unsigned(both >> 8 * (pick & 7)) & 255;
        r |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return r;
}
EMULATOR_INLINE int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += int(int8_t(a >> 8 * i)) * int(int8_t(b >> 8 * i));
    return c;
}

#include "small_floats.h"

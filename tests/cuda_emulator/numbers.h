// Types and arithmetic of CUDA C++: vectors, half, bfloat16, conversions, intrinsics. Results are rounded as on the
// device where CUDA defines it (…_rn, half arithmetic). Elsewhere they are as wrong as they may be on a GPU: products
// and sums are fused (build.py), except in …_rn; float32 denormals are flushed (fibers.cpp); functions are off by
// the largest error that the CUDA C++ Programming Guide, "Mathematical Functions", and the PTX ISA, "ex2", state.
#pragma once
#include <cstdint>

// Bessel functions and their like: <cmath> has them in C++17, and g++ would compile them with every kernel.
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <cmath>
#include <cstring>  // memcpy and memset are known to CUDA as well
#include <type_traits>
#include <utility>

#include "runtime.h"

#define EMULATOR_INLINE static inline __attribute__((always_inline, unused))

#define EMULATOR_VECTORS(type, name)                                                              \
    struct alignas(2 * sizeof(type)) name##2 {                                                    \
        type x, y;                                                                                \
    };                                                                                            \
    struct alignas(4 * sizeof(type)) name##4 {                                                    \
        type x, y, z, w;                                                                          \
    };                                                                                            \
    EMULATOR_INLINE name##2 make_##name##2(type x, type y) { return {x, y}; }                     \
    EMULATOR_INLINE name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMULATOR_VECTORS(unsigned, uint)
EMULATOR_VECTORS(float, float)

// Reinterprets the bits of a value as another type of the same size.
template <class To, class From>
EMULATOR_INLINE To emulator_bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    return __builtin_bit_cast(To, value);
}
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

// What is computed of it is not fused with what it was computed of.
#if defined(__x86_64__)
#define EMULATOR_FLOAT_REGISTER "x"
#else
#define EMULATOR_FLOAT_REGISTER "w"
#endif
template <class T>
EMULATOR_INLINE T emulator_alone(T x) {
    asm("" : "+" EMULATOR_FLOAT_REGISTER(x));
    return x;
}
#define EMULATOR_FLOAT1(name, result)       \
    EMULATOR_INLINE float name(float x) {   \
        const float a = emulator_alone(x);  \
        return emulator_alone(result);      \
    }
#define EMULATOR_FLOAT2(name, result)                                    \
    EMULATOR_INLINE float name(float x, float y) {                       \
        const float a = emulator_alone(x), b = emulator_alone(y);        \
        return emulator_alone(result);                                   \
    }
#define EMULATOR_DOUBLE2(name, result)                                   \
    EMULATOR_INLINE double name(double x, double y) {                    \
        const double a = emulator_alone(x), b = emulator_alone(y);       \
        return emulator_alone(result);                                   \
    }

namespace emulator {

// The side on which a result is off, which looks random and is always the same.
inline double side(float argument) {
    return __builtin_bit_cast(unsigned, argument) * 2654435761u >> 31 ? 1.0 : -1.0;
}
// exact, off by an absolute error; 0, 1 and what is not finite are exact.
inline float off_by(double exact, double error, float argument) {
    const bool is_exact = exact == 0 || exact == 1 || !std::isfinite(exact);
    return float(is_exact ? exact : exact + side(argument) * error);
}
// exact, off by so many units in the last place of a float32, the rounding included.
inline float off_by_units(double exact, double units, float argument) {
    return off_by(exact, (units - 0.5) * std::ldexp(1.0, std::ilogb(exact) - 23), argument);
}

}  // namespace emulator

// glibc declares functions of some of these names.
#define EMULATOR_OFF(name, of, units)                                           \
    EMULATOR_INLINE float emulator_##name(float a) {                            \
        return emulator::off_by_units(of(double(a)), units, a);                 \
    }
EMULATOR_OFF(expf, std::exp, 1)
EMULATOR_OFF(logf, std::log, 1)
EMULATOR_OFF(log1pf, std::log1p, 1)
EMULATOR_OFF(tanhf, std::tanh, 2)
EMULATOR_OFF(fast_expf, std::exp, 2 + std::floor(std::fabs(1.173 * a)))
EMULATOR_OFF(rsqrtf, 1 / std::sqrt, 2)
EMULATOR_INLINE float emulator_atan2f(float a, float b) {
    return emulator::off_by_units(std::atan2(double(a), double(b)), 3, a);
}
// The errors of these hold between -pi and pi.
EMULATOR_INLINE float emulator_fast_sinf(float a) { return emulator::off_by(std::sin(double(a)), 0x1p-21, a); }
EMULATOR_INLINE float emulator_fast_cosf(float a) { return emulator::off_by(std::cos(double(a)), 0x1p-21, a); }
EMULATOR_INLINE float __fdividef(float a, float b) { return emulator::off_by_units(double(a) / b, 2, a); }
#define expf emulator_expf
#define logf emulator_logf
#define log1pf emulator_log1pf
#define tanhf emulator_tanhf
#define atan2f emulator_atan2f
#define rsqrtf emulator_rsqrtf
#define __expf emulator_fast_expf
#define __sinf emulator_fast_sinf
#define __cosf emulator_fast_cosf
EMULATOR_FLOAT1(__fsqrt_rn, std::sqrt(a))
EMULATOR_FLOAT1(__frcp_rn, 1 / a)
EMULATOR_FLOAT2(__fdiv_rn, a / b)
EMULATOR_FLOAT2(__fmul_rn, a * b)
EMULATOR_FLOAT2(__fadd_rn, a + b)
EMULATOR_FLOAT2(__fsub_rn, a - b)
EMULATOR_DOUBLE2(__dmul_rn, a * b)
EMULATOR_DOUBLE2(__dsub_rn, a - b)
EMULATOR_INLINE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

// Conversion of floats to integers saturates; NaN becomes 0.
EMULATOR_INLINE int emulator_to_int(double x) {
    return x != x ? 0 : x < -2147483648.0 ? INT32_MIN : x > 2147483647.0 ? INT32_MAX : int(x);
}
EMULATOR_INLINE int __float2int_rn(float x) { return emulator_to_int(std::nearbyint(x)); }

EMULATOR_INLINE int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
EMULATOR_INLINE int __ffs(int x) { return __builtin_ffs(x); }
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

#include "small_floats.h"

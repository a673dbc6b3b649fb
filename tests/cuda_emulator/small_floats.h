// half and bfloat16: one template for both formats. Every operation rounds once, to nearest even.
#pragma once
#include <cmath>
#include <cstdint>

namespace emulator {

// FRACTION stored bits of the significand; BIAS of the exponent.
template <int FRACTION, int BIAS>
struct SmallFloat {
    uint16_t bits;
};

template <int FRACTION, int BIAS>
inline SmallFloat<FRACTION, BIAS> rounded(double x) {
    constexpr unsigned infinity = (2u * BIAS + 1) << FRACTION;
    const unsigned sign = std::signbit(x) ? 0x8000 : 0;
    x = std::fabs(x);
    if (x != x) return {0x7fff};
    if (std::isinf(x)) return {uint16_t(sign | infinity)};
    const int exponent = x == 0 || std::ilogb(x) < 1 - BIAS ? 1 - BIAS : std::ilogb(x);
    // A normal number's units hold the implicit one, which adds the missing 1 to the exponent field; so does a carry.
    const double units = std::nearbyint(std::ldexp(x, FRACTION - exponent));
    const double code = (double(exponent + BIAS - 1) * (1 << FRACTION)) + units;
    return {uint16_t(sign | unsigned(code < infinity ? code : infinity))};
}

template <int FRACTION, int BIAS>
inline float value(SmallFloat<FRACTION, BIAS> x) {
    // As bits of a float the exponent is too small by the difference of the biases, which one product corrects. A
    // denormal number's bits would be a denormal float, which is flushed.
    constexpr unsigned infinity = (2u * BIAS + 1) << FRACTION, normal = 1u << FRACTION;
    const unsigned magnitude = x.bits & 0x7fffu, sign = unsigned(x.bits & 0x8000u) << 16;
    const unsigned wide = magnitude << (23 - FRACTION);
    // A bfloat16 has the exponents of a float.
    constexpr unsigned exponent = BIAS == 127 ? 0 : 0x7f800000u;
    if (magnitude >= infinity || BIAS == 127) return __builtin_bit_cast(float, sign | wide | exponent);
    const double scaled = magnitude < normal ? double(magnitude) * std::ldexp(1.0, 1 - BIAS - FRACTION)
                                             : double(__builtin_bit_cast(float, wide)) * std::ldexp(1.0, 127 - BIAS);
    return sign ? float(-scaled) : float(scaled);
}

template <class Small>
struct alignas(4) SmallPair {
    Small x, y;
};

}  // namespace emulator

using __half = emulator::SmallFloat<10, 15>;
using __nv_bfloat16 = emulator::SmallFloat<7, 127>;
using __half2 = emulator::SmallPair<__half>;
using __nv_bfloat162 = emulator::SmallPair<__nv_bfloat16>;
using half = __half;
using half2 = __half2;

#define EMULATOR_SMALL(S, S2, FRACTION, BIAS, from_float, from_floats, to_float, to_floats)                           \
    EMULATOR_INLINE S from_float(float x) { return emulator::rounded<FRACTION, BIAS>(x); }                            \
    EMULATOR_INLINE float to_float(S x) { return emulator::value(x); }                                                \
    EMULATOR_INLINE S2 from_floats(float x, float y) { return {from_float(x), from_float(y)}; }                       \
    EMULATOR_INLINE float2 to_floats(S2 v) { return {to_float(v.x), to_float(v.y)}; }                                 \
    EMULATOR_INLINE float __low2float(S2 v) { return to_float(v.x); }                                                 \
    EMULATOR_INLINE float __high2float(S2 v) { return to_float(v.y); }                                                \
    EMULATOR_INLINE S __hadd(S a, S b) { return from_float(to_float(a) + to_float(b)); }                              \
    EMULATOR_INLINE S __hsub(S a, S b) { return from_float(to_float(a) - to_float(b)); }                              \
    EMULATOR_INLINE S __hmul(S a, S b) { return from_float(to_float(a) * to_float(b)); }                              \
    EMULATOR_INLINE S __hneg(S a) { return {uint16_t(a.bits ^ 0x8000)}; }                                             \
    EMULATOR_INLINE S __hfma(S a, S b, S c) {                                                                         \
        return emulator::rounded<FRACTION, BIAS>(double(to_float(a)) * to_float(b) + to_float(c));                    \
    }                                                                                                                 \
    EMULATOR_INLINE S2 __hneg2(S2 a) { return {__hneg(a.x), __hneg(a.y)}; }                                           \
    EMULATOR_INLINE S2 __hadd2(S2 a, S2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }                           \
    EMULATOR_INLINE S2 __hsub2(S2 a, S2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }                           \
    EMULATOR_INLINE S2 __hmul2(S2 a, S2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }                           \
    EMULATOR_INLINE S __hmax_nan(S a, S b) {                                                                          \
        const float x = to_float(a), y = to_float(b);                                                                 \
        return from_float(x != x ? x : y != y ? y : std::fmax(x, y));                                                 \
    }                                                                                                                 \
    EMULATOR_INLINE S2 __hmax2_nan(S2 a, S2 b) { return {__hmax_nan(a.x, b.x), __hmax_nan(a.y, b.y)}; }               \
    EMULATOR_INLINE S __hmin_nan(S a, S b) {                                                                          \
        const float x = to_float(a), y = to_float(b);                                                                 \
        return from_float(x != x ? x : y != y ? y : std::fmin(x, y));                                                 \
    }                                                                                                                 \
    EMULATOR_INLINE S2 __hmin2_nan(S2 a, S2 b) { return {__hmin_nan(a.x, b.x), __hmin_nan(a.y, b.y)}; }               \
    EMULATOR_INLINE S2 __hfma2(S2 a, S2 b, S2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

EMULATOR_SMALL(__half, __half2, 10, 15, __float2half_rn, __floats2half2_rn, __half2float, __half22float2)
EMULATOR_SMALL(__nv_bfloat16, __nv_bfloat162, 7, 127, __float2bfloat16_rn, __floats2bfloat162_rn, __bfloat162float,
               __bfloat1622float2)

EMULATOR_INLINE __half2 __float2half2_rn(float x) { return __floats2half2_rn(x, x); }
EMULATOR_INLINE __half __low2half(__half2 v) { return v.x; }
EMULATOR_INLINE __half __high2half(__half2 v) { return v.y; }
EMULATOR_INLINE __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
EMULATOR_INLINE __half2 __high2half2(__half2 v) { return {v.y, v.y}; }
EMULATOR_INLINE __half __ushort_as_half(unsigned short x) { return {x}; }

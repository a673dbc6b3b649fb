"""exp, log, cos and sin of float64, by additions, multiplications and tables alone.

Those of libraries differ by a last bit from one CPU to another. These do not, and answers can be repeated to the bit.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np

_CHUNK = 4096  # numbers at a time, so that they stay in a cache
_BITS = 11  # of an exponent's fraction, which a table has
_LEAST = -708.0  # below which exp is 0


_LN2, _HALF_PI = (
    Decimal("0.693147180559945309417232121458176568"),
    Decimal("1.57079632679489661923132169163975144209858"),
)


def _in_parts(value: Decimal, bits: int) -> tuple[float, float]:
    """Return a number as a float of so many bits after the point, and the rest."""
    high = float(round(value * (1 << bits))) / (1 << bits)
    return high, float(value - Decimal(high))


_STEP_HIGH, _STEP_LOW = _in_parts(_LN2 / (1 << _BITS), 40)
_LN2_HIGH, _LN2_LOW = _in_parts(_LN2, 40)
_HALF_PI_HIGH, _HALF_PI_LOW = _in_parts(_HALF_PI, 30)


def _powers_of_two() -> np.ndarray:
    """Return 2^(i / 2^11) for i from 0 to 2047, by Taylor's series."""
    x, series = np.arange(1 << _BITS) * float(_LN2 / (1 << _BITS)), np.ones(1 << _BITS)
    for divisor in range(20, 0, -1):
        series = 1 + series * x / divisor
    return series


_POWERS = _powers_of_two()


def exp(x: np.ndarray) -> np.ndarray:
    """Return e to x (any shape, x ≤ 709) in float64, to three units in the last place; 0 below -708."""
    x = np.asarray(x, np.float64)
    flat, result = x.reshape(-1), np.empty(x.size)
    for first in range(0, x.size, _CHUNK):
        chunk = flat[first : first + _CHUNK]
        value = np.fmax(chunk, _LEAST)
        steps = np.rint(value * float((1 << _BITS) / _LN2))
        rest = value - steps * _STEP_HIGH - steps * _STEP_LOW  # |rest| < 1.7e-4
        series = ((rest / 6 + 0.5) * rest + 1) * rest + 1
        whole = steps.astype(np.int64)
        series *= _POWERS[whole & ((1 << _BITS) - 1)]
        series *= (((whole >> _BITS) + 1023) << 52).view(np.float64)
        series[chunk < _LEAST] = 0
        result[first : first + _CHUNK] = series
    return result.reshape(x.shape)


def log(x: np.ndarray | float) -> np.ndarray:
    """Return the natural logarithm of x ≥ 0 (any shape) in float64, to two units in the last place; -inf of 0."""
    x = np.asarray(x, np.float64)
    mantissa, exponent = np.frexp(np.where(x > 0, x, 1.0))
    is_small = mantissa < 0.7071
    mantissa, exponent = np.where(is_small, 2 * mantissa, mantissa), exponent - is_small
    z = (mantissa - 1) / (mantissa + 1)
    square, series = z * z, np.zeros(x.shape)
    for odd in range(23, 0, -2):  # 2 artanh(z), |z| < 0.172
        series = series * square + 1 / odd
    return np.where(x > 0, exponent * _LN2_HIGH + (exponent * _LN2_LOW + 2 * z * series), -np.inf)


def turns(angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of angles (any shape, |angle| < 2^20) in float64, to an error of 2e-16."""
    quarters = np.rint(angles / float(_HALF_PI))
    rest = angles - quarters * _HALF_PI_HIGH - quarters * _HALF_PI_LOW
    square, cos, sin = rest * rest, np.zeros(rest.shape), np.zeros(rest.shape)
    for even in range(18, -2, -2):  # Taylor's series, from its last term
        cos = 1 - cos * square / ((even + 1) * (even + 2))
        sin = 1 - sin * square / ((even + 2) * (even + 3))
    sin = sin * rest
    quarter = quarters.astype(np.int64) & 3
    return np.choose(quarter, (cos, -sin, -cos, sin)), np.choose(quarter, (sin, cos, -sin, -cos))


def power(base: float, exponents: np.ndarray) -> np.ndarray:
    """Return base to the exponents (any shape), float64, correctly rounded."""
    with localcontext() as context:
        context.prec = 40
        flat = [float(Decimal(base) ** Decimal(exponent)) for exponent in exponents.reshape(-1).tolist()]
    return np.array(flat).reshape(exponents.shape)

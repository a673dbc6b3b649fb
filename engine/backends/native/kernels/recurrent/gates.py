"""Functions of float32 that gates and decays are made with."""

from __future__ import annotations

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import Value

_LOG_TERMS = 9  # of atanh(z) / z for z up to 1/3


def silu(e: Emitter, x: Value) -> Value:
    return x / (e.exp(-x) + 1.0)


def softplus(e: Emitter, x: Value) -> Value:
    """log(1 + e^x) of a float32: max(x, 0) + 2 atanh(y / (2 + y)) with y = e^−|x|."""
    y = e.exp(-e.absolute(x))
    z = y / (y + 2.0)
    square, total = z * z, e.like(1.0 / (2 * _LOG_TERMS - 1), x)
    for term in range(_LOG_TERMS - 2, -1, -1):
        total = e.fma(total, square, e.like(1.0 / (2 * term + 1), x))
    return e.fmax(x, 0.0) + z * total * 2.0

"""Norms of the tokens of a tile: float16, or one byte, the logarithm of `engine.codecs.parts.norms`."""

from __future__ import annotations

import math

import numpy as np

from polarlm.engine.codecs.parts.norms import ByteNorm
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.float_ops import float_to_half, gather
from polarlm.engine.jit.lang.values import F32, I8, I16, I32, Value, vector

# Code 128 ± i stands for ±(i / 32) octaves; above i = 88, (i - 88)² / 256 octaves are added to that.
_ZERO, _STEP, _KNEE, _CURVE = 128, 1 / 32, 88, 1 / 256


def emit_norms(e: Emitter, at: Value, count: int, dtype: np.dtype) -> list[Value]:
    """`count` norms at `at`, stored as uint8 or float16 → float32, 16 tokens per vector."""
    if dtype == np.float16:
        return [e.half_to_float(e.load(at, vector(I16, 16), 2 * first)) for first in range(0, count, 16)]
    return [_from_byte(e, e.load(at, vector(I8, 16), first).zext(I32)) for first in range(0, count, 16)]


def emit_pack_norms(e: Emitter, norms: Value, count: int, dtype: np.dtype, at: Value) -> None:
    """The inverse: `count` norms at `norms`, float32 ≥ 0 within the format's range → uint8 or float16 at `at`."""
    if dtype != np.float16:
        thresholds = e.constant_bytes(np.append(ByteNorm().thresholds, np.inf).astype("<f4").tobytes())
    for first in range(0, count, 16):
        norm = e.load(norms, vector(F32, 16), 4 * first)
        if dtype == np.float16:
            e.store(float_to_half(e, norm), at, 2 * first)
            continue
        code = e.zero(vector(I32, 16))  # binary search for the number of thresholds ≤ norm
        for step in (128, 64, 32, 16, 8, 4, 2, 1):
            least = gather(e, thresholds, code + (step - 1), F32)
            code = e.select(least <= norm, code + step, code)
        e.store(code.trunc(I8), at, first)


def _from_byte(e: Emitter, code: Value) -> Value:
    """code (16,) int32 → norm (16,) float32. Computed, since a gather of 16 numbers takes longer on most CPUs."""
    steps = (code - _ZERO).to_float()
    size = e.absolute(steps)
    beyond = e.fmax(size - float(_KNEE), 0.0)
    octaves = e.fma(beyond * beyond, e.like(_CURVE, size), size * _STEP)
    norm = e.exp(e.select(steps < 0.0, -octaves, octaves) * math.log(2))
    return e.select(code > 0, norm, e.zero(norm.type))

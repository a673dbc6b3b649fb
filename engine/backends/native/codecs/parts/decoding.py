"""Decoding of a tile's codes, in token order; and norms of tokens: float16, or one byte, the logarithm of
`engine.codecs.parts.norms`."""

from __future__ import annotations

import math

import numpy as np

from polarlm.engine.backends.native.codecs.parts.packing import Packing
from polarlm.engine.codecs.parts.norms import ByteNorm
from polarlm.engine.jit.lang import F32, I8, I16, I32, I64, Emitter, Value, Values, gather, vector

# A norm's code 128 ± i stands for ±(i / 32) octaves; above i = 88, (i - 88)² / 256 octaves are added to that.
_ZERO, _STEP, _KNEE, _CURVE = 128, 1 / 32, 88, 1 / 256


def emit_codes(e: Emitter, packing: Packing, block: Value, vectors: int, out: Value) -> None:
    """The codes of the first `vectors` vectors of a tile → out (vectors, 64) uint8.

    Ten-bit codes have their low bytes there; the high bits follow, in another (vectors, 64).
    """
    run = packing.run

    def write(address: Value, target: Value, count: int) -> None:
        for number, code in enumerate(packing.emit(e, address, count)):
            for plane, part in enumerate(code):
                e.store(part, target, 64 * (number + plane * vectors))

    with e.loop(0, vectors // run) as number:
        write(block + number * packing.nbytes(run), out + number * (64 * run), run)
    if rest := vectors % run:
        write(block + packing.nbytes(vectors - rest), out + 64 * (vectors - rest), rest)


def emit_points(
    e: Emitter,
    block: Value,
    packing: Packing,
    places: np.ndarray,
    points: np.ndarray,
    norms: Values,
    out: Value,
    scratch: Value,
) -> None:
    """norm · point of each code, in token order → out (N, D) float32.

    places (N, C): index of each code in the tile. points (2^bits, width): what codes stand for. norms (N,), 16 tokens
    per vector. scratch: 4·N·D bytes.
    """
    (tokens, codes), width = places.shape, points.shape[1]
    planes, code_tile = tokens * codes, math.gcd(codes, 4)
    emit_codes(e, packing, block, planes // 64, scratch)
    norms_at = scratch + 2 * planes
    for number, part in enumerate(norms):
        e.store(part, norms_at, 64 * number)
    table, all_places = (e.constant_bytes(x.tobytes()) for x in (points.astype(np.float32), places.astype(np.uint16)))
    with e.loop(0, tokens) as token:
        norm = e.load(norms_at + token * 4, F32)
        with e.loop(token * codes, token * codes + codes, code_tile) as first:
            for i in range(code_tile):
                address = scratch + e.load(all_places + first * 2, I16, 2 * i).zext(I64)
                code = e.load(address, I8).zext(I64)
                if packing.bits > 8:
                    code = code | (e.load(address, I8, planes).zext(I64) << 8)
                point = e.load(table + code * (4 * width), vector(F32, width))
                e.store(point * norm, out + first * (4 * width), 4 * width * i)


def emit_norms(e: Emitter, address: Value, count: int, dtype: np.dtype) -> list[Value]:
    """`count` norms at `address`, stored as uint8 or float16 → float32, 16 tokens per vector."""
    if dtype == np.float16:
        return [e.half_to_float(e.load(address, vector(I16, 16), 2 * first)) for first in range(0, count, 16)]
    return [_from_byte(e, e.load(address, vector(I8, 16), first).zext(I32)) for first in range(0, count, 16)]


def emit_pack_norms(e: Emitter, norms: Value, count: int, dtype: np.dtype, address: Value) -> None:
    """The inverse: `count` norms at `norms`, float32 ≥ 0 within the format's range → uint8 or float16 at `address`."""
    if dtype != np.float16:
        thresholds = e.constant_bytes(np.append(ByteNorm().thresholds, np.inf).astype("<f4").tobytes())
    for first in range(0, count, 16):
        norm = e.load(norms, vector(F32, 16), 4 * first)
        if dtype == np.float16:
            e.store(e.float_to_half(norm), address, 2 * first)
            continue
        code = e.zero(vector(I32, 16))  # binary search for the number of thresholds ≤ norm
        for step in (128, 64, 32, 16, 8, 4, 2, 1):
            least = gather(e, thresholds, code + (step - 1), F32)
            code = e.select(least <= norm, code + step, code)
        e.store(code.trunc(I8), address, first)


def _from_byte(e: Emitter, code: Value) -> Value:
    """code (16,) int32 → norm (16,) float32. Computed, since a gather of 16 numbers takes longer on most CPUs."""
    steps = (code - _ZERO).to_float()
    size = e.absolute(steps)
    excess = e.fmax(size - float(_KNEE), 0.0)
    octaves = e.fma(excess * excess, e.const_like(_CURVE, size), size * _STEP)
    norm = e.exp(e.select(steps < 0.0, -octaves, octaves) * math.log(2))
    return e.select(code > 0, norm, e.zero(norm.type))

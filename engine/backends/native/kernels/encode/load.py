"""Loads the vectors of a block: centred, with tokens in lanes; and measures their norms."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native.kernels.encode.unit import LANES, Unit
from polarlm.engine.codecs.linear import REACH
from polarlm.engine.codecs.parts.norms import ByteNorm
from polarlm.engine.codecs.schema.arrays import HALF_MAX
from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Value, Variable, gather, vector

ANY = float(np.finfo(np.float32).max)  # a limit that clips no finite value

_F8, _F16, _I16 = vector(F32, 8), vector(F32, LANES), vector(I32, LANES)


def load(unit: Unit, limit: float) -> Value:
    """The block's x, centred and clipped to ±limit → `unit.x` (D, N). Returns a byte: 1 if it is not finite."""
    e, stride, floats = unit.e, unit.dim * 4, _as_floats(unit)
    if unit.encoding.mean_bits:
        _centre(unit, floats)
    bad = e.variable(e.zero(_I16))
    with e.loop(0, unit.dim, 8) as channel, unit.vectors() as offset:
        source = floats + channel * 4 + (offset >> 2) * stride
        halves = []
        for _ in range(LANES):
            halves.append(e.load(source, _F8))
            source = source + stride
        rows = [e.join(pair) for pair in zip(halves[:8], halves[8:], strict=True)]
        if unit.encoding.mean_bits:
            mean = e.load(unit.mean + channel * 4, _F8)
            rows = [row - e.join([mean, mean]) for row in rows]
        clipped = [_clip(e, row, limit, bad) for row in rows]
        target = unit.x + channel * unit.row + offset
        for number, column in enumerate(e.transpose(clipped)):
            e.store(column, target, number * unit.row)
    return _any_byte(e, bad)


def load_halves(unit: Unit, out: Value) -> Value:
    """The block's x → (N, D rounded up to 16) float16 at `out`. Returns a byte: 1 if it is not finite."""
    e, floats = unit.e, _as_floats(unit)
    bad = e.variable(e.zero(vector(I32, 8)))
    with e.loop(0, unit.tokens) as token, e.loop(0, unit.dim, 8) as channel:
        value = e.load(floats + (token * unit.dim + channel) * 4, _F8)
        half = e.float_to_half(_clip(e, value, float(HALF_MAX), bad))
        e.store(half, out + (token * ((unit.dim + 15) & -16) + channel) * 2)
    return _any_byte(e, bad)


def _as_floats(unit: Unit) -> Value:
    """The address of x (N, D) float32. If x is float16, it is converted into the memory of `errors`."""
    e = unit.e
    with e.when(unit.is_half > 0), e.loop(0, unit.dim * unit.tokens, LANES) as i:
        e.store(e.half_to_float(e.load(unit.block.x + i * 2, vector(I16, LANES))), unit.errors + i * 4)
    return e.select(unit.is_half > 0, unit.errors, unit.block.x)


def _clip(e: Emitter, value: Value, limit: float, bad: Variable) -> Value:
    """value clipped to ±limit, 0 where it is not finite; there lanes of `bad` become 1."""
    integers = vector(I32, value.lanes)
    is_bad = (value.bits(integers) & 0x7FFFFFFF) >= 0x7F800000
    bad.set(e.select(is_bad, e.constant(integers, 1), bad.get()))
    return e.select(is_bad, e.zero(value.type), e.fmin(e.fmax(value, -limit), limit))


def _any_byte(e: Emitter, lanes: Variable) -> Value:
    return e.select(e.any(lanes.get() > 0), e.constant(I8, 1), e.constant(I8, 0))


def measure(unit: Unit) -> None:
    """The RMS of the vectors in `x` → `norms`; its inverse, or 0 → `inverses`."""
    e = unit.e
    with unit.vectors() as offset:
        total = e.variable(e.zero(_F16))
        with e.loop(0, unit.dim) as channel:
            value = e.load(unit.x + channel * unit.row + offset, _F16)
            total.set(total.get() + value * value)
        norm = e.sqrt(total.get() / e.splat(unit.dim.trunc(I32).to_float(), LANES))
        e.store(norm, unit.norms + offset)
        inverse = e.constant(_F16, 1.0) / norm
        e.store(e.select(norm > 0.0, inverse, e.zero(_F16)), unit.inverses + offset)


def cover(unit: Unit) -> None:
    """The norms of `linear`, which cover the largest values of the vectors in `x` (`ByteNorm.cover`) → `norms`."""
    e, stored = unit.e, ByteNorm().unpack(np.arange(256))
    table = e.constant_bytes(stored.astype("<f4").tobytes())
    with unit.vectors() as offset:
        top = e.variable(e.zero(_F16))
        with e.loop(0, unit.dim) as channel:
            top.set(e.fmax(top.get(), e.absolute(e.load(unit.x + channel * unit.row + offset, _F16))))
        least, code = top.get() * float(REACH), e.zero(_I16)  # binary search for the number of norms below `least`
        for step in (128, 64, 32, 16, 8, 4, 2, 1):
            code = e.select(gather(e, table, code + (step - 1), F32) < least, code + step, code)
        e.store(gather(e, table, code, F32), unit.norms + offset)


def _centre(unit: Unit, source: Value) -> None:
    """Store the block mean of the vectors at `source`, and write the decoded mean → `unit.mean` (D,).

    The arithmetic is the same as in `conditioning.centre`.
    """
    e, stride = unit.e, unit.dim * 4
    top = e.variable(e.zero(_F8))
    with e.loop(0, unit.dim, 8) as channel:
        total = e.variable(e.load(source + channel * 4, _F8))
        with e.loop(1, unit.tokens) as token:
            total.set(total.get() + e.load(source + token * stride + channel * 4, _F8))
        mean = e.fmin(e.fmax(total.get() / float(unit.tokens), -HALF_MAX), HALF_MAX)
        e.store(mean, unit.mean + channel * 4)
        top.set(e.fmax(top.get(), e.absolute(mean)))
    if unit.encoding.mean_bits == 8:
        half = e.float_to_half(e.fmax_lanes(top.get()) / 127.0)
        e.store(half, unit.block.mean_scale)
        scale = e.half_to_float(half)
        step = e.splat(e.select(scale > 0.0, scale, e.constant(F32, 1.0)), 8)
    with e.loop(0, unit.dim, 8) as channel:
        mean = e.load(unit.mean + channel * 4, _F8)
        if unit.encoding.mean_bits == 8:
            code = e.imin(e.imax(e.round(mean / step), -127), 127)
            e.store(code.trunc(I8), unit.block.mean + channel)
            decoded_mean = code.to_float() * scale
        else:
            half = e.float_to_half(mean)
            e.store(half, unit.block.mean + channel * 2)
            decoded_mean = e.half_to_float(half)
        e.store(decoded_mean, unit.mean + channel * 4)

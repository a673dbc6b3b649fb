"""Encoding of `q8_0`, `q4_0` and `f16`, which have no error metric. Results equal NumPy's."""

from __future__ import annotations

from polarlm.engine.backends.native.kernels.encode.load import load, load_halves
from polarlm.engine.backends.native.kernels.encode.rounding import write_codes
from polarlm.engine.backends.native.kernels.encode.unit import LANES, EncodeArguments, Encoding, PackedTiles, Unit
from polarlm.engine.codecs.schema.arrays import HALF_MAX, SATURATION
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.float_ops import float_to_half
from polarlm.engine.jit.lang.values import F32, I32, Value, vector

_F16, _I16 = vector(F32, LANES), vector(I32, LANES)
_GROUP = 32


def encode_groups(encoding: Encoding, tiles: PackedTiles) -> Kernel[EncodeArguments]:
    """The kernel that encodes blocks as `q8_0` (8 bits) or `q4_0` (4 bits); arguments as of `encode`."""
    choose = _round_to_bytes if encoding.bits == 8 else _round_to_nibbles

    def emit(e: Emitter, args: EncodeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as number:
            unit = Unit(e, encoding, args, number, scratch)
            e.store(load(unit, float(SATURATION)), args.damaged + number)
            scales = unit.take(args.dim // _GROUP * unit.row)
            with e.loop(0, args.dim // _GROUP) as group, unit.vectors() as offset:
                first = group * (_GROUP * unit.row) + offset
                scale = choose(unit, unit.x + first, unit.codes + first)
                e.store(scale, scales + group * unit.row + offset)
            codes = unit.codes
            if tiles.by_token:
                write_codes(unit, unit.errors)
                codes = unit.errors
            tiles.emit_pack(e, codes, scales, unit.block.tiles)

    return Kernel(f"encode_mean{encoding.mean_bits}_{tiles.name}", emit, EncodeArguments)


def _inverse(e: Emitter, scale: Value) -> Value:
    """1 / scale, or 0 where that overflows."""
    inverse = e.constant(_F16, 1.0) / scale
    return e.select(e.absolute(inverse) < float("inf"), inverse, e.zero(_F16))


def _round_to_bytes(unit: Unit, x: Value, codes: Value) -> Value:
    """32 rows at x → codes + 128 at `codes`, int32 rows; returns the scales (16,)."""
    e, top = unit.e, unit.e.variable(unit.e.zero(_F16))
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        top.set(e.fmax(top.get(), e.absolute(e.load(x + row, _F16))))
    scale = top.get() / 127.0
    inverse = _inverse(e, scale)
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        scaled = e.load(x + row, _F16) * inverse
        size = e.absolute(scaled)
        whole = size.to_int()
        is_half = size - whole.to_float() >= 0.5
        whole = e.select(is_half, whole + 1, whole)
        e.store(e.select(scaled < 0.0, -whole, whole) + 128, codes + row)
    return scale


def _round_to_nibbles(unit: Unit, x: Value, codes: Value) -> Value:
    """32 rows at x → codes at `codes`, int32 rows; returns the scales (16,)."""
    e = unit.e
    top, farthest = e.variable(e.zero(_F16)), e.variable(e.load(x, _F16))
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        value = e.load(x + row, _F16)
        size = e.absolute(value)
        is_farther = size > top.get()
        top.set(e.select(is_farther, size, top.get()))
        farthest.set(e.select(is_farther, value, farthest.get()))
    scale = farthest.get() / -8.0
    inverse = _inverse(e, scale)
    with e.loop(0, _GROUP * unit.row, unit.row) as row:
        code = e.fmin(e.load(x + row, _F16) * inverse + 8.5, 15.0)
        e.store(code.to_int(), codes + row)
    return scale


def encode_halves(encoding: Encoding, is_keys: bool, name: str) -> Kernel[EncodeArguments]:
    """The kernel that rounds blocks to `f16` tiles, whose name is `name`; arguments as of `encode`."""

    def emit(e: Emitter, args: EncodeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as number:
            unit = Unit(e, encoding, args, number, scratch)
            tile = unit.block.tiles
            if is_keys:
                e.store(load(unit, float(HALF_MAX)), args.damaged + number)
                with e.loop(0, args.dim * unit.row, 64) as offset:
                    e.store(float_to_half(e, e.load(unit.x + offset, _F16)), tile + (offset >> 1))
            else:
                e.store(load_halves(unit, tile), args.damaged + number)

    return Kernel(f"encode_mean{encoding.mean_bits}_{name}", emit, EncodeArguments)

"""Encoding of `polarquant`. Codes equal NumPy's: it makes the same comparisons of the same float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from polarlm.engine.backends.native.kernels.encode.load import ANY, load
from polarlm.engine.backends.native.kernels.encode.unit import LANES, EncodeArguments, Encoding, Unit
from polarlm.engine.codecs.polarquant import TAN_SQUARED
from polarlm.engine.codecs.schema.arrays import HALF_MAX
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.float_ops import float_to_half
from polarlm.engine.jit.lang.values import F32, I32, Value, vector


class PolarTiles(Protocol):
    """Tiles of polar codes that this kernel packs; see `engine.backends.native.codecs.parts.polar`."""

    name: str
    head_dim: int
    levels: int

    def emit_pack(
        self,
        e: Emitter,
        directions: Sequence[Value],
        rows: Sequence[Value],
        radii: Sequence[Value],
        tile: Value,
        unit: Value,
        offset: Value,
    ) -> None:
        """Codes of 16 tokens and of both halves of a unit, or only its first → their bytes in a tile."""


_F16, _I16 = vector(F32, LANES), vector(I32, LANES)


def encode_polar(encoding: Encoding, tiles: PolarTiles) -> Kernel[EncodeArguments]:
    """The kernel that encodes blocks; arguments as of `encode`."""

    def emit(e: Emitter, args: EncodeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as number:
            unit = Unit(e, encoding, args, number, scratch)
            e.store(load(unit, ANY), args.damaged + number)

            def write(channels: Value, halves: int) -> None:
                """Encode the 8 · halves channels of unit `channels`."""
                with unit.vectors() as offset:
                    x = [
                        e.load(unit.x + channels * (16 * unit.row) + offset, _F16, unit.row * channel)
                        for channel in range(8 * halves)
                    ]
                    tiles.emit_pack(e, *_quantize(e, x, tiles.levels), unit.block.tiles, channels, offset)

            with e.loop(0, tiles.head_dim // 16) as channels:
                write(channels, 2)
            if tiles.head_dim % 16:
                write(e.i64(tiles.head_dim // 16), 1)

    return Kernel(f"encode_mean{encoding.mean_bits}_{tiles.name}", emit, EncodeArguments)


def _quantize(e: Emitter, x: Sequence[Value], levels: int) -> tuple[list[Value], list[Value], list[Value]]:
    """16 or 8 channels of 16 tokens → codes of pairs on level 1, rows of halves, int32; radii, float16 as int16."""
    squares = [channel * channel for channel in x]
    codes: dict[int, list[Value]] = {}
    for level in range(1, levels + 1):
        found = [_quarter(e, a, b, level) for a, b in zip(squares[::2], squares[1::2], strict=True)]
        codes[level], squares = [code for code, _ in found], [total for _, total in found]
    directions = []
    for code, a, b in zip(codes[1], x[::2], x[1::2], strict=True):
        flipped = e.select(a < 0.0, code ^ 7, code)
        directions.append(e.select(b < 0.0, flipped ^ 15, flipped))
    rows = []
    for half, level3 in enumerate(codes[3]):
        first, second = codes[2][2 * half : 2 * half + 2]
        row = level3 << 4 | second << 2 | first
        if levels == 4:
            row = row | (codes[4][0] ^ 3 * half) << 6
        rows.append(row)
    return directions, rows, [float_to_half(e, e.fmin(e.sqrt(total), float(HALF_MAX))) for total in squares]


def _quarter(e: Emitter, a: Value, b: Value, level: int) -> tuple[Value, Value]:
    """a², b² (16,) → the codes of their angles within a quadrant, int32, and a² + b²."""
    tan_squared = float(TAN_SQUARED[level])
    code = e.zero(_I16)
    for beyond in (b > a * tan_squared, b > a, b * tan_squared > a):
        code = e.select(beyond, code + 1, code)
    return code, a + b

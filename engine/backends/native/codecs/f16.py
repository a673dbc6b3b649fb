"""Tiles of half precision.

    keys    (D, N) float16: lanes are tokens, so nothing is summed across lanes; N is a multiple of 16
    values  (N, D') float16, D' = D rounded up to 16: lanes are channels

A prepared query is its D float32. Sums are float32, in the order of channels or tokens.
"""

from __future__ import annotations

import math

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.kernels.encode.load import load, load_halves
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments, Unit, plain_encoder
from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.schema.arrays import HALF_MAX
from polarlm.engine.codecs.schema.sections import Section
from polarlm.engine.jit.lang import F32, I16, Emitter, Kernel, Value, Values, vector

_F16, _I16 = vector(F32, 16), vector(I16, 16)


def sum_tile(e: Emitter, heads: int, vectors: int) -> int:
    """A divisor of `vectors`: as many vectors of 16 lanes as have their sums, for all heads, in half the registers."""
    most = e.level.registers // 2 // (heads * (16 // e.level.lanes))
    return max(count for count in range(1, vectors + 1) if vectors % count == 0 and count <= max(1, most))


def _multiply(
    e: Emitter,
    block: Value,
    next_tile: Value,
    shape: tuple[int, int],
    unroll: int,
    factors: Values,
    targets: Values,
    *,
    adds: bool,
) -> None:
    """The sums of the rows of a matrix of float16, each times its factor, of each set of factors → the targets, or
    `adds` to them. unroll: rows at a time."""
    rows, columns = shape
    vectors = columns // 16
    vector_tile = sum_tile(e, len(factors), vectors)
    for first in range(0, vectors, vector_tile):
        places = [64 * (first + number) for number in range(vector_tile)]
        totals = [
            [e.variable(e.load(target, _F16, place) if adds else e.zero(_F16)) for place in places]
            for target in targets
        ]
        with e.loop(0, rows, unroll) as row:
            offset = row * (2 * columns)
            if not first:
                e.prefetch(next_tile + offset, 2 * columns * unroll)
            address = block + offset
            row_factors = [factor + row * 4 for factor in factors]
            for step in range(unroll):
                wide = [e.broadcast(factor, F32, 16, 4 * step) for factor in row_factors]
                for number in range(vector_tile):
                    value = e.half_to_float(e.load(address, _I16, 2 * columns * step + 32 * (first + number)))
                    for factor, total in zip(wide, totals, strict=True):
                        total[number].set(e.fma(value, factor, total[number].get()))
        for total, target in zip(totals, targets, strict=True):
            for place, sum_ in zip(places, total, strict=True):
                e.store(sum_.get(), target, place)


class HalfKeys(KeyTiles):
    def __init__(self, codec: Codec, block_size: int, head_dim: int) -> None:
        values = codec.schema(block_size, head_dim)["values"]
        section = Section.numbers("values", values, ((block_size,), (head_dim,)), (1, 0))
        super().__init__("half_keys", codec, block_size, head_dim, section)
        self.query_bytes = -(-head_dim // 16) * 64

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | str:
        def write(unit: Unit) -> None:
            e, tile = unit.e, unit.block.tiles
            unit.report(load(unit, float(HALF_MAX)))
            with e.loop(0, unit.dim * unit.row, 64) as offset:
                e.store(e.float_to_half(e.load(unit.x + offset, _F16)), tile + (offset >> 1))

        return plain_encoder(self.name, format, side, write)

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        for first in range(0, self._head_dim, 16):
            e.store(e.load(q, _F16, 4 * first), out, 4 * first)

    def emit_scores(self, e: Emitter, block: Value, next_tile: Value, queries: Values, out: Values) -> None:
        unroll = math.gcd(self._head_dim, 4)
        _multiply(e, block, next_tile, (self._head_dim, self._tokens), unroll, queries, out, adds=False)

    def emit_floats(self, e: Emitter, block: Value, out: Value, scratch: Value) -> tuple[int, int]:
        with e.loop(0, self._head_dim * self._tokens, 16) as at:
            e.store(e.half_to_float(e.load(block + at * 2, _I16)), out + at * 4)
        return 4, 4 * self._tokens

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        for channel in range(0, self._head_dim, 16):
            channels = range(channel, min(channel + 16, self._head_dim))
            with e.loop(0, self._tokens, 16) as token:
                address, target = block + token * 2, out + token * (4 * self._head_dim)
                rows = [e.half_to_float(e.load(address, _I16, 2 * self._tokens * i)) for i in channels]
                for number, row in enumerate(e.transpose(rows + rows[-1:] * (16 - len(rows)))):
                    e.store(e.part(row, 0, len(channels)), target, 4 * (self._head_dim * number + channel))


class HalfValues(ValueTiles):
    def __init__(self, codec: Codec, block_size: int, head_dim: int) -> None:
        values = codec.schema(block_size, head_dim)["values"]
        self._row = -(-head_dim // 16) * 16
        section = Section.numbers("values", values, ((block_size,), (self._row,)), (0, 1))
        super().__init__("half_values", codec, block_size, head_dim, section)

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | str:
        return plain_encoder(self.name, format, side, lambda unit: unit.report(load_halves(unit, unit.block.tiles)))

    def emit_values(self, e: Emitter, block: Value, next_tile: Value, weights: Values, sums: Values) -> None:
        _multiply(e, block, next_tile, (self._tokens, self._row), 4, weights, sums, adds=True)

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        with e.loop(0, self._tokens) as token:
            row, target = block + token * (2 * self._row), out + token * (4 * self._head_dim)
            for first, lanes in pieces(self._head_dim):
                e.store(e.half_to_float(e.load(row, vector(I16, lanes), 2 * first)), target, 4 * first)


keys, values = HalfKeys, HalfValues

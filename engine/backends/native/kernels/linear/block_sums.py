"""Sums of products of a block of weights, codes and scales of 16 outputs, with rows of activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, ROW_BYTES
from polarlm.engine.backends.native.kernels.linear.tile_reads import read_pair, read_scale, times_sub
from polarlm.engine.backends.native.tiles import TileLayout
from polarlm.engine.jit.lang.byte_ops import Table, dot2
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I8, I16, I32, Value, Variable, vector

_F16, _I16, _BYTES, _WORDS = vector(F32, 16), vector(I32, 16), vector(I8, 64), vector(I16, 32)

# Prefetch distance in bytes. The hardware does not prefetch where a loop reads several streams of vectors: without
# this, 4-bit codes of many inputs are read at half the memory bandwidth, and 6-bit codes at a third.
AHEAD = 8192


class Block:
    """A block of a tile at an address: its scales and offsets, float32 (16,).

    factor: what scales are multiplied by.
    """

    def __init__(self, e: Emitter, place: TileLayout, at: Value, factor: float = 1) -> None:
        self.at = at
        scale = read_scale(e, at, place.scale, place.is_power, 16)
        self.scale = scale if factor == 1 else scale * float(factor)
        self.offset = None if place.offset is None else read_scale(e, at, place.offset, False, 16)


def add_block(
    e: Emitter,
    codes: Codes,
    blocks: Sequence[Block],
    inputs: Value,
    sums: Sequence[Sequence[Variable]],
    before: Callable[[Value], None] = lambda part: None,
) -> None:
    """Add the products of the rows of a panel and of blocks with the same inputs to `sums`, of each block and row.

    inputs: address of the block's first inputs in the panel. before: emits what precedes each 32 inputs, their number
    in the block given.
    """
    place, row_tile = codes.place, len(sums[0])
    format = place.format
    with e.loop(0, format.values // 32) as part:
        own_inputs = inputs + part * (ROW_BYTES * row_tile)
        sub = part * (16 * (32 // format.group))
        before(part)
        for group in range(32 // format.group):
            for block, totals in zip(blocks, sums, strict=True):
                own_scale = times_sub(e, block.scale, block.at + sub, place.sub_scale, group, signed=True)
                own_offset = None
                if block.offset is not None:
                    own_offset = times_sub(e, block.offset, block.at + sub, place.sub_offset, group)
                dots = _dots(e, codes, block.at + part * place.part_bytes + place.codes, own_inputs, group, row_tile)
                for row, (dot, total) in enumerate(zip(dots, totals, strict=True)):
                    numbers = 2 * GROUP * row_tile + 16 * row
                    x_sum = e.broadcast(own_inputs, F32, 16, numbers + (4 if format.group == 32 else 8 + 4 * group))
                    value = dot.to_float()
                    if codes.zero:
                        value = e.fma(x_sum, e.constant(_F16, -float(codes.zero)), value)
                    value = value * own_scale
                    if own_offset is not None:
                        value = e.fma(x_sum, own_offset, value)
                    total.set(e.fma(value, e.broadcast(own_inputs, F32, 16, numbers), total.get()))


def _dots(e: Emitter, codes: Codes, at: Value, inputs: Value, group: int, row_tile: int) -> list[Value]:
    """For each row, the dot products (16,) int32 of its inputs with the codes of a group of 16 outputs."""
    size = codes.place.format.group // 2
    # Two sums per row hide the latency of a dot product, where registers have room for them.
    chains = 2 if row_tile == 1 or e.level.has_room else 1
    sums = [[e.zero(_I16)] * chains for _ in range(row_tile)]
    # Pairs that share vectors of codes are multiplied in succession, so that few registers hold codes.
    pairs = sorted(range(group * size, (group + 1) * size), key=codes.vector)
    for number, pair in enumerate(pairs):
        code = codes.pair(at, pair)
        for row, dot in enumerate(sums):
            words = e.broadcast(inputs, I32, 16, 2 * GROUP * row + 4 * pair)
            dot[number % chains] = dot2(e, dot[number % chains], code, words)
    return [dot[0] + dot[1] if chains == 2 else dot[0] for dot in sums]


class Codes:
    """The codes of a tile as int16. zero: the zero point, which is subtracted after the products.

    Codes of 8 bits and the values of tables are signed instead: sums of products with 32 codes up to 255 would not be
    exact as float32.
    """

    def __init__(self, e: Emitter, place: TileLayout) -> None:
        self._e, self.place = e, place
        format, self._is_signed = place.format, place.planes == (8,)
        self._table = None if format.table is None else Table(e, e.constant_bytes(format.table.tobytes()), 16)
        self.zero = 0 if self._is_signed or self._table else format.zero

    def vector(self, pair: int) -> int:
        """The index of the vector of the lowest plane that holds a pair."""
        return pair // 2 if self._is_signed else pair % self.place.planes[0]

    def pair(self, at: Value, pair: int) -> Value:
        """The two codes of pair number `pair` of 16 rows, as the int16 halves of int32 lanes (16,).

        at: address of the codes of 32 inputs.
        """
        words = read_pair(self._e, self.place, at, pair, 16)
        if self._table is not None:
            words = (self._table[words.bits(_BYTES)].bits(_WORDS) << 8).ashr(8)
        return words.bits(_I16)

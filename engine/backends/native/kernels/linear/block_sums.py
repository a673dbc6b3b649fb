"""Sums of products of a block of weights, codes and scales of 16 outputs, with rows of activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, number_bytes, row_bytes
from polarlm.engine.backends.native.kernels.linear.tile_reads import read_pair, read_quad, read_scale, times_sub
from polarlm.engine.backends.native.tiles import TileLayout
from polarlm.engine.jit.lang.byte_ops import SplitSums, Table, dot2
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I8, I16, I32, Value, Variable, vector

_F16, _I16, _BYTES, _WORDS = vector(F32, 16), vector(I32, 16), vector(I8, 64), vector(I16, 32)

# Prefetch distance in bytes. The hardware does not prefetch where a loop reads several streams of vectors: without
# this, 4-bit codes of many inputs are read at half the memory bandwidth, and 6-bit codes at a third.
AHEAD = 8192
_FEW_SUMS = 8  # of which a dot product waits for the last one: two begin in a cycle, and each takes four


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
        own_inputs = inputs + part * (row_bytes(e.level) * row_tile)
        numbers = [own_inputs + (2 * GROUP * row_tile + number_bytes(e.level) * row) for row in range(row_tile)]
        at = [block.at + part * place.part_bytes + place.codes for block in blocks]
        sub = part * (16 * (32 // format.group))
        before(part)
        for group in range(32 // format.group):
            place_of_sum = 4 if format.group == 32 else 8 + 4 * group
            less = [e.broadcast(own, I32, 16, place_of_sum) for own in numbers]
            multiply = _dots_of_bytes if e.level.splits_words else _dots
            dots = multiply(e, codes, at, own_inputs, group, less)
            for block, own_dots, totals in zip(blocks, dots, sums, strict=True):
                own_scale = times_sub(e, block.scale, block.at + sub, place.sub_scale, group, signed=True)
                own_offset = None
                if block.offset is not None:
                    own_offset = -times_sub(e, block.offset, block.at + sub, place.sub_offset, group)
                for own, dot, x_less, total in zip(numbers, own_dots, less, totals, strict=True):
                    value = dot.to_float() * own_scale
                    if own_offset is not None:
                        value = e.fma(x_less.to_float(), own_offset, value)
                    total.set(e.fma(value, e.broadcast(own, F32, 16), total.get()))


def _dots(
    e: Emitter, codes: Codes, at: Sequence[Value], inputs: Value, group: int, less: Sequence[Value]
) -> list[list[Value]]:
    """For each tile and row, the dot products (16,) int32 of the row's inputs with the codes of a group of 16 outputs,
    less the zero point.

    at: addresses of each tile's codes of 32 inputs. less: of each row the sum of its inputs, negative, int32 (16,).
    """
    size, rows, zero = codes.place.format.group // 2, range(len(less)), e.zero(_I16)
    # Two sums hide the latency of a dot product, where there are few others and registers have room for them.
    chains = 2 if len(less) == 1 or (e.level.has_room and len(less) * len(at) <= _FEW_SUMS) else 1
    first = [own * codes.zero if codes.zero else zero for own in less]
    sums = [[[own, *[zero] * (chains - 1)] for own in first] for _ in at]
    # Pairs that share vectors of codes are multiplied in succession, so that few registers hold codes.
    pairs = sorted(range(group * size, (group + 1) * size), key=codes.vector)
    for number, pair in enumerate(pairs):
        own_codes, chain = [codes.pair(own, pair) for own in at], number % chains
        for row in rows:
            words = e.broadcast(inputs, I32, 16, 2 * GROUP * row + 4 * pair)
            for dots, code in zip(sums, own_codes, strict=True):
                dots[row][chain] = dot2(e, dots[row][chain], code, words)
    return [[dot[0] + dot[1] if chains == 2 else dot[0] for dot in dots] for dots in sums]


def _dots_of_bytes(
    e: Emitter, codes: Codes, at: Sequence[Value], inputs: Value, group: int, less: Sequence[Value]
) -> list[list[Value]]:
    """The same with inputs that are split into bytes. The sums of several rows stay in registers for 8 outputs."""
    count, outputs = codes.place.format.group // 4, 16 if len(less) == 1 else 8
    start = [e.part(own, 0, outputs) * codes.zero for own in less]
    found: list[list[list[Value]]] = [[[] for _ in less] for _ in at]
    for first in range(0, 16, outputs):
        sums = [[SplitSums(e, own) for own in start] for _ in at]
        for quad in range(group * count, (group + 1) * count, 2):
            own_codes = [[codes.quad(own + 4 * first, quad + i, outputs) for i in (0, 1)] for own in at]
            for row in range(len(less)):
                words = e.load(inputs, vector(I8, 16), 2 * GROUP * row + 8 * quad)
                for dots, both in zip(sums, own_codes, strict=True):
                    dots[row].add(both, words)
        for parts, dots in zip(found, sums, strict=True):
            for own_parts, dot in zip(parts, dots, strict=True):
                own_parts.append(dot.total)
    return [[e.join(parts) for parts in of_rows] for of_rows in found]


class Codes:
    """The codes of a tile as int16. zero: the zero point, whose products are subtracted from those of the codes.

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
        return self.place.place(pair) % self.place.planes[0]

    def pair(self, at: Value, pair: int) -> Value:
        """The two codes of pair number `pair` of 16 rows, as the int16 halves of int32 lanes (16,).

        at: address of the codes of 32 inputs.
        """
        words = read_pair(self._e, self.place, at, pair, 16)
        if self._table is not None:
            words = (self._table[words.bits(_BYTES)].bits(_WORDS) << 8).ashr(8)
        return words.bits(_I16)

    def quad(self, at: Value, quad: int, lanes: int) -> Value:
        """The four codes of quad number `quad` of 8 or 16 rows, as the signed bytes of int32 lanes."""
        codes = read_quad(self._e, self.place, at, quad, lanes)
        return codes if self._table is None else self._table[codes.bits(vector(I8, 4 * lanes))].bits(codes.type)

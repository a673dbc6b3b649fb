"""Sums of products of weights of 16 outputs with rows of activations: of a block of codes and scales, or of numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native.kernels.linear.activations import (
    GROUP,
    Inputs,
    are_paired,
    most_code,
    numbers_at,
    place_of_sum,
    row_bytes,
    splits,
)
from polarlm.engine.backends.native.kernels.linear.tile_reads import (
    read_pair,
    read_plain,
    read_quad,
    read_scale,
    read_subs,
    times_sub,
)
from polarlm.engine.backends.native.tiles import ROWS, TileLayout
from polarlm.engine.jit.lang import F32, I8, I32, Emitter, Level, Value, Values, Variable, vector
from polarlm.engine.jit.lang.level import ByteSum
from polarlm.engine.weight_formats import WeightFormat

# Prefetch distance in bytes. The hardware does not prefetch where a loop reads several streams of vectors: without
# this, 4-bit codes of many inputs are read at half the memory bandwidth, and 6-bit codes at a third. See
# `prefetch_distance`, too.
PREFETCH_BYTES = 8192
_F16 = vector(F32, ROWS)
_FEW_SUMS = 8  # a dot product waits for the previous one of its sum: each takes four cycles, and two begin per cycle


def prefetch_distance(level: Level, row_tile: int) -> int:
    """The prefetch distance of products of `row_tile` rows with codes."""
    return PREFETCH_BYTES if row_tile > level.near_rows else 0


class Outputs(NamedTuple):
    """Some of the outputs of a tile: the first, and how many."""

    first: int
    size: int


ALL = Outputs(0, ROWS)


def output_groups(level: Level, row_tile: int) -> list[Outputs]:
    """The outputs of a tile that products of `row_tile` rows sum in turn, so that the sums stay in registers."""
    count = ROWS if row_tile == 1 else level.code_outputs
    return [Outputs(first, count) for first in range(0, ROWS, count)]


def sum_by_outputs(
    e: Emitter, start: Sequence[Values], add: Callable[[Outputs, list[list[Variable]]], None]
) -> list[list[Value]]:
    """The sums of each tile and row, which begin with `start`: add(some outputs, their sums) adds to them."""
    parts: list[list[list[Value]]] = [[[] for _ in tile_sums] for tile_sums in start]
    for outputs in output_groups(e.level, len(start[0])):
        sums = [[e.variable(e.part(total, *outputs)) for total in tile_sums] for tile_sums in start]
        add(outputs, sums)
        for tile_sums, totals in zip(parts, sums, strict=True):
            for row_parts, total in zip(tile_sums, totals, strict=True):
                row_parts.append(total.get())
    return [[e.join(row_parts) for row_parts in tile_sums] for tile_sums in parts]


class Block:
    """A block of a tile at an address, as some of the outputs read it. codes, subs: addresses of their codes, and of
    what `sub_scale` and `sub_offset` of the layout are offsets from.

    factor: what scales are multiplied by.
    """

    def __init__(
        self, e: Emitter, place: TileLayout, address: Value, factor: float = 1, outputs: Outputs = ALL
    ) -> None:
        first, self.outputs = outputs
        self.codes = address + (place.codes + 4 * first)
        self.subs = read_subs(e, place, address) + first
        self._e, self._place, self._halves, self._factor = e, place, address + 2 * first, factor

    @property
    def scale(self) -> Value:
        """The scales of the outputs, float32: read each time, which is once where LLVM may keep them."""
        scale = read_scale(self._e, self._halves, 0, self._place.is_power, self.outputs)
        return scale if self._factor == 1 else scale * float(self._factor)

    @property
    def offset(self) -> Value | None:
        """The offsets of the same, if the format has them."""
        place = self._place
        return None if place.offset is None else read_scale(self._e, self._halves, place.offset, False, self.outputs)


def add_block(
    e: Emitter,
    codes: IntCodes,
    blocks: Sequence[Block],
    inputs: Value,
    sums: Sequence[Sequence[Variable]],
    before_part: Callable[[Value], None] = lambda part: None,
) -> None:
    """Add the products of the rows of a panel and of blocks with the same inputs to `sums`, of each block and row. All
    blocks are of the same outputs. The inputs are of the kind of `codes`.

    inputs: address of the block's first inputs in the panel. before_part: emits what precedes part `part` of 32 inputs.
    """
    place, row_tile, outputs = codes.place, len(sums[0]), blocks[0].outputs
    format, multiply = place.format, _multiplier(e.level, codes, row_tile)
    with e.loop(0, format.values // 32) as part:
        own_inputs = inputs + part * (row_bytes(e.level, codes.inputs) * row_tile)
        numbers = numbers_at(own_inputs, row_tile, e.level, codes.inputs)
        addresses = [block.codes + part * place.part_bytes for block in blocks]
        sub = part * (16 * (32 // format.group))
        before_part(part)
        for group in range(32 // format.group):
            place_in_numbers = place_of_sum(GROUP // format.group, group)
            dots = multiply(e, codes, addresses, own_inputs, group, _input_sums(e, numbers, place_in_numbers, outputs))
            e.keep_order()
            input_sums = _input_sums(e, numbers, place_in_numbers, outputs)  # where order is kept, read again
            for block, own_dots, totals in zip(blocks, dots, sums, strict=True):
                own_scale = times_sub(e, block.scale, block.subs + sub, place.sub_scale, group, signed=True)
                own_offset = block.offset
                if own_offset is not None:
                    own_offset = -times_sub(e, own_offset, block.subs + sub, place.sub_offset, group)
                for at_numbers, dot, input_sum, total in zip(numbers, own_dots, input_sums, totals, strict=True):
                    value = dot.to_float() * own_scale
                    if own_offset is not None:
                        value = e.fma(input_sum.to_float(), own_offset, value)
                    total.set(e.fma(value, e.broadcast(at_numbers, F32, outputs), total.get()))


def _multiplier(level: Level, codes: IntCodes, row_tile: int) -> Callable[..., list[list[Value]]]:
    """The function that multiplies a group, of those below."""
    if codes.inputs is Inputs.BYTES:
        return _split_dots if are_paired(level, row_tile, codes.inputs) else _dots_of_int8
    return _dots_of_unsigned if codes.are_unsigned else _split_dots if level.splits_words else _dots


def _input_sums(e: Emitter, numbers: Values, place: int, outputs: int) -> list[Value]:
    """Of each row the sum of its inputs, negative, int32 (outputs,). place: its offset among the numbers of a row."""
    return [e.broadcast(at_numbers, I32, outputs, place) for at_numbers in numbers]


def _dots(
    e: Emitter, codes: IntCodes, addresses: Values, inputs: Value, group: int, input_sums: Values
) -> list[list[Value]]:
    """For each tile and row, the dot products (outputs,) int32 of the row's inputs with the codes of a group, less the
    zero point.

    addresses: addresses of each tile's codes of 32 inputs. input_sums: see `_input_sums`.
    """
    size, rows, outputs = codes.place.format.group // 2, range(len(input_sums)), input_sums[0].lanes
    zero = e.zero(input_sums[0].type)
    # Two sums hide the latency of a dot product, where there are few others and registers have room for them.
    has_room = len(input_sums) == 1 or (e.level.has_room and len(input_sums) * len(addresses) <= _FEW_SUMS)
    # Where order is kept, LLVM would still add the products to one of the two as it likes.
    chains = 2 if has_room and not e.level.keeps_order else 1
    first = [input_sum * codes.zero if codes.zero else zero for input_sum in input_sums]
    sums = [[[start, *[zero] * (chains - 1)] for start in first] for _ in addresses]
    # Pairs that share vectors of codes are multiplied in succession, so that few registers hold codes.
    pairs = sorted(range(group * size, (group + 1) * size), key=codes.vector)
    for number, pair in enumerate(pairs):
        if not number or not codes.shares_bytes(pair, pairs[number - 1]):
            e.keep_order()
        own_codes, chain = [codes.pair(address, pair, outputs) for address in addresses], number % chains
        for row in rows:
            words = e.broadcast(inputs, I32, outputs, 2 * GROUP * row + 4 * pair)
            for dots, code in zip(sums, own_codes, strict=True):
                total = e.level.dot2(e, dots[row][chain], code, words)
                dots[row][chain] = total if len(input_sums) == 1 else e.order_sum(total)
    return [[dot[0] + dot[1] if chains == 2 else dot[0] for dot in dots] for dots in sums]


def _split_dots(
    e: Emitter, codes: IntCodes, addresses: Values, inputs: Value, group: int, input_sums: Values
) -> list[list[Value]]:
    """The same with two rows of bytes at a time: the high and low bytes of inputs, or two rows' inputs of 8 bits."""
    count, outputs = codes.place.format.group // 4, input_sums[0].lanes
    are_pairs, zero = codes.inputs is Inputs.BYTES, e.zero(input_sums[0].type)
    starts = [input_sum * codes.zero for input_sum in input_sums]
    both = zip(starts[::2], starts[1::2], strict=True) if are_pairs else ((zero, start) for start in starts)
    sums = [[e.level.split_start(e, *start) for start in both_starts] for both_starts in [[*both]] * len(addresses)]
    # Quads that share vectors of codes are multiplied in succession, as pairs above.
    for quad in sorted(range(group * count, (group + 1) * count, 2), key=codes.vector_of_quad):
        e.keep_order()
        own_codes = [[codes.quad(address, quad + i, outputs) for i in (0, 1)] for address in addresses]
        for row in range(len(sums[0])):
            words = e.load(inputs, vector(I8, 16), 2 * GROUP * row + 8 * quad)
            for dots, codes_of_two in zip(sums, own_codes, strict=True):
                dots[row] = e.level.split_add(e, dots[row], codes_of_two, words)
    ends = [[e.level.split_end(e, one) for one in dots] for dots in sums]
    return [[*chain(*dots)] if are_pairs else [(high << 8) + low for high, low in dots] for dots in ends]


def _dots_of_int8(
    e: Emitter, codes: IntCodes, addresses: Values, inputs: Value, group: int, input_sums: Values
) -> list[list[Value]]:
    """The same with inputs of 8 bits."""
    count, outputs = codes.place.format.group // 4, input_sums[0].lanes
    starts = [input_sum * codes.zero if codes.zero else e.zero(input_sum.type) for input_sum in input_sums]
    sums = [[codes.sum_of_bytes(start) for start in starts] for _ in addresses]
    for quad in sorted(range(group * count, (group + 1) * count), key=codes.vector_of_quad):
        e.keep_order()
        own_codes = [codes.quad(address, quad, outputs) for address in addresses]
        for row in range(len(input_sums)):
            fours = e.broadcast(inputs, I32, outputs, GROUP * row + 4 * quad)
            for tile_sums, code in zip(sums, own_codes, strict=True):
                tile_sums[row].add(code, fours)
    return [[one.end() for one in tile_sums] for tile_sums in sums]


def _dots_of_unsigned(
    e: Emitter, codes: IntCodes, addresses: Values, inputs: Value, group: int, input_sums: Values
) -> list[list[Value]]:
    """The same with unsigned codes: none becomes a word."""
    count, outputs = codes.place.format.group // 4, input_sums[0].lanes
    zero = e.zero(input_sums[0].type)
    sums = [
        [[zero, input_sum * codes.zero if codes.zero else zero] for input_sum in input_sums] for _ in addresses
    ]  # high and low bytes
    for quad in sorted(range(group * count, (group + 1) * count), key=codes.vector_of_quad):
        own_codes = [codes.quad(address, quad, outputs) for address in addresses]
        for row in range(len(input_sums)):
            for half in (0, 1):
                place = 2 * GROUP * row + 16 * (quad // 2) + 8 * half + 4 * (quad % 2)
                fours = e.broadcast(inputs, I32, outputs, place)
                for dots, code in zip(sums, own_codes, strict=True):
                    dots[row][half] = e.level.dot4(e, dots[row][half], code, fours)
    return [[(high << 8) + low for high, low in dots] for dots in sums]


class IntCodes:
    """The codes of a tile as int16, or as bytes. zero: the zero point, whose products are subtracted from the products
    of the codes. are_unsigned: whether they are multiplied as unsigned bytes. inputs: what they are multiplied by.

    Codes of 8 bits and the values of tables are signed: sums of products with 32 codes up to 255 would not be exact as
    float32. As unsigned bytes they have the zero point 128.
    """

    def __init__(self, e: Emitter, place: TileLayout, rows: int = 0, inputs: Inputs = Inputs.CODES) -> None:
        """rows: that are multiplied at once; 0 if codes become words or bytes in memory."""
        self._e, self.place, self.inputs = e, place, inputs
        format, self._is_signed = place.format, place.planes == (8,)
        are_split = rows > 0 and splits(e.level, rows) and not e.level.splits_words
        are_bytes = inputs is Inputs.BYTES and rows > 0 and not e.level.signed_dots
        self.are_unsigned = are_bytes or are_split
        bias = 128 if self.are_unsigned else 0
        table = None if format.table is None else (format.table.view(np.uint8) ^ bias).astype(np.uint8)
        self._look_up = None if table is None else e.level.table(e, e.constant_bytes(table.tobytes()), 16)
        self.zero = bias if self._is_signed or self._look_up else format.zero

    def vector(self, pair: int) -> int:
        """The index of the vector of the lowest plane that holds a pair."""
        return self.place.place(pair) % self.place.planes[0]

    def shares_bytes(self, pair: int, other: int) -> bool:
        """Whether two pairs are bytes of one vector."""
        return self._is_signed and self.vector(pair) == self.vector(other)

    def vector_of_quad(self, quad: int) -> int:
        return quad % self.place.planes[0]

    def pair(self, address: Value, pair: int, lanes: int = ROWS) -> Value:
        """The two codes of pair number `pair` of 8 or 16 rows, as the int16 halves of int32 lanes.

        address: address of the codes of 32 inputs.
        """
        words = read_pair(self._e, self.place, address, pair, lanes)
        if self._look_up is not None:
            words = (self._look_up(words.bits(vector(I8, 4 * lanes))).bits(words.type) << 8).ashr(8)
        return words.bits(vector(I32, lanes))

    def sum_of_bytes(self, start: Value) -> ByteSum:
        """A sum of products of quads with fours of int8."""
        return self._e.level.sum_of_bytes(self._e, start, most_code(self.place.format) * Inputs.BYTES.value)

    def quad(self, address: Value, quad: int, lanes: int) -> Value:
        """The four codes of quad number `quad` of 8 or 16 rows, as the bytes of int32 lanes."""
        codes = read_quad(self._e, self.place, address, quad, lanes)
        bytes_ = codes.bits(vector(I8, 4 * lanes))
        if self._look_up is not None:
            return self._look_up(bytes_).bits(codes.type)
        return (bytes_ ^ -128).bits(codes.type) if self._is_signed and self.are_unsigned else codes


def number_sums(
    e: Emitter, format: WeightFormat, tiles: Values, panel: Value, columns: Value, row_tile: int
) -> list[list[Value]]:
    """The sums of each tile and row, for weights in float32, float16 or bfloat16. panel: of float32."""
    size = format.nbytes
    # Two sums each, of even and of odd inputs, hide the latency of a multiply-add.
    sums = [[[e.variable(e.zero(_F16)) for _ in range(2)] for _ in range(row_tile)] for _ in tiles]

    def add(column: Value, count: int) -> None:
        for i in range(count):
            address = panel + column * (4 * row_tile)
            factors = [e.broadcast(address, F32, ROWS, 4 * (row_tile * i + r)) for r in range(row_tile)]
            for tile, totals in zip(tiles, sums, strict=True):
                raw = read_plain(e, tile + column * (ROWS * size), format, ROWS, ROWS * size * i)
                for factor, total in zip(factors, totals, strict=True):
                    total[i].set(e.fma(raw, factor, total[i].get()))

    even = columns & -2
    with e.loop(0, even, 2) as column:
        add(column, 2)
    with e.loop(even, columns) as column:
        add(column, 1)
    return [[a.get() + b.get() for a, b in totals] for totals in sums]

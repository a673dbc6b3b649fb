"""Sums of products with weights as matrices of bfloat16, where a level multiplies these (`Level.matrices`).

A strip is two tiles of weights and up to 2,048 inputs as right matrices: of each 32 inputs one of either tile. It lies
in memory of the thread that stays in level 2 of the cache, as do the inputs of 256 rows, for which it is made once:
while the strip before it is multiplied, since a CPU multiplies matrices beside its other work. The sums of 32 rows with
a strip stay in registers.

A weight, scale · code in float32, is rounded to the nearest bfloat16, as inputs are (`activations.write_matrices`), but
for ties. Sums are float32. Which products a sum adds in which order depends on the number of inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, MATRIX
from polarlm.engine.backends.native.kernels.linear.block_sums import PREFETCH_BYTES
from polarlm.engine.backends.native.kernels.linear.expanders import expander
from polarlm.engine.backends.native.kernels.linear.tile_reads import (
    is_bfloat,
    read_pair,
    read_plain,
    read_scale,
    read_subs,
    times_sub,
)
from polarlm.engine.backends.native.tiles import ROWS, TileLayout, block_bytes, layout
from polarlm.engine.jit.lang import F32, I16, I32, Emitter, Value, Values, Variable, vector
from polarlm.engine.weight_formats import WeightFormat

MOST_INPUTS = 2048  # of a strip. More are cut into strips of fewer, so that those of 256 rows stay in the cache
_INPUTS = 1536
_ROWS = 256  # for which a strip is made, so that products cost much more than making it
_UNITS = 16  # that share the inputs in the cache
_STRIP = MOST_INPUTS // GROUP * 2 * MATRIX  # bytes
_SUMS, _LEFT, _RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # registers
_QUARTERS = 4  # of a matrix, each made beside a product
_F16, _I16, _WORDS = vector(F32, ROWS), vector(I32, ROWS), vector(I16, 2 * ROWS)
_INTERLEAVED = [half + 16 * odd for half in range(16) for odd in (0, 1)]


def units_at_once(units: int, threads: int) -> int:
    """Units that a thread takes at a time: many share inputs in the cache, and no thread waits long for another."""
    return max(1, min(_UNITS, units // (2 * threads)))


@contextmanager
def unit_runs(e: Emitter, begin: Value, end: Value, matrix_units: Value) -> Iterator[tuple[Value, Value]]:
    """A loop over units from `begin` to `end`, in runs for `matrix_sums`: the first unit of a run, and how many there
    are. matrix_units: units of a matrix; all of a run are of one."""
    matrices = e.level.matrices
    matrices.begin(e)
    first = e.variable(begin)
    with e.when(begin < end), e.repeat_while() as conditions:
        unit = first.get()
        count = e.imin(end - unit, matrix_units - unit % matrix_units)
        yield unit, count
        first.add(count)
        conditions.append(first.get() < end)
    matrices.end(e)


class Panels(NamedTuple):
    """Rows of inputs as `activations.write_matrices` writes them: their address, the bytes of a panel of 16 rows, the
    inputs of a row, and the number of rows."""

    address: Value
    stride: Value
    columns: Value
    rows: Value


class StripPlace(NamedTuple):
    """Sums of 16 rows and a strip: its number, the first row, how many of them exist, whether the sums have no earlier
    inputs than the strip's, and the registers of either tile."""

    strip: Value
    row: Value
    rows: Value
    are_first: Value
    registers: tuple[int, int]


class StripOutputs(Protocol):
    """What sums start with, and what they become."""

    def start(self, place: StripPlace) -> None:
        """Load registers."""

    def finish(self, place: StripPlace) -> None:
        """Store registers."""


def matrix_sums(
    e: Emitter,
    format: WeightFormat,
    tiles: Callable[[Value], list[Value]],
    count: Value,
    panels: Panels,
    memory: Value,
    outputs: StripOutputs,
) -> None:
    """Compute the sums of strips, with a slice of the inputs after another where these are more than a strip's.

    tiles(number of a strip): the addresses of its two tiles. count: of strips. memory: 256 KiB.
    """
    parts = (panels.columns + (GROUP - 1)) // GROUP
    most = e.select(panels.columns <= MOST_INPUTS, e.i64(MOST_INPUTS // GROUP), e.i64(_INPUTS // GROUP))
    slices = (parts + (most - 1)) // most
    total = (panels.rows + (_ROWS - 1)) // _ROWS * slices * count
    make = _StripMaker(e, format, panels.columns)

    def strip(number: Value) -> _Strip:
        first = number // count % slices * most
        return _Strip(tiles(number % count), first, e.imin(parts - first, most), memory + (number & 1) * _STRIP)

    with e.when(total > 0):
        make.rest(strip(e.i64(0)), e.i64(0))
    with e.loop(0, total) as number:
        own, following = strip(number), strip(e.imin(number + 1, total - 1))
        begin = number // (count * slices) * _ROWS
        rows = e.imin(panels.rows - begin, _ROWS)
        inputs = panels.address + begin // ROWS * panels.stride + own.first * MATRIX
        end = e.select(number + 1 < total, following.parts * 2, e.i64(0))
        made = e.variable(e.i64(0))  # matrices of the following strip
        # With fewer rows there are fewer products, so that more is to be made beside each.
        at_once = e.imax(e.i64(_ROWS) // (rows + (2 * ROWS - 1) & -2 * ROWS), 1)
        with e.loop(0, rows, 2 * ROWS) as row:
            address, left = inputs + row // ROWS * panels.stride, rows - row
            are_first = own.first.equals(0)
            halves = [
                StripPlace(number % count, begin + row + first, e.imin(left - first, ROWS), are_first, registers)
                for first, registers in zip((0, ROWS), (_SUMS[:2], _SUMS[2:]), strict=True)
            ]
            outputs.start(halves[0])
            with e.when(left > ROWS):
                outputs.start(halves[1])
                own_rows = [address, address + panels.stride]
                _multiply(e, own, own_rows, (make, following, made, end, at_once))
                outputs.finish(halves[1])
            with e.when(left <= ROWS):
                _multiply(e, own, [address], (make, following, made, end, at_once))
            outputs.finish(halves[0])
        with e.when(end > 0):
            make.rest(following, made.get())


class _Strip(NamedTuple):
    """Two tiles, as matrices of 32 inputs each from number `first` on: `parts` of either tile, in turn at `address`."""

    tiles: Values
    first: Value
    parts: Value
    address: Value


def _multiply(
    e: Emitter, strip: _Strip, rows: Values, making: tuple[_StripMaker, _Strip, Variable, Value, Value]
) -> None:
    """Add the products of 32 rows with a strip, and make matrices of the following strip meanwhile, up to number `end`:
    at_once beside every four parts."""
    make, following, made, end, at_once = making
    groups = e.imin(strip.parts // _QUARTERS, (end - made.get()) // at_once)
    with e.loop(0, groups) as group:
        part = make.part(following, made.get())
        for quarter in range(_QUARTERS):
            _add_products(e, strip, rows, group * _QUARTERS + quarter)
            part(range(quarter * 4, quarter * 4 + 4))
        with e.loop(1, at_once) as more:
            make.part(following, made.get() + more)(range(GROUP // 2))
        made.add(at_once)
    with e.loop(groups * _QUARTERS, strip.parts) as one:
        _add_products(e, strip, rows, one)


def _add_products(e: Emitter, strip: _Strip, rows: Values, part: Value) -> None:
    """Add the products of 16 rows each, at addresses, with a part of a strip."""
    matrices, right = e.level.matrices, strip.address + part * (2 * MATRIX)
    for number, register in enumerate(_RIGHT):
        matrices.load(e, register, right + number * MATRIX)
    for number, address in enumerate(rows):
        matrices.load(e, _LEFT[number], address + part * MATRIX)
        for place, register in enumerate(_RIGHT):
            matrices.add_product(e, _SUMS[2 * number + place], _LEFT[number], register)


class _StripMaker:
    """Makes the matrices of strips: of bfloat16 from the weights of a format."""

    def __init__(self, e: Emitter, format: WeightFormat, columns: Value) -> None:
        self._e, self._columns = e, columns
        self._read = _CodeReads(e, format) if format.unpack is not None else _NumberReads(e, format, columns)

    def rest(self, strip: _Strip, made: Value) -> None:
        """Make all matrices of a strip but for the first ones."""
        with self._e.loop(made, strip.parts * 2) as number:
            self.part(strip, number)(range(GROUP // 2))

    def part(self, strip: _Strip, number: Value) -> Callable[[Sequence[int]], None]:
        """A function that makes pairs of inputs of a matrix of a strip; those of the first tile are numbered first."""
        e = self._e
        is_second = number >= strip.parts
        part = number - e.select(is_second, strip.parts, e.i64(0))
        pairs = self._read(e.select(is_second, strip.tiles[1], strip.tiles[0]), strip.first + part)
        out = strip.address + part * (2 * MATRIX) + e.select(is_second, e.i64(MATRIX), e.i64(0))

        def make(places: Sequence[int]) -> None:
            for pair in places:
                e.store(pairs(pair), out, 4 * ROWS * pair)

        return make


class _NumberReads:
    """Weights that are numbers of 16 bits."""

    def __init__(self, e: Emitter, format: WeightFormat, columns: Value) -> None:
        self._e, self._format, self._columns = e, format, columns

    def __call__(self, tile: Value, part: Value) -> Callable[[int], Value]:
        """A function that reads a pair of 32 inputs of a tile, bfloat16 (32,) as int16. Beyond the last input it reads
        that one, which is multiplied by 0."""
        e, row_bytes = self._e, ROWS * self._format.nbytes
        last, address = self._columns - 1 - part * GROUP, tile + part * (GROUP * row_bytes)
        e.prefetch(address + PREFETCH_BYTES, GROUP * row_bytes, level=2)

        def pair(number: int) -> Value:
            rows = [address + e.imin(e.i64(2 * number + i), last) * row_bytes for i in (0, 1)]
            if is_bfloat(self._format):
                return _interleave(e, e.join([e.load(row, vector(I16, ROWS)) for row in rows]))
            halves = [read_plain(e, row, self._format, ROWS) for row in rows]
            return _interleave(e, e.level.to_bfloat(e, *halves))

        return pair


class _CodeReads:
    """Weights that are scales and codes. What a block has for several parts is unpacked with its first part."""

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        self._e, self._format, self._expand = e, format, expander(e, format)
        self._layout: TileLayout = layout(format) if self._expand is None else self._expand.layout
        self._groups, self._parts = GROUP // format.group, format.values // GROUP
        subs = self._layout.subs
        self._subs = None if subs is None else e.stack(ROWS * subs.count)
        self._find = None
        if self._layout.planes != (8,):
            numbers = np.arange(2**format.bits) - format.zero if format.table is None else format.table
            bits = numbers.astype(np.float32).view(np.int32) >> 16  # exact: no number has more than 8 bits
            self._find = e.level.matrices.word_table(e, bits.tolist() * max(1, 2 * ROWS // len(bits)))

    def __call__(self, tile: Value, part: Value) -> Callable[[int], Value]:
        """A function that reads a pair of 32 inputs of a tile, bfloat16 (32,) as int16."""
        e, place = self._e, self._layout
        block, own_part = part // self._parts, part % self._parts
        address = subs = tile + block * block_bytes(self._format)
        e.prefetch(address + PREFETCH_BYTES, block_bytes(self._format) // self._parts, level=2)
        if self._expand is not None or self._subs is not None:
            with e.when(own_part.equals(0)):
                expanded = address if self._expand is None else self._expand(address)
                if self._subs is not None:
                    read_subs(e, place, address, self._subs)
            address = expanded if self._expand is not None else address
            subs = address if self._subs is None else self._subs
        scale, offset = _quiet(e, read_scale(e, address, 0, place.is_power, ROWS)), None
        if self._expand is not None and self._expand.factor != 1:
            scale = scale * float(self._expand.factor)
        if place.offset is not None:
            offset = _quiet(e, read_scale(e, address, place.offset, False, ROWS))
        own_subs, codes = subs + own_part * (ROWS * self._groups), address + (own_part * place.part_bytes + place.codes)
        scales = [times_sub(e, scale, own_subs, place.sub_scale, group, signed=True) for group in range(self._groups)]
        offsets = [
            None if offset is None else times_sub(e, offset, own_subs, place.sub_offset, group)
            for group in range(self._groups)
        ]

        def pair(number: int) -> Value:
            group = 2 * number // self._format.group
            own_scale, own_offset = scales[group], offsets[group]
            values = [
                code * own_scale if own_offset is None else e.fma(code, own_scale, own_offset)
                for code in self._codes(codes, number)
            ]
            return _round(e, *values)

        return pair

    def _codes(self, address: Value, pair: int) -> list[Value]:
        """What the codes of a pair of inputs stand for, two of float32 (16,)."""
        e = self._e
        if self._find is None:
            quad = e.load(address, _I16, 4 * ROWS * (pair // 2))
            return [(quad << shift).ashr(24).to_float() for shift in ((24, 8), (16, 0))[pair % 2]]
        if self._layout.planes == (4,):  # the table, which has all entries twice, ignores the bits of other codes
            place = self._layout.place(pair)
            index = (e.load(address, _I16, 4 * ROWS * (place % 4)) >> 4 * (place // 4)).bits(_WORDS)
        else:
            index = read_pair(e, self._layout, address, pair, ROWS)
        words = self._find(index).bits(_I16)
        return [(words << 16).bits(_F16), (words & -65536).bits(_F16)]


def _round(e: Emitter, even: Value, odd: Value) -> Value:
    """float32 (16,) of two inputs → bfloat16 (32,), a pair of each output, as int16: the nearest, ties away from zero.
    In four instructions on any pipe: the CPU's own conversion takes twice as long."""
    low, high = (number.bits(_I16) + 0x8000 for number in (even, odd))
    is_odd = e.constant(_WORDS, [0, 1] * ROWS).equals(1)
    return e.select(is_odd, high.bits(_WORDS), (low >> 16).bits(_WORDS))


def _quiet(e: Emitter, scale: Value) -> Value:
    """Scales, with a NaN that stays one when `_round` adds to its bits."""
    return e.select(scale.equals(scale), scale, e.const_like(float("nan"), scale))


def _interleave(e: Emitter, halves: Value) -> Value:
    return e.shuffle(halves, halves, _INTERLEAVED)

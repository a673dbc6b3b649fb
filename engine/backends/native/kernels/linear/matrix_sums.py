"""Sums of products with codes where a level multiplies matrices (`Level.matrix_rows`): 16 rows and 32 inputs with 16
outputs.

Codes become bfloat16 in memory of the thread that stays in the cache, once for 32 panels; they and their scales lie
there as in `expanded_weights`. Both parts of an input are multiplied by the same codes, and the sum of the products is
the same integer as at other levels. float32 has all integers up to 2²⁴. Codes that are too large for that are
multiplied by each part alone, or become smaller by a number whose product with the sum of the inputs is added later.

Inputs of 8 bits are one part, and both they and codes stay bytes: one product, whose sums are int32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, Inputs, panel_bytes, place_of_sum
from polarlm.engine.backends.native.kernels.linear.expanded_weights import INPUTS, ExpandedBytes, ExpandedCodes
from polarlm.engine.backends.native.kernels.linear.tile_reads import read_pair
from polarlm.engine.backends.native.tiles import ROWS, block_bytes
from polarlm.engine.jit.lang import F32, I16, I32, Emitter, Value, Variable, vector
from polarlm.engine.weight_formats import WeightFormat

_TILES = 16  # tiles of weights that are multiplied by inputs while these are in the cache
_PANELS = 32  # whose sums are kept meanwhile: enough that products cost much more than expanding codes
_PRODUCTS = 8  # matrices that are written before they are scaled and added
_ROW, _MATRIX = 4 * ROWS, 4 * ROWS * ROWS  # bytes of float32, or of the bfloat16 of 32 inputs
_EXACT = 1 << 24
_F16, _I16 = vector(F32, ROWS), vector(I32, ROWS)


def units_at_once(units: int, tiles: int, threads: int) -> int:
    """Units that a thread takes at a time: many share inputs in the cache, and no thread has none. tiles: of a unit."""
    return max(1, min(_TILES // tiles, units // threads))


@contextmanager
def unit_runs(
    e: Emitter, format: WeightFormat, kind: Inputs, units: tuple[Value, Value], matrix_units: Value, tiles: int
) -> Iterator[tuple[Value, Value]]:
    """A loop over units from the first to the last, in runs for `matrix_sums`: the first unit of a run, and how many
    there are. matrix_units: units of a matrix; all of a run are of one. tiles: of a unit."""
    begin, end = units
    first = e.variable(begin)
    e.level.begin_tiles(e, format.group * kind.size // 4)
    with e.when(begin < end), e.repeat_while() as conditions:
        unit = first.get()
        count = e.imin(e.imin(end - unit, _TILES // tiles), matrix_units - unit % matrix_units)
        yield unit, count
        first.add(count)
        conditions.append(first.get() < end)
    e.level.end_tiles(e)


def matrix_sums(
    e: Emitter,
    format: WeightFormat,
    kind: Inputs,
    weights: tuple[Value, Value, Value],
    units: tuple[Value, int],
    panels: tuple[Value, Value, Value, Value],
    y: tuple[Value, Value],
    memory: Value,
    finish: Callable[[Value, Value, list[list[Value]]], None],
) -> None:
    """Call finish(number of a unit, number of a row, the sums of each tile of the unit of this row alone) inside a loop
    over units and rows.

    weights: the address of the first tile, the bytes of one, and the distance in tiles between a unit's tiles. units:
    a run's, and the tiles of each. panels: their address, the bytes of one, the blocks of a row, and the number
    of rows. y: the outputs of the first unit, which are prefetched, and the bytes from row to row. memory: 700
    KiB.
    """
    (weight, tile_bytes, distance), (count, tiles), (x, stride, blocks, rows) = weights, units, panels
    words = (_ByteMatrices if kind is Inputs.BYTES else _WordMatrices)(e, format)
    products, tile_words = memory, memory + _PRODUCTS * _MATRIX
    size = INPUTS // GROUP * words.nbytes
    sums, zero = tile_words + _TILES * size, e.zero(_F16)
    with e.loop(0, rows, _PANELS * ROWS) as begin:
        panel_count = (e.imin(rows - begin, _PANELS * ROWS) + (ROWS - 1)) // ROWS
        with e.loop(0, panel_count * _TILES) as number:
            for row in range(ROWS):
                e.store(zero, sums + number * _MATRIX, _ROW * row)
        with e.loop(0, blocks, words.blocks) as block:
            own_blocks = e.imin(blocks - block, words.blocks)
            is_last = block + words.blocks >= blocks
            with e.loop(0, count) as unit:
                for which in range(tiles):
                    address = weight + (unit + distance * which) * tile_bytes + block * block_bytes(format)
                    words.write_blocks(address, e.i64(0), own_blocks, tile_words + (unit * tiles + which) * size)
            with e.loop(0, panel_count) as panel:
                first = begin + panel * ROWS
                inputs = x + first // ROWS * stride + block * (words.parts * words.panel)
                own_sums, out = sums + panel * (_TILES * _MATRIX), y[0] + first * y[1]
                with e.loop(0, count * tiles) as number:
                    with e.when(is_last):
                        for row in range(ROWS):
                            e.prefetch(out + (y[1] * row + number // tiles * _ROW), _ROW, level=2)
                    own_words = tile_words + number * size
                    next_inputs = inputs + stride + number * (words.panel // _TILES)
                    total = own_sums + number * _MATRIX
                    words.add_matrices(own_words, own_blocks * words.parts, inputs, next_inputs, products, total)
                with e.when(is_last), e.loop(0, ROWS) as place, e.loop(0, count) as unit:
                    address = own_sums + unit * (tiles * _MATRIX) + place * _ROW
                    output_row = first + place
                    row_sums = [[e.load(address, _F16, _MATRIX * which)] for which in range(tiles)]
                    finish(unit, output_row, row_sums)


class _MatrixCodes(ExpandedCodes):
    """Multiplies 16 rows of a panel by codes in memory.

    parts_of_input: each is multiplied by the same codes. are_added: whether by one product, with one sum. shift: what
    codes have been made smaller by.
    """

    parts_of_input, are_added, shift = 1, True, 0

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        super().__init__(e, format)
        self.panel = panel_bytes(GROUP, ROWS, e.level, self.inputs)  # bytes of 32 inputs

    def add_matrices(
        self, words: Value, parts: Value, inputs: Value, next_inputs: Value, products: Value, sums: Value
    ) -> None:
        """Add the products of a panel's rows with words to float32 (16, 16) at `sums`. parts: of 32 inputs.
        next_inputs: the next panel's, which are prefetched. products: memory for matrices."""
        e, groups, size, prefetch_distance = self._e, self._groups, GROUP * self.inputs.size, self.panel // _TILES
        each = 1 if self.are_added else self.parts_of_input
        step = groups * each * _MATRIX
        with e.loop(0, parts, _PRODUCTS // (groups * each)) as first:
            count = e.imin(parts - first, _PRODUCTS // (groups * each))
            own_words, own_inputs = words + first * self.nbytes, inputs + first * self.panel
            with e.loop(0, count) as number:
                for group in range(groups):
                    right = own_words + number * self.nbytes + self._scales // groups * group
                    start = own_inputs + number * self.panel + size // groups * group
                    left = [start + size * ROWS * part for part in range(self.parts_of_input)]
                    out = products + number * step + each * _MATRIX * group
                    for place, matrices in enumerate([left] if self.are_added else [[part] for part in left]):
                        e.level.multiply_tiles(e, matrices, size, right, out + _MATRIX * place)
            totals = [e.variable(e.load(sums, _F16, _ROW * row)) for row in range(ROWS)]
            with e.loop(0, count) as number:
                e.prefetch(next_inputs + (first + number) * self.panel, prefetch_distance + 32, level=2)
                for group in range(groups):
                    out = products + number * step + each * _MATRIX * group
                    panel = own_inputs + number * self.panel
                    for row, total in enumerate(totals):
                        at_numbers = panel + (size * ROWS * self.parts_of_input + 16 * row)
                        self._add_row(own_words + number * self.nbytes, group, out + _ROW * row, at_numbers, total)
            for row, total in enumerate(totals):
                e.store(total.get(), sums, _ROW * row)

    def _add_row(self, words: Value, group: int, product: Value, numbers: Value, total: Variable) -> None:
        """Add the products of a row with a group of inputs, scaled, in the order of other levels."""
        e = self._e
        input_sum = e.broadcast(numbers, F32, ROWS, place_of_sum(self._groups, group))
        dot = self._product(product)
        if not self.are_added:
            dot = dot + self._product(product + _MATRIX)
        if self.shift:
            dot = e.fma(input_sum, e.const_like(-float(self.shift), input_sum), dot)
        value = dot * e.load(words, _F16, self._scales + _ROW * group)
        if self._offsets is not None:
            value = e.fma(input_sum, e.load(words, _F16, self._offsets + _ROW * group), value)
        total.set(e.fma(value, e.broadcast(numbers, F32, ROWS), total.get()))

    def _product(self, address: Value) -> Value:
        """A row of a product, float32 (16,)."""
        return self._e.load(address, _F16)


class _ByteMatrices(ExpandedBytes, _MatrixCodes):
    """Writes blocks of a format as bytes, and multiplies them by signed inputs."""

    has_starts = False

    def _product(self, address: Value) -> Value:
        return self._e.load(address, _I16).to_float()


class _WordMatrices(_MatrixCodes):
    """Writes blocks of a format as bfloat16, and multiplies them."""

    parts_of_input = 2

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        super().__init__(e, format)
        numbers = self._numbers()
        most = _EXACT // (format.group * (Inputs.CODES.value + 1))
        shift = max(0, int(numbers.max()) - most)
        self.are_added = int(numbers.min()) - shift >= -most
        self.shift = shift if self.are_added else 0
        self._find = None
        if len(numbers) < 256:
            bits = (numbers - self.shift).astype(np.float32).view(np.int32) >> 16
            self._find = e.level.word_table(e, bits.tolist())

    def _numbers(self) -> np.ndarray:
        """What each code stands for."""
        format = self._layout.format
        if format.table is not None:
            return format.table.astype(np.int64)
        if self._layout.planes == (8,):
            return np.arange(-128, 128)
        return np.arange(2**format.bits) - self._codes.zero

    def _word(self, address: Value, pair: int) -> Value:
        """bfloat16."""
        if self._find is not None:
            return self._find(read_pair(self._e, self._layout, address, pair, ROWS))
        words = super()._word(address, pair).bits(_I16)
        low, high = ((half.ashr(16).to_float().bits(_I16)) for half in (words << 16, words))
        return ((low >> 16) | (high & -65536)).bits(vector(I16, 2 * ROWS))

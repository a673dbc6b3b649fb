"""Sums of products with codes at a level that multiplies matrices (`Level.matrix_rows`): 16 rows of inputs with 32 inputs
of 16 outputs.

Codes become bfloat16 in memory of the thread that stays in the cache, once for 32 panels, and scales float32, in the places
of `code_words`. Both parts of an input are multiplied by the same codes, and the sum of their products is the same integer
as elsewhere. As float32 it is exact where it is at most 2²⁴. Codes that are too large for that have a sum for each part, or
become smaller by a number of which the product with all inputs of a group is added later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


from polarlm.engine.backends.native.kernels.linear.activations import GROUP, MATRIX_ROW, Inputs
from polarlm.engine.backends.native.kernels.linear.block_sums import Block, Codes
from polarlm.engine.backends.native.kernels.linear.code_words import CodeWords
from polarlm.engine.backends.native.kernels.linear.expanding import expander
from polarlm.engine.backends.native.tiles import ROWS, block_bytes, layout
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I32, Value, Variable, vector
from polarlm.engine.weight_formats import WeightFormat

MOST_TILES = 16  # of weights that are multiplied by inputs while these are in the cache
_PANELS = 32  # whose sums are kept meanwhile: enough that products cost much more than expanding codes
_INPUTS = 256  # that are multiplied at a time: those of the largest block
_MATRIX = 4 * ROWS * ROWS  # bytes of one of float32, or of the bfloat16 of 32 inputs
_PRODUCTS = 8  # matrices that are written before they are scaled and added
_F16, _I16 = vector(F32, ROWS), vector(I32, ROWS)

_Start = Callable[[Value, int], Value]


@contextmanager
def tiles_begun(e: Emitter, format: WeightFormat) -> Iterator[None]:
    """A context in which `matrix_sums` of a format are emitted."""
    e.level.begin_tiles(e, format.group // 2)
    yield
    e.level.end_tiles(e)


def matrix_sums(
    e: Emitter,
    format: WeightFormat,
    weights: tuple[Value, int, _Start],
    panels: tuple[Value, Value, Value, Value],
    kept: Value,
) -> Iterator[tuple[Value, Value, list[list[Value]]]]:
    """Yields once, inside a loop over units and rows: the number of a unit, that of a row, and the sums of each tile of
    the unit for the row alone.

    weights: how many units, how many tiles each has, and the address of a tile of a unit; `MOST_TILES` tiles at most.
    panels: their address, the bytes of one, the blocks of a row, and the number of rows. kept: memory for 400 KiB.
    """
    (units, tiles, start), (x, stride, blocks, rows) = weights, panels
    words = _Words(e, format)
    products, of_tiles = kept, kept + _PRODUCTS * _MATRIX
    size = _INPUTS // GROUP * words.nbytes
    sums, zero = of_tiles + MOST_TILES * size, e.zero(_F16)
    with e.loop(0, rows, _PANELS * ROWS) as begin:
        count = (e.imin(rows - begin, _PANELS * ROWS) + (ROWS - 1)) // ROWS
        with e.loop(0, count * MOST_TILES) as number:
            for row in range(ROWS):
                e.store(zero, sums + number * _MATRIX, 4 * ROWS * row)
        with e.loop(0, blocks, words.blocks) as block:
            own_blocks = e.imin(blocks - block, words.blocks)
            with e.loop(0, units) as unit:
                for which in range(tiles):
                    at = start(unit, which) + block * block_bytes(format)
                    words.expand(at, own_blocks, of_tiles + (unit * tiles + which) * size)
            with e.loop(0, count) as panel:
                inputs = x + (begin // ROWS + panel) * stride + block * (words.parts * (MATRIX_ROW * ROWS))
                with e.loop(0, units * tiles) as number:
                    total = sums + (panel * MOST_TILES + number) * _MATRIX
                    following = inputs + stride + number * (MATRIX_ROW * ROWS // MOST_TILES)
                    words.add_matrices(of_tiles + number * size, own_blocks * words.parts, inputs, following, products, total)
        with e.loop(0, count) as panel, e.loop(0, units) as unit, e.loop(0, ROWS) as row:
            at = sums + (panel * MOST_TILES + unit * tiles) * _MATRIX + row * (4 * ROWS)
            yield unit, begin + panel * ROWS + row, [[e.load(at, _F16, _MATRIX * which)] for which in range(tiles)]


class _Words(CodeWords):
    """Writes blocks of a format as bfloat16, and multiplies them.

    blocks: of 256 inputs.
    """

    def __init__(self, e: Emitter, format: WeightFormat) -> None:
        self._format, self._expander = format, expander(e, format)
        self._layout = layout(format) if self._expander is None else self._expander.layout
        super().__init__(e, Codes(e, self._layout))
        self.blocks = _INPUTS // format.values
        lowest, highest = self._range()
        most = 2**24 // (format.group * (Inputs.CODES.value + 1))  # the magnitude up to which a sum is exact
        self._shift = max(0, highest - most)
        self._is_whole = lowest - self._shift >= -most
        self._shift *= self._is_whole

    def _range(self) -> tuple[int, int]:
        """The lowest and the highest code, less the zero point."""
        format, codes = self._layout.format, self._codes
        if format.table is not None:
            return int(format.table.min()), int(format.table.max())
        if self._layout.planes == (8,):
            return -128, 127
        return -codes.zero, 2**format.bits - 1 - codes.zero

    def expand(self, at: Value, count: Value, out: Value) -> None:
        """Write the words and scales of blocks at an address."""
        e, expand = self._e, self._expander
        with e.loop(0, count) as number:
            own = at + number * block_bytes(self._format)
            block = Block(e, self._layout, own) if expand is None else Block(e, self._layout, expand(own), expand.factor)
            self.write(block, out + number * (self.parts * self.nbytes))

    def _word(self, at: Value, pair: int) -> Value:
        """bfloat16."""
        words = super()._word(at, pair) - self._shift
        low, high = (words.bits(_I16) << 16).ashr(16), words.bits(_I16).ashr(16)
        low, high = ((half.to_float().bits(_I16)) for half in (low, high))
        return ((low >> 16) | (high & -65536)).bits(words.type)

    def add_matrices(self, words: Value, parts: Value, inputs: Value, following: Value, products: Value, sums: Value) -> None:
        """Add the products of a panel's rows with words to float32 (16, 16) at `sums`. parts: of 32 inputs."""
        e, groups = self._e, self._groups
        of_group = 1 if self._is_whole else 2
        at_once, step = _PRODUCTS // (groups * of_group), groups * of_group * _MATRIX
        halves = [0, _MATRIX]
        with e.loop(0, parts, at_once) as first:
            count = e.imin(parts - first, at_once)
            with e.loop(0, count) as number:
                own, left = words + (first + number) * self.nbytes, inputs + (first + number) * (MATRIX_ROW * ROWS)
                for group in range(groups):
                    right, factors = own + _MATRIX // groups * group, [left + 64 // groups * group + half for half in halves]
                    at = products + number * step + _MATRIX * of_group * group
                    for place, pieces in enumerate([factors] if self._is_whole else [factors[:1], factors[1:]]):
                        e.level.multiply_tiles(e, pieces, right, at + _MATRIX * place)
            totals = [e.variable(e.load(sums, _F16, 4 * ROWS * row)) for row in range(ROWS)]
            with e.loop(0, count) as number:
                own, left = words + (first + number) * self.nbytes, inputs + (first + number) * (MATRIX_ROW * ROWS)
                e.prefetch(following + (first + number) * (MATRIX_ROW * ROWS), MATRIX_ROW * ROWS // MOST_TILES + 32)
                for group in range(groups):
                    at = products + number * step + _MATRIX * of_group * group
                    for row, total in enumerate(totals):
                        numbers = left + (2 * _MATRIX + 16 * row)
                        self._add_row(own, group, at + 4 * ROWS * row, numbers, total)
            for row, total in enumerate(totals):
                e.store(total.get(), sums, 4 * ROWS * row)

    def _add_row(self, words: Value, group: int, product: Value, numbers: Value, total: Variable) -> None:
        """Add the products of a row with a group of inputs, scaled."""
        e = self._e
        less = e.broadcast(numbers, F32, ROWS, 4 if self._groups == 1 else 8 + 4 * group)
        dot = e.load(product, _F16)
        if not self._is_whole:
            dot = dot + e.load(product, _F16, _MATRIX)
        if self._shift:
            dot = e.fma(less, e.like(-float(self._shift), less), dot)
        value = dot * e.load(words, _F16, self._scales + 4 * ROWS * group)
        if self._offsets is not None:
            value = e.fma(less, e.load(words, _F16, self._offsets + 4 * ROWS * group), value)
        total.set(e.fma(value, e.broadcast(numbers, F32, ROWS), total.get()))

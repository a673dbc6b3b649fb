"""Sums of products with expanded blocks (`Way.EXPANDED`): a block of 16 rows is expanded once for 64 panels, in memory
of the thread that stays in the cache.

Lattices and digits are expanded to codes of 8 bits (`expanders`); numbers of 16 bits to words, and codes to words or
bytes where the level multiplies many rows faster so (`expanded_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, Inputs, row_bytes
from polarlm.engine.backends.native.kernels.linear.block_sums import Block, IntCodes, Outputs, add_block, sum_by_outputs
from polarlm.engine.backends.native.kernels.linear.expanded_weights import (
    INPUTS,
    ExpandedBytes,
    ExpandedCodes,
    ExpandedNumbers,
    ExpandedWeights,
)
from polarlm.engine.backends.native.kernels.linear.expanders import expander, has_expander
from polarlm.engine.backends.native.kernels.linear.tiling import Tiling, become_words
from polarlm.engine.backends.native.tiles import ROWS, block_bytes, layout
from polarlm.engine.jit.lang import F32, Emitter, Level, Value, Values, Variable, vector
from polarlm.engine.weight_formats import WeightFormat

_PANELS = 64  # whose sums are kept while a block is expanded: enough that products cost much more than expanding it
SUMS = 128  # the offset of the sums in the scratch memory
_ROW = 4 * ROWS


def is_expanded(format: WeightFormat, inputs: Inputs, size: Tiling, level: Level) -> bool:
    """Whether blocks of a format are expanded before they are multiplied. inputs: how inputs are read."""
    if format.unpack is None:
        return inputs is Inputs.WORDS
    if has_expander(format):
        return True
    return become_words(size, level, inputs) and not (size.unpacks_again and _are_simple(format))


def _are_simple(format: WeightFormat) -> bool:
    """Whether a shift and a mask unpack the codes of a format."""
    return format.table is None and layout(format).planes in ((4,), (8,))


def expanded_sums(
    e: Emitter,
    format: WeightFormat,
    sizes: Tiling,
    tiles: Values,
    at_once: int,
    panels: tuple[Value, Value, Value, Value],
    sums_at: Value,
    kind: Inputs,
    finish: Callable[[Value, list[list[Value]]], None],
) -> None:
    """Call finish(a panel's first row, the sums of each tile and each of its rows) inside a loop over all panels.

    tiles: addresses. at_once: how many of them are multiplied at a time. panels: the address of panels from
    `quantize_rows` for `kind`, the bytes of one, the blocks of a row, and the number of rows. sums_at: memory for the
    sums of 64 panels and all tiles, and then for words.
    """
    x, stride, blocks, rows = panels
    row_tile = sizes.rows
    most, size = _PANELS * row_tile, _ROW * row_tile
    zero, words_at = e.zero(vector(F32, ROWS)), sums_at + len(tiles) * _PANELS * size
    expanded: _WordBlocks | _ByteBlocks
    if kind is Inputs.WORDS or become_words(sizes, e.level, kind):
        words = {Inputs.WORDS: ExpandedNumbers, Inputs.CODES: ExpandedCodes, Inputs.BYTES: ExpandedBytes}[kind]
        expanded = _WordBlocks(e, words(e, format), at_once, words_at)
    else:
        expanded = _ByteBlocks(e, format, at_once, row_tile, kind)
    with e.loop(0, rows, most) as begin:
        count = (e.imin(rows - begin, most) + (row_tile - 1)) // row_tile
        with e.loop(0, count) as panel:
            for place in range(len(tiles) * row_tile):
                e.store(zero, sums_at + panel * size, _place(place // row_tile, place % row_tile, row_tile))
        with e.loop(0, blocks, expanded.blocks) as block:
            for first in range(0, len(tiles), at_once):
                tile_group = range(first, min(first + at_once, len(tiles)))
                expanded.expand([tiles[number] for number in tile_group], block, blocks)
                with e.loop(0, count) as panel:
                    places = [[_place(number, row, row_tile) for row in range(row_tile)] for number in tile_group]
                    totals = [
                        [e.variable(e.load(sums_at + panel * size, zero.type, place)) for place in tile_places]
                        for tile_places in places
                    ]
                    number, step = begin // row_tile + panel, block * (max(format.values, GROUP) // GROUP)
                    inputs = x + number * stride + step * (row_bytes(e.level, kind) * row_tile)
                    expanded.add(inputs, inputs + stride, totals)
                    for total, place in zip(chain(*totals), chain(*places), strict=True):
                        e.store(total.get(), sums_at + panel * size, place)
        with e.loop(0, count) as panel:
            first_row = begin + panel * row_tile
            sums = [
                [e.load(sums_at + panel * size, zero.type, _place(number, row, row_tile)) for row in range(row_tile)]
                for number in range(len(tiles))
            ]
            finish(first_row, sums)


def _place(tile: int, row: int, row_tile: int) -> int:
    return _ROW * (tile * _PANELS * row_tile + row)


class _ByteBlocks:
    """A block of each tile, expanded to codes of 8 bits."""

    blocks = 1

    def __init__(self, e: Emitter, format: WeightFormat, tiles: int, row_tile: int, kind: Inputs) -> None:
        self._e, self._format = e, format
        self._expanders = [expand for _ in range(tiles) if (expand := expander(e, format)) is not None]
        self._codes = IntCodes(e, self._expanders[0].layout, row_tile, kind)
        self._expanded: list[Value] = []

    def expand(self, tiles: Values, block: Value, blocks: Value) -> None:
        offset = block * block_bytes(self._format)
        self._expanded = [expand(tile + offset) for expand, tile in zip(self._expanders, tiles, strict=False)]

    def add(self, inputs: Value, next_inputs: Value, sums: Sequence[Sequence[Variable]]) -> None:
        """Add the products with the inputs of a panel to `sums`, of each tile and row."""
        e, expand = self._e, self._expanders[0]

        def add(outputs: Outputs, totals: Sequence[Sequence[Variable]]) -> None:
            blocks = [Block(e, expand.layout, address, expand.factor, outputs) for address in self._expanded]
            add_block(e, self._codes, blocks, inputs, totals)

        results = sum_by_outputs(e, [[total.get() for total in totals] for totals in sums], add)
        for total, value in zip(chain(*sums), chain(*results), strict=True):
            total.set(value)


class _WordBlocks:
    """256 inputs of each tile, which have become words or bytes."""

    def __init__(self, e: Emitter, words: ExpandedWeights, tiles: int, memory: Value) -> None:
        self._e, self._words, self.blocks = e, words, words.blocks
        self._places = [memory + number * (INPUTS // GROUP * words.nbytes) for number in range(tiles)]
        self._parts = e.i64(0)

    def expand(self, tiles: Values, block: Value, blocks: Value) -> None:
        """Write the words of the blocks from number `block` on, of `blocks`, of each tile."""
        count = self._e.imin(blocks - block, self.blocks)
        for tile, out in zip(tiles, self._places, strict=False):
            self._words.write_blocks(tile, block, count, out)
        self._parts = count * self._words.parts

    def add(self, inputs: Value, next_inputs: Value, sums: Sequence[Sequence[Variable]]) -> None:
        self._words.add_products(self._places[: len(sums)], self._parts, inputs, next_inputs, sums)

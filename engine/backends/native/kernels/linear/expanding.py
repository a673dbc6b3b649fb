"""Sums of products with blocks that become codes of 8 bits first: those of lattices and of digits.

A block of 16 rows is expanded in memory of the thread that stays in the cache, and is multiplied there as if it were
stored so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Protocol

from polarlm.engine.backends.native.kernels.linear.activations import GROUP, ROW_BYTES
from polarlm.engine.backends.native.kernels.linear.block_sums import Block, Codes, add_block
from polarlm.engine.backends.native.kernels.linear.lattice import LatticeExpander
from polarlm.engine.backends.native.kernels.linear.trits import TritExpander
from polarlm.engine.backends.native.tiles import ROWS, TileLayout, block_bytes
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, Value, vector
from polarlm.engine.weight_formats import WeightFormat

_PANELS = 32  # whose sums are kept while a block is expanded: enough that expanding it costs little beside products
SUMS = 128  # the offset of the sums in the scratch memory
_ROW = 4 * ROWS


class Expander(Protocol):
    """Expands blocks. layout: of what they become. factor: what their scales are to be multiplied by."""

    layout: TileLayout
    factor: float

    def __call__(self, at: Value) -> Value:
        """The expanded block of the block at an address: valid until the next."""


def is_expanded(format: WeightFormat) -> bool:
    """Whether blocks of a format are expanded before they are multiplied."""
    return format.grid is not None or format.runs is not None


def expander(e: Emitter, format: WeightFormat) -> Expander:
    """The expander of a format whose blocks are expanded."""
    return TritExpander(e, format) if format.runs is not None else LatticeExpander(e, format)


def expanded_sums(
    e: Emitter,
    format: WeightFormat,
    row_tile: int,
    tiles: Sequence[Value],
    at_once: int,
    panels: tuple[Value, Value, Value, Value],
    kept: Value,
) -> Iterator[tuple[Value, list[list[Value]]]]:
    """Yields once, inside a loop over all panels: a panel's first row, and the sums of each tile and each of its rows.

    tiles: addresses. at_once: how many of them are multiplied at a time. panels: the address of panels from
    `quantize_rows`, the bytes of one, the blocks of a row, and the number of rows. kept: memory for the sums of 32
    panels and all tiles. A block is expanded once for 32 panels.
    """
    x, stride, blocks, rows = panels
    expanders, most, size = [expander(e, format) for _ in range(at_once)], _PANELS * row_tile, _ROW * row_tile
    codes, zero = Codes(e, expanders[0].layout), e.zero(vector(F32, ROWS))
    with e.loop(0, rows, most) as begin:
        count = (e.imin(rows - begin, most) + (row_tile - 1)) // row_tile
        with e.loop(0, count) as panel:
            for place in range(len(tiles) * row_tile):
                e.store(zero, kept + panel * size, _place(place // row_tile, place % row_tile, row_tile))
        with e.loop(0, blocks) as block:
            for first in range(0, len(tiles), at_once):
                together = [
                    Block(e, expand.layout, expand(tile + block * block_bytes(format)), expand.factor)
                    for expand, tile in zip(expanders, tiles[first:], strict=False)
                ]
                with e.loop(0, count) as panel:
                    places = [
                        [_place(first + number, row, row_tile) for row in range(row_tile)]
                        for number in range(len(together))
                    ]
                    totals = [
                        [e.variable(e.load(kept + panel * size, zero.type, place)) for place in own] for own in places
                    ]
                    inputs = x + (begin // row_tile + panel) * stride
                    start = block * (format.values // GROUP * ROW_BYTES * row_tile)
                    add_block(e, codes, together, inputs + start, totals)
                    for total, place in zip(chain(*totals), chain(*places), strict=True):
                        e.store(total.get(), kept + panel * size, place)
        with e.loop(0, count) as panel:
            yield (
                begin + panel * row_tile,
                [
                    [e.load(kept + panel * size, zero.type, _place(number, row, row_tile)) for row in range(row_tile)]
                    for number in range(len(tiles))
                ],
            )


def _place(tile: int, row: int, row_tile: int) -> int:
    """The offset of the sums of a tile and row in those of a panel."""
    return _ROW * (tile * _PANELS * row_tile + row)

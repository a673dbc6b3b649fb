"""How many rows and tiles of weights a product multiplies at once."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.linear.activations import Inputs, are_paired
from polarlm.engine.jit.lang import Level

_FEW = 2  # rows per expert, on average, from which panels of several rows are faster than panels of one
_FEW_ROWS = 16  # up to which words in memory save nothing, where sums are in order
_MOST_IN_ORDER = 6  # rows whose sums have 12 of 16 registers
_FEW_PANELS = 2  # for which unpacking weights again would cost more than loading inputs seldom saves


class Tiling(NamedTuple):
    """What a kernel multiplies at once: rows of inputs (a panel), and tiles of weights.

    unpacks_again: codes are unpacked for each panel, unless they take more than a shift and a mask.
    """

    rows: int
    tiles: int
    unpacks_again: bool = False


SINGLE = Tiling(1, 1)
_MATRICES = Tiling(16, 2)  # rows of a matrix, and tiles of a strip
_PAIRS = Tiling(4, 1)  # for bytes that are multiplied in pairs of rows: their sums have half of the registers


@cache
def tiling(rows: int, level: Level, inputs: Inputs = Inputs.CODES) -> Tiling:
    """The tiling for `rows` rows, in panels of about equal sizes. For few rows weights should be unpacked once, for
    many inputs should be loaded seldom.

    inputs: how products read them; `Inputs.shared` of several.
    """
    if inputs is Inputs.MATRICES:
        return _MATRICES
    if level.orders_sums and inputs.are_integers and rows <= _FEW_ROWS:
        # Unpacking a tile of codes, and scaling its sums, take about as long as a row.
        size = Tiling(min(range(1, 1 + _MOST_IN_ORDER), key=lambda row_tile: -(-rows // row_tile) * (row_tile + 1)), 1)
        return size._replace(unpacks_again=become_words(size, level, inputs))
    few, most = _few(level, inputs), largest_tiling(level, inputs)
    if are_paired(level, most.rows, inputs) and rows > 1:
        return most._replace(rows=2 * -(-rows // (2 * -(-rows // most.rows))))
    if rows <= _FEW_PANELS * few.rows:
        most = few
    return Tiling(-(-rows // -(-rows // most.rows)), most.tiles)


def expert_tiling(rows: int, level: Level, inputs: Inputs = Inputs.CODES) -> Tiling:
    """The tiling for experts that have about `rows` rows each: for few the smaller panel, since fewer of its rows
    are empty. Of float32 an empty row costs as much as another: panels have about as many rows as experts."""
    if rows < _FEW and inputs is not Inputs.MATRICES:
        return SINGLE
    if not inputs.are_integers:
        return tiling(rows, level, inputs)
    few, most = _few(level, inputs), largest_tiling(level, inputs)
    return few if few.rows < most.rows and rows <= _FEW_PANELS * few.rows else most


@cache
def largest_tiling(level: Level, inputs: Inputs = Inputs.CODES) -> Tiling:
    """The tiling for many rows. Of float32, it is one whose sums are few where the largest is for words in memory."""
    if inputs is Inputs.MATRICES:
        return _MATRICES
    if are_paired(level, _PAIRS.rows, inputs):
        return _PAIRS
    unpacks = level.unpacks_first and not level.has_room
    return Tiling(*level.code_tiles[0 if unpacks and not inputs.are_integers else -1])


@cache
def tilings(level: Level, inputs: Inputs) -> tuple[Tiling, ...]:
    """The tilings that products of any number of rows may have, with equal results."""
    largest = largest_tiling(level, inputs)
    if inputs is Inputs.MATRICES:
        return (largest,)
    return tuple(dict.fromkeys((SINGLE, *(tiling(rows, level, inputs) for rows in range(2, _FEW_ROWS)), largest)))


def _few(level: Level, inputs: Inputs) -> Tiling:
    """The tiling for few rows."""
    return _PAIRS if are_paired(level, _PAIRS.rows, inputs) else Tiling(*level.code_tiles[0])


def become_words(size: Tiling, level: Level, inputs: Inputs = Inputs.CODES) -> bool:
    """Whether codes are unpacked to words, or to bytes, in memory before they are multiplied: where more is multiplied
    at once than of few rows. Words may be, by format, although a tiling says that codes are unpacked again."""
    few = Tiling(*level.code_tiles[0])
    unpacks = level.unpacks_first
    if inputs is Inputs.BYTES:
        unpacks = not level.splits_words and not size.unpacks_again
    return unpacks and size.rows * size.tiles > few.rows * few.tiles


def are_unsigned(size: Tiling, level: Level, inputs: Inputs) -> bool:
    """Whether inputs of 8 bits are unsigned in panels: bytes in memory, which are signed, are multiplied by them."""
    return inputs is Inputs.BYTES and become_words(size, level, inputs)


def short_prompts(level: Level) -> tuple[int, ...]:
    """Row counts that the largest tiling is not for; see `WarmUp.short`."""
    return tuple(rows for rows, _ in level.code_tiles[:-1])

"""How many rows and tiles of weights a product multiplies at once."""

from __future__ import annotations

from typing import NamedTuple

from polarlm.engine.jit.isa.levels import Level

_FEW_PANELS = 2  # for which unpacking weights again would cost more than loading inputs seldom saves


class Tiling(NamedTuple):
    """What a kernel multiplies at once: rows of inputs, those of a panel, and tiles of weights."""

    rows: int
    tiles: int


SINGLE = Tiling(1, 1)


def tiling(rows: int, level: Level) -> Tiling:
    """The tiling for `rows` rows, in panels of about equal sizes. For few rows weights should be unpacked once, for
    many inputs should be loaded seldom."""
    few, most = Tiling(*level.code_tiles[0]), largest_tiling(level)
    if rows <= _FEW_PANELS * few.rows:
        most = few
    return Tiling(-(-rows // -(-rows // most.rows)), most.tiles)


def largest_tiling(level: Level) -> Tiling:
    """The tiling for many rows."""
    return Tiling(*level.code_tiles[-1])


def short_prompts(level: Level) -> tuple[int, ...]:
    """Row counts that the largest tiling is not for; see `WarmUp.short`."""
    return tuple(rows for rows, _ in level.code_tiles[:-1])

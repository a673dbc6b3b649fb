"""How decode_attention divides its work among blocks (CTAs) and their warps: `cuda/attention/shares.cuh` in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polarlm.engine.backends.cuda.kv.cache import SpanHeader

SLICE = 16  # tokens of a unit of a full-precision record


@dataclass(frozen=True)
class Shares:
    """`units` units from `first` on for `count` takers, who get equally many; the first of them may get one more."""

    first: int
    units: int
    count: int

    def begin(self, taker: int) -> int:
        base, extra = divmod(self.units, self.count)
        return self.first + taker * base + min(taker, extra)

    def end(self, taker: int) -> int:
        return self.begin(taker + 1)

    def sizes(self) -> list[int]:
        return [self.end(taker) - self.begin(taker) for taker in range(self.count)]


def units_of(span: SpanHeader, window: int, block_size: int, all_full: bool) -> int:
    """Units of one cell of the sequence: blocks and slices with tokens that any of its rows sees."""
    oldest = max(0, span.position - window + 1) if window else 0
    newest = span.position + span.rows - 1
    if newest < oldest:
        return 0
    slices = block_size // SLICE
    skipped = min(max(0, oldest // block_size - span.first_quantized), span.quantized)
    quantized = (span.quantized - skipped) * (slices if all_full else 1)
    sink = slices if span.sink >= 0 and oldest < min(block_size, newest + 1) else 0
    start = max(span.current_block * block_size, oldest // SLICE * SLICE)
    return quantized + sink + (newest - start) // SLICE + 1


@dataclass(frozen=True)
class Plan:
    """The units of all cells, in a row: by sequence, by cell, by token.

    kv_heads: K. group: H / K. columns: of a cell. window: 0 for none. all_full: no block is quantized.
    """

    spans: Sequence[SpanHeader]
    kv_heads: int
    group: int
    columns: int
    block_size: int
    count: int  # of CTAs
    window: int = 0
    all_full: bool = False

    @cached_property
    def sizes(self) -> np.ndarray:
        """Units of each cell, in order."""
        sizes: list[int] = []
        for span in self.spans:
            cells = self.kv_heads * -(-self.group * span.rows // self.columns)
            sizes += [units_of(span, self.window, self.block_size, self.all_full)] * cells
        return np.array(sizes, np.int64)

    @cached_property
    def total(self) -> int:
        return int(self.sizes.sum())

    @cached_property
    def ctas(self) -> Shares:
        return Shares(0, self.total, self.count)

    def warps(self, cta: int, count: int) -> Shares:
        """Of a CTA's share."""
        begin = self.ctas.begin(cta)
        return Shares(begin, self.ctas.end(cta) - begin, count)

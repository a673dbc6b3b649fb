"""Tables of points rounded to bytes, and their lookup by codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from polarlm.engine.jit.lang.byte_ops import PairTable, Table
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import Value


@dataclass(frozen=True)
class CodeTable:
    """The points (2^bits, width) float32 that codes stand for; width: channels per code."""

    bits: int
    points: np.ndarray

    @property
    def width(self) -> int:
        return int(self.points.shape[1])

    @property
    def scale(self) -> float:
        """The quantization step of `bytes_`."""
        return float(np.abs(self.points).max()) / 127

    @property
    def bytes_(self) -> np.ndarray:
        """The points in steps of `scale`: (2^bits, width) int8."""
        return np.rint(self.points / self.scale).astype(np.int8)

    def emit(self, e: Emitter, bias: int) -> Callable[[list[Value]], list[Value]]:
        """Returns a function: code vectors from `Packing.emit` → for each channel a vector of its bytes plus bias."""
        entries = np.resize(
            (self.bytes_.astype(np.int16) + bias).astype(np.uint8).T, (self.width, max(16, 1 << self.bits))
        )
        tables = [_table(e, entries[:, first : first + 256]) for first in range(0, entries.shape[1], 256)]

        def lookup(code: list[Value]) -> list[Value]:
            found = [table(code[0]) for table in tables]
            if len(found) == 1:
                return found[0]
            first, second = (code[1] & 1).equals(1), (code[1] & 2).equals(2)
            return [
                e.select(second, e.select(first, d, c), e.select(first, b, a))
                for a, b, c, d in zip(*found, strict=True)
            ]

        return lookup


def _table(e: Emitter, entries: np.ndarray) -> Callable[[Value], list[Value]]:
    """Returns a function: a vector of indices → for each row of entries (width, at most 256) a vector of its bytes."""
    if len(entries) == 2:
        pairs = PairTable(e, *(row.tobytes() for row in entries))
        return lambda index: list(pairs[index])
    single = Table(e, e.constant_bytes(entries.tobytes()), entries.shape[1])
    return lambda index: [single[index]]

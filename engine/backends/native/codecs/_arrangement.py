"""The order of a block's codes in a tile."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Arrangement(NamedTuple):
    """Codes (N, C) of a block: both axes are cut into pieces, which a tile has in another order. 64 divides N · C.

    cuts: the pieces of N, then those of C. order: of the pieces in a tile.
    """

    cuts: tuple[int, ...]
    order: tuple[int, ...]

    def vectors(self, codes: np.ndarray) -> np.ndarray:
        """codes (..., N, C) → (..., V, 64), as they lie in tiles."""
        lead = codes.shape[:-2]
        axes = *range(len(lead)), *(len(lead) + axis for axis in self.order)
        return codes.reshape(*lead, *self.cuts).transpose(axes).reshape(*lead, math.prod(self.cuts) // 64, 64)

    def codes(self, vectors: np.ndarray, tokens: int) -> np.ndarray:
        """The inverse of `vectors`, for N tokens: (..., V, 64) → (..., N, C), C-contiguous."""
        lead = vectors.shape[:-2]
        axes = *range(len(lead)), *(len(lead) + axis for axis in np.argsort(self.order).tolist())
        pieces = vectors.reshape(*lead, *(self.cuts[axis] for axis in self.order)).transpose(axes)
        return np.ascontiguousarray(pieces).reshape(*lead, tokens, math.prod(self.cuts) // tokens)

    def places(self, tokens: int) -> np.ndarray:
        """Where the codes of a block lie among those of its tile: (N, C) uint16."""
        return self.codes(np.arange(math.prod(self.cuts), dtype=np.uint16).reshape(-1, 64), tokens)

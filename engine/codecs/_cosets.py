"""Four candidates at once for the trellis: the nearest point of each coset, found by one lookup.

The square [−4, 4)² is cut into 256 × 256 cells. All that lies in a cell has the same candidates: the points nearest to
the middle of the cell. At most a cell's diagonal decides against the nearest point, where two are about equally near:
that costs .05 % of the mean squared error of paths, and saves the search among all points. What lies outside the square
has the candidates of the cell on its rim.
"""

from __future__ import annotations

import numpy as np

from engine.codecs._arrays import slabs

STATES = 4  # a state is the last two bits of the code before; so many cosets lead from any state to every other

_CELLS = 256  # along an axis: two bytes name a cell
_PER_UNIT = np.float32(32)  # cells in a length of 1; a power of two, so that scaling rounds nothing


class Cosets:
    """Coset s of `base` (2^m, 2) float32 holds the codes c with c & 3 = s. Q different quadruples of candidates."""

    def __init__(self, base: np.ndarray) -> None:
        axis = (np.arange(_CELLS, dtype=np.float32) + np.float32(0.5) - _CELLS // 2) / _PER_UNIT
        middles = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
        nearest = np.stack([_nearest(base[state::STATES], middles) for state in range(STATES)], -1)  # (65536, 4) uint8
        quadruples, entries = np.unique(nearest.view(np.uint32), return_inverse=True)
        cells = np.moveaxis(np.indices((_CELLS, _CELLS), np.uint8), 0, -1).copy()
        self._entries = np.empty(_CELLS**2, np.uint16)
        self._entries[cells.view(np.uint16).reshape(-1)] = entries.reshape(-1)  # as this machine reads two bytes
        rows = quadruples.view(np.uint8).reshape(-1, STATES).T.astype(np.uint16)
        self.codes = rows * np.uint16(STATES) + np.arange(STATES, dtype=np.uint16)[:, None]  # (4, Q)
        points = base[self.codes]
        self.points = np.concatenate([points[..., 0], points[..., 1]])  # (8, Q) float32: x of all four, then y

    def quadruple(self, aims: np.ndarray) -> np.ndarray:
        """aims (...) complex64, finite → the number of the quadruple for each, (...) intp below Q."""
        cells = aims.view(np.float32) * _PER_UNIT
        cells += np.float32(_CELLS // 2)
        np.clip(cells, 0, _CELLS - 1, out=cells)
        return np.take(self._entries, cells.astype(np.uint8).view(np.uint16), mode="clip").astype(np.intp)


def _nearest(points: np.ndarray, x: np.ndarray) -> np.ndarray:
    """points (C, 2), x (R, 2) → which of them is nearest, (R,) uint8."""
    half, nearest = np.square(points).sum(1) / 2, np.empty(len(x), np.uint8)
    for part in slabs(len(x), len(points)):
        nearest[part] = (half - x[part] @ points.T).argmin(1)
    return nearest

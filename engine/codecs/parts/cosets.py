"""The trellis's four candidates, the nearest point of each coset, found by one lookup.

The square [−4, 4)² is cut into 256 × 256 cells. All pairs in a cell have the same candidates: the points nearest to the
centre of the cell. So a candidate may be farther than the nearest point, by at most the cell's diagonal: that adds
.05 % to the mean squared error of paths, and saves a search among all points. A pair outside the square has the
candidates of the nearest cell on its rim.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.codecs.schema.arrays import slabs

STATES = 4  # a state is the last two bits of the previous code; every state leads to each state by one coset

_CELLS = 256  # cells along each axis: two bytes index a cell
_PER_UNIT = np.float32(32)  # cells per unit of length; a power of two, so that scaling is exact


class Cosets:
    """Candidates from `base` (2^m, 2) float32, whose coset s has the codes c with c & 3 = s; Q distinct quadruples.

    codes (4, Q) uint16: the code of each coset's candidate. points (8, Q) float32: their x, then their y.
    """

    def __init__(self, base: np.ndarray) -> None:
        axis = (np.arange(_CELLS, dtype=np.float32) + np.float32(0.5) - _CELLS // 2) / _PER_UNIT
        middles = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
        nearest = np.stack([_nearest(base[state::STATES], middles) for state in range(STATES)], -1)  # (65536, 4) uint8
        quadruples, entries = np.unique(nearest.view(np.uint32), return_inverse=True)
        cells = np.moveaxis(np.indices((_CELLS, _CELLS), np.uint8), 0, -1).copy()
        self._entries = np.empty(_CELLS**2, np.uint16)
        self._entries[cells.view(np.uint16).reshape(-1)] = entries.reshape(-1)  # in this machine's byte order
        rows = quadruples.view(np.uint8).reshape(-1, STATES).T.astype(np.uint16)
        self.codes = rows * np.uint16(STATES) + np.arange(STATES, dtype=np.uint16)[:, None]  # (4, Q)
        points = base[self.codes]
        self.points = np.concatenate([points[..., 0], points[..., 1]])  # (8, Q) float32: x of all four, then y

    def quadruple(self, targets: np.ndarray) -> np.ndarray:
        """targets (...) complex64, finite → the index of each one's quadruple, (...) intp below Q."""
        cells = targets.view(np.float32) * _PER_UNIT
        cells += np.float32(_CELLS // 2)
        np.clip(cells, 0, _CELLS - 1, out=cells)
        return np.take(self._entries, cells.astype(np.uint8).view(np.uint16), mode="clip").astype(np.intp)


def _nearest(points: np.ndarray, x: np.ndarray) -> np.ndarray:
    """points (C, 2), x (R, 2) → the index of the nearest point, (R,) uint8."""
    half, nearest = np.square(points).sum(1) / 2, np.empty(len(x), np.uint8)
    for part in slabs(len(x), len(points)):
        nearest[part] = (half - x[part] @ points.T).argmin(1)
    return nearest

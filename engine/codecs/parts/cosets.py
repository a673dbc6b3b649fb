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

CELLS = 256  # cells along each axis: two bytes index a cell
PER_UNIT = np.float32(32)  # cells per unit of length; a power of two, so that scaling is exact


class Cosets:
    """Candidates from `base` (2^m, 2) float32, whose coset s has the codes c with c & 3 = s; Q distinct quadruples.

    entries (65536,) uint16: the quadruple of each cell, by 256 · its number along x + its number along y. codes (4, Q)
    uint16: the code of each coset's candidate. points (8, Q) float32: their x, then their y.
    """

    def __init__(self, base: np.ndarray) -> None:
        axis = (np.arange(CELLS, dtype=np.float32) + np.float32(0.5) - CELLS // 2) / PER_UNIT
        middles = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
        nearest = np.stack([_nearest(base[state::STATES], middles) for state in range(STATES)], -1)  # (65536, 4) uint8
        quadruples, entries = np.unique(nearest.view(np.uint32), return_inverse=True)
        self.entries = entries.reshape(-1).astype(np.uint16)
        rows = quadruples.view(np.uint8).reshape(-1, STATES).T.astype(np.uint16)
        self.codes = rows * np.uint16(STATES) + np.arange(STATES, dtype=np.uint16)[:, None]  # (4, Q)
        points = base[self.codes]
        self.points = np.concatenate([points[..., 0], points[..., 1]])  # (8, Q) float32: x of all four, then y

    def quadruple(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x, y (...) float32, finite: targets → the index of each one's quadruple, (...) intp below Q."""
        cells = _cell(x).astype(np.intp)
        cells *= CELLS
        cells += _cell(y)
        return np.take(self.entries, cells, mode="clip").astype(np.intp)


def _cell(x: np.ndarray) -> np.ndarray:
    """x (...) float32 → the numbers of their cells along an axis, (...) uint8."""
    cells = x * PER_UNIT
    cells += np.float32(CELLS // 2)
    return np.clip(cells, 0, CELLS - 1, out=cells).astype(np.uint8)


def _nearest(points: np.ndarray, x: np.ndarray) -> np.ndarray:
    """points (C, 2), x (R, 2) → the index of the nearest point, (R,) uint8."""
    half, nearest = np.square(points).sum(1) / 2, np.empty(len(x), np.uint8)
    for part in slabs(len(x), len(points)):
        nearest[part] = (half - x[part] @ points.T).argmin(1)
    return nearest

"""Exact nearest-point search in a table of points in the plane, for millions of pairs.

The square [−4, 4)² is cut into 256 × 256 cells. In most cells one point is nearest everywhere, and the cell's entry is
its code. The entry of any other cell is a short list of the points that can be nearest in it. Pairs on the rim of the
square or outside it, one in ten thousand at unit variance, are compared with every point. So are all pairs of a small
array, since that costs less than the fixed cost of the cells.
"""

from __future__ import annotations

import numpy as np

from polarlm.engine.codecs.schema.arrays import slabs

_CELLS = 256  # cells along each axis: two bytes index a cell
_PER_UNIT = 32  # cells per unit of length; a power of two, so that scaling is exact
_COARSE = 16  # cells along the side of a coarse cell, which narrows down the points for the lists of its cells

# Scores in the square are sums of three terms below 24: their float32 error is less than 1e-5.
_TOLERANCE = 1e-4
_RIM = 0  # the rim's list number: compare with all points

_FEW = 1 << 15  # pairs times points: up to this, comparison with every point is faster (512 pairs and 64 points)


class NearestPoint:
    """Finds the nearest of `points` (P, 2), all within a radius of 4; the first of equally near points: the point of
    the least float32 score |p|²/2 − x·p, half the squared distance minus |x|²/2."""

    def __init__(self, points: np.ndarray) -> None:
        self.points = np.ascontiguousarray(points, np.float32)
        self._by_axis = np.ascontiguousarray(self.points.T)
        self._half = np.square(self.points).sum(1) / 2
        self._entries, self._lists, self._lengths = self._cut()

    def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, 2) float32, magnitudes under 1e37 → codes (R,) uint8 or uint16, their points (R, 2) float32."""
        codes = np.empty(len(x), np.min_scalar_type(len(self.points) - 1))
        few = len(x) * len(self.points) <= _FEW
        for part in slabs(len(x), 8):
            codes[part] = self._best_of_all(x[part]) if few else self._round(x[part])
        return codes, np.take(self.points, codes, axis=0)

    def scores(self, x: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """x (..., 2), codes (...) that broadcast → |p|²/2 − x·p, each operation rounded to float32."""
        p = self.points[codes]
        return (self._half[codes] - x[..., 0] * p[..., 0]) - x[..., 1] * p[..., 1]

    def _round(self, x: np.ndarray) -> np.ndarray:
        """x (R, 2) → codes (R,), found by cells."""
        scaled = x * np.float32(_PER_UNIT)
        scaled += np.float32(_CELLS / 2)
        np.clip(scaled, 0, _CELLS - 1, out=scaled)
        codes = np.take(self._entries, scaled.astype(np.uint8).view(np.uint16)[:, 0])
        undecided = np.flatnonzero(codes < 0)
        lists = ~codes[undecided]
        rim = undecided[lists == _RIM]
        codes[undecided] = self._best_of_list(x[undecided], lists)
        codes[rim] = self._best_of_all(x[rim])
        return codes

    def _best_of_list(self, x: np.ndarray, lists: np.ndarray) -> np.ndarray:
        """x (A, 2), numbers of their lists (A,) → codes (A,). Lists ascend, so the lowest code wins a tie."""
        best = self._lists[lists, 0]
        lowest, rows = self.scores(x, best), np.arange(len(x))
        for place in range(1, self._lists.shape[1]):
            rows = rows[self._lengths[lists[rows]] > place]
            code = self._lists[lists[rows], place]
            score = self.scores(x[rows], code)
            better = score < lowest[rows]
            best[rows[better]] = code[better]
            lowest[rows[better]] = score[better]
        return best

    def _best_of_all(self, x: np.ndarray) -> np.ndarray:
        """x (A, 2) → codes (A,), found by comparison with every point."""
        codes, (px, py) = np.empty(len(x), np.intp), self._by_axis
        for part in slabs(len(x), len(self.points)):
            scores = self._half - x[part, :1] * px
            scores -= x[part, 1:] * py
            codes[part] = scores.argmin(1)
        return codes

    def _cut(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Each cell's code, or ~number of its list, (65536,) int32; lists (M, longest), padded; their lengths (M,)."""
        entries, numbers = np.empty((_CELLS, _CELLS), np.int32), {(0,): _RIM}
        everything = np.arange(len(self.points))
        for corner in np.ndindex(_CELLS // _COARSE, _CELLS // _COARSE):
            low = np.multiply(corner, _COARSE)
            middle = (low + _COARSE / 2 - _CELLS / 2)[None] / _PER_UNIT
            nearby = everything[can_win(self.points, middle, _COARSE / _PER_UNIT)[0]]
            cells = low + np.moveaxis(np.indices((_COARSE, _COARSE)), 0, -1).reshape(-1, 2)
            middles = (cells + 0.5 - _CELLS / 2) / _PER_UNIT
            for cell, row in zip(cells.tolist(), can_win(self.points[nearby], middles, 1 / _PER_UNIT), strict=True):
                winners = tuple(nearby[row].tolist())
                single = len(winners) == 1
                entries[tuple(cell)] = winners[0] if single else ~numbers.setdefault(winners, len(numbers))
        for rim in (0, -1):
            entries[rim] = entries[:, rim] = ~_RIM
        lengths = np.array([len(winners) for winners in numbers])
        lists = np.zeros((len(numbers), lengths.max()), np.intp)
        for row, winners in zip(lists, numbers, strict=True):
            row[: len(winners)] = winners
        return self._by_bytes(entries), lists, lengths

    @staticmethod
    def _by_bytes(entries: np.ndarray) -> np.ndarray:
        """entries (x cell, y cell) → (65536,), indexed by a cell's two bytes as a uint16 of this machine."""
        cells = np.moveaxis(np.indices(entries.shape, np.uint8), 0, -1).copy()
        flat = np.empty(entries.size, entries.dtype)
        flat[cells.view(np.uint16)[..., 0]] = entries
        return flat


def can_win(points: np.ndarray, middles: np.ndarray, side: float) -> np.ndarray:
    """Return (A, P) bool: True where one of `points` (P, 2) can be nearest somewhere in the square cell of this side
    around one of `middles` (A, 2), which are in the square [−4, 4)².

    The difference of two points' scores is linear in x, so over half a side in either direction it changes by at most
    half a side times |Δx| + |Δy| of the two points.
    """
    p = points.astype(np.float64)
    scores = np.square(p).sum(1) / 2 - middles @ p.T
    first = scores.argmin(1)
    excess = scores - scores[np.arange(len(scores)), first][:, None]
    change = np.abs(p[None] - p[first][:, None]).sum(2) * (side / 2 + _TOLERANCE)
    return excess <= change + _TOLERANCE

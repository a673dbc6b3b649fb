"""The nearest of a table of points in the plane, exactly, for millions of pairs.

The square [−4, 4)² is cut into 256 × 256 cells. Most of them lie nearer to one point than to all others, and the cell
is the answer; a cell with a border through it has the short list of points that can win there. What lies on the rim or
beyond it, one in ten thousand pairs of unit variance, is compared with every point. So are all pairs when there are
only a few: then comparing costs less than what any number of pairs costs in the cells.
"""

from __future__ import annotations

import numpy as np

from engine.codecs._arrays import slabs

_CELLS = 256  # along an axis: two bytes name a cell
_PER_UNIT = 32  # cells in a length of 1; a power of two, so that scaling rounds nothing
_COARSE = 16  # cells along the side of a coarse cell, where the search for the lists begins

# Scores in the square are sums of three terms below 24: float32 is off by less than 1e-5 in all.
_TOLERANCE = 1e-4
_RIM = 0  # the list that stands for all points

_FEW = 1 << 15  # pairs times points: up to here comparison with every point is faster (512 pairs and 64 points)


class NearestPoint:
    """Finds the nearest of `points` (P, 2), all within a radius of 4; of equally near ones the first.

    "Near" is the float32 score |p|²/2 − x·p, half the squared distance but for a constant of x: see `scores`.
    """

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
        """x (R, 2) → codes (R,)."""
        scaled = x * np.float32(_PER_UNIT)
        scaled += np.float32(_CELLS / 2)
        np.clip(scaled, 0, _CELLS - 1, out=scaled)
        codes = np.take(self._entries, scaled.astype(np.uint8).view(np.uint16)[:, 0])
        open_ = np.flatnonzero(codes < 0)
        which = ~codes[open_]
        rim = which == _RIM
        codes[open_] = self._best_of_list(x[open_], which)
        codes[open_[rim]] = self._best_of_all(x[open_[rim]])
        return codes

    def _best_of_list(self, x: np.ndarray, which: np.ndarray) -> np.ndarray:
        """x (A, 2), numbers of lists (A,) → codes (A,). Lists ascend, so the first of equals is the lowest code."""
        best = self._lists[which, 0]
        lowest, rows = self.scores(x, best), np.arange(len(x))
        for place in range(1, self._lists.shape[1]):
            rows = rows[self._lengths[which[rows]] > place]
            code = self._lists[which[rows], place]
            score = self.scores(x[rows], code)
            better = score < lowest[rows]
            best[rows[better]] = code[better]
            lowest[rows[better]] = score[better]
        return best

    def _best_of_all(self, x: np.ndarray) -> np.ndarray:
        """x (A, 2) → codes (A,), by comparison with every point."""
        codes, (px, py) = np.empty(len(x), np.intp), self._by_axis
        for part in slabs(len(x), len(self.points)):
            scores = self._half - x[part, :1] * px
            scores -= x[part, 1:] * py
            codes[part] = scores.argmin(1)
        return codes

    def _cut(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cell → its code, or ~number of its list, (65536,) int32; lists (M, longest), padded; lengths (M,)."""
        entries, numbers = np.empty((_CELLS, _CELLS), np.int32), {(0,): _RIM}
        everything = np.arange(len(self.points))
        for corner in np.ndindex(_CELLS // _COARSE, _CELLS // _COARSE):
            low = np.multiply(corner, _COARSE)
            middle = (low + _COARSE / 2)[None]
            nearby = everything[self._can_win(middle, everything, _COARSE)[0]]
            cells = low + np.moveaxis(np.indices((_COARSE, _COARSE)), 0, -1).reshape(-1, 2)
            can_win = self._can_win(cells + 0.5, nearby, 1)
            for cell, row in zip(cells.tolist(), can_win, strict=True):
                winners = tuple(nearby[row].tolist())
                alone = len(winners) == 1
                entries[tuple(cell)] = winners[0] if alone else ~numbers.setdefault(winners, len(numbers))
        for rim in (0, -1):
            entries[rim] = entries[:, rim] = ~_RIM
        lengths = np.array([len(winners) for winners in numbers])
        lists = np.zeros((len(numbers), lengths.max()), np.intp)
        for row, winners in zip(lists, numbers, strict=True):
            row[: len(winners)] = winners
        return self._by_bytes(entries), lists, lengths

    def _can_win(self, middles: np.ndarray, codes: np.ndarray, side: int) -> np.ndarray:
        """Which of `codes` (C,) can be nearest somewhere in square cells around `middles` (A, 2): (A, C) bool.

        Middles and the side are counted in cells. A difference of two scores is linear in x, so that half a side away
        in either direction it has changed by at most that times the two differences between the points.
        """
        p, half = self.points[codes].astype(np.float64), self._half[codes]
        score = half - (middles - _CELLS / 2) / _PER_UNIT @ p.T
        first = score.argmin(1)
        lead = score - score[np.arange(len(score)), first][:, None]
        reach = np.abs(p[None] - p[first][:, None]).sum(2) * (side / 2 / _PER_UNIT + _TOLERANCE)
        return lead <= reach + _TOLERANCE

    @staticmethod
    def _by_bytes(entries: np.ndarray) -> np.ndarray:
        """entries (x cell, y cell) → (65536,), in the order in which this machine reads their two bytes."""
        cells = np.moveaxis(np.indices(entries.shape, np.uint8), 0, -1).copy()
        flat = np.empty(entries.size, entries.dtype)
        flat[cells.view(np.uint16)[..., 0]] = entries
        return flat

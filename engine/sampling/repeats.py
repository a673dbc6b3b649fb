"""Repetitions at the end of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ROOM = 256  # the initial capacity in ids


class Repeats:
    """The run at each distance d: the number of last ids that equal the ids d places before them. The first n ids cost
    O(n), each further id one pass over all distances."""

    def __init__(self, furthest: int | None = None) -> None:
        """furthest: the largest distance; None for all."""
        self._furthest = furthest
        self._ids = np.empty(_ROOM, np.int32)
        self._runs = np.zeros(_ROOM, np.int32)  # the run at d has index d - 1
        self.count = 0

    @property
    def ids(self) -> np.ndarray:
        """The ids so far (count,) int32."""
        return self._ids[: self.count]

    @property
    def runs(self) -> np.ndarray:
        """The runs (n,) int32 at the distances 1, 2, … n; n is `furthest` or count - 1, if that is less. Runs may
        overlap the ids that they repeat. Of the first call's ids, only the last `furthest` count."""
        return self._runs[: self._reach(self.count)]

    def extend(self, ids: Sequence[int]) -> None:
        end = self.count + len(ids)
        if end > len(self._ids):
            self._ids, self._runs = (np.resize(array, max(end, 2 * len(array))) for array in (self._ids, self._runs))
            self._runs[self._reach(self.count) :] = 0
        if self.count == 0:
            self._ids[:end] = ids
            self.count = end
            reach = self._reach(end)
            self._runs[:reach] = _runs_of(list(ids[-reach - 1 :]))
            return
        for token in ids:
            runs = self._runs[: self._reach(self.count + 1)]
            runs += 1
            runs *= self._ids[self.count - len(runs) : self.count][::-1] == token
            self._ids[self.count] = token
            self.count += 1

    def circle(self, tokens: int, rounds: int) -> bool:
        """Whether the sequence ends with at least `tokens` ids that repeat one piece at least `rounds` times."""
        runs = self.runs
        distances = np.arange(1, len(runs) + 1)
        return bool((runs + distances >= np.maximum(rounds * distances, tokens)).any())

    def _reach(self, count: int) -> int:
        """The number of distances among `count` ids."""
        most = max(count - 1, 0)
        return most if self._furthest is None else min(most, self._furthest)


def _runs_of(ids: list[int]) -> list[int]:
    """The runs at the distances 1, 2, … len(ids) - 1: the Z-algorithm, on the ids from the last to the first."""
    ids = ids[::-1]
    n, begin, end = len(ids), 0, 0  # ids[begin:end] repeats the first ids, and has the largest end so far
    runs = [0] * n
    for at in range(1, n):
        run = min(end - at, runs[at - begin]) if at < end else 0
        while at + run < n and ids[run] == ids[at + run]:
            run += 1
        if at + run > end:
            begin, end = at, at + run
        runs[at] = run
    return runs[1:]

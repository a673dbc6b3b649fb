"""The best path through a bit-shift trellis of four states, for pairs of values."""

from __future__ import annotations

import numpy as np

from engine.codecs._arrays import slabs
from engine.codecs._nearest import NearestPoint

STATES = 4  # a state is the last two bits of the code before

_FAR = np.float32(1e6)  # pairs are cut to this, so that squares of distances stay finite


def turn(pairs: np.ndarray, quarters: int) -> np.ndarray:
    """pairs (..., 2), turned counter-clockwise by so many right angles; exact."""
    x, y = pairs[..., 0], pairs[..., 1]
    return np.stack([(x, y), (-y, x), (-x, -y), (y, -x)][quarters % 4], -1)


class PathSearch:
    """Viterbi's algorithm over codes of pairs: of all paths the one with the least sum of squared errors.

    base: (2^m, 2) float32. In state s the code c stands for base[c], turned by s right angles, and leads to state
    c & 3; every vector begins in state 0.
    """

    def __init__(self, base: np.ndarray) -> None:
        self.base = np.ascontiguousarray(base, np.float32)
        self._turned = np.concatenate([turn(self.base, state) for state in range(STATES)])
        self._nearest = [NearestPoint(self.base[state::STATES]) for state in range(STATES)]

    def __call__(
        self, x: np.ndarray, feedback: np.ndarray | None = None, weights: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """x (R, D) float32 of unit variance → codes (R, D/2) uint8, their points (R, D) float32.

        feedback: (D, D) float32, strictly lower in blocks of pairs: pair j aims at x_j + F_j·e_{<j}, e being the errors
        of the pairs before it on the same path. weights: (D/2,) float32, what a squared error of each pair counts.
        """
        codes, points = np.empty((len(x), x.shape[1] // 2), np.uint8), np.empty_like(x)
        for part in slabs(len(x), 2 * x.shape[1]):
            codes[part] = self._search(np.clip(x[part], -_FAR, _FAR), feedback, weights)
            points[part] = self.points(codes[part])
        return codes, points

    def points(self, codes: np.ndarray) -> np.ndarray:
        """codes (R, P) of whole vectors → (R, 2P) float32."""
        rows = self.states(codes).astype(np.intp) * len(self.base) + codes
        return np.take(self._turned, rows, axis=0).reshape(len(codes), -1)

    @staticmethod
    def states(codes: np.ndarray) -> np.ndarray:
        """codes (R, P) of whole vectors → the state in which each stands, (R, P)."""
        states = np.zeros_like(codes)
        states[:, 1:] = codes[:, :-1] % STATES
        return states

    def _search(self, x: np.ndarray, feedback: np.ndarray | None, weights: np.ndarray | None) -> np.ndarray:
        """x (R, D) → codes (R, D/2)."""
        count, dim = x.shape
        cost = np.full((STATES, count), np.inf, np.float32)
        cost[0] = 0
        errors = np.zeros((STATES, count, dim), np.float32)  # of the best path into each state
        taken = np.empty((dim // 2, STATES, count), np.uint8)  # its last code,
        origin = np.empty((dim // 2, STATES, count), np.uint8)  # and the state before it
        for j in range(dim // 2):
            pair = slice(2 * j, 2 * j + 2)
            target = np.broadcast_to(x[:, pair], (STATES, count, 2))
            if feedback is not None:
                target = target + errors[..., : 2 * j] @ feedback[pair, : 2 * j].T
            cost, points = self._step(cost, target, 1 if weights is None else weights[j], taken[j], origin[j])
            if feedback is not None:
                errors = errors[origin[j], np.arange(count)]
                errors[..., pair] = x[:, pair] - points
        return self._trace(cost.argmin(0), taken, origin)

    def _step(
        self, cost: np.ndarray, target: np.ndarray, weight: float, taken: np.ndarray, origin: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Extend the paths into all states, cost (4, R), by a pair near target (4, R, 2) each.

        Fills taken and origin (4, R), for the states after it; returns their cost (4, R) and last points (4, R, 2).
        """
        aims = np.stack([turn(aim, -state) for state, aim in enumerate(target)]).reshape(-1, 2)
        costs, points, rows = np.empty_like(cost), np.empty(target.shape, np.float32), np.arange(cost.shape[1])
        for state, nearest in enumerate(self._nearest):
            codes, squared = nearest(aims)
            squared -= aims
            squared *= squared
            total = (squared[:, 0] + squared[:, 1]).reshape(cost.shape)
            total *= np.float32(weight)
            total += cost
            costs[state], origin[state] = total[0], 0
            for before in range(1, STATES):
                better = total[before] < costs[state]
                np.copyto(costs[state], total[before], where=better)
                np.copyto(origin[state], np.uint8(before), where=better)
            taken[state] = np.take(codes, origin[state] * np.intp(len(rows)) + rows) * STATES + state
            points[state] = np.take(self._turned, origin[state] * np.intp(len(self.base)) + taken[state], axis=0)
        return costs, points

    @staticmethod
    def _trace(state: np.ndarray, taken: np.ndarray, origin: np.ndarray) -> np.ndarray:
        """Last states (R,), and taken and origin (P, 4, R) → codes (R, P)."""
        codes, rows = np.empty(taken.shape[::2], np.uint8), np.arange(len(state))
        for j in reversed(range(len(taken))):
            codes[j] = taken[j, state, rows]
            state = origin[j, state, rows]
        return codes.T

"""Designs the tables of `ring`: the number of phases on each circle, and the radii.

    python -m scripts.design_rings POINTS RINGS [symmetric]

prints phases and radii, from the inside to the outside, and the mean squared error per value of variance 1. Given the
phases, Lloyd's algorithm on the Gaussian density finds the radii: the best radius of a ring is the mean of r·cos δ over
its cells, δ being the angle to the nearest of its points. An exchange search finds the phases: it moves one point from
one ring to another as long as the error falls. Odd rings are rotated by half a phase; other rotations gain less than a
thousandth. The best number of rings is found by trial: 4, 6, 8, 12 and 22 are in use.

In symmetric designs each quadrant is a mirror image of the others: all rings are rotated by half a phase, and their
phases are multiples of four; the search moves four at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache, partial
from itertools import permutations

import numpy as np

_LARGEST = 6.5  # e^(−21) of the density is beyond this radius


class Plane:
    """The density exp(−r²/2) of a pair of unit variance, as weighted points on circles: Gauss–Legendre along r.

    radial: circles; angular: points on each, rotated from circle to circle to avoid a regular pattern. With an odd
    number of them, each quadrant has others.
    """

    def __init__(self, radial: int = 400, angular: int = 361) -> None:
        nodes, weights = np.polynomial.legendre.leggauss(radial)
        radius = _LARGEST / 2 * (1 + nodes)
        shift = np.arange(radial) * (np.sqrt(5) - 1) / 2 % 1
        self._angle = ((np.arange(angular) + shift[:, None]) * (2 * np.pi / angular)).astype(np.float32).ravel()
        self._radius = np.repeat(radius.astype(np.float32), angular)
        weight = np.repeat(weights * radius * np.exp(-(radius**2) / 2), angular)
        self._weight = weight / weight.sum()
        self._along = cache(self._project)

    def _project(self, phases: int, rotated: bool) -> np.ndarray:
        """r·cos δ of every point of the plane, for the nearest of `phases` points on a ring."""
        phase = self._angle / np.float32(2 * np.pi) * np.float32(phases) - np.float32(rotated / 2)
        phase -= np.round(phase)
        return self._radius * np.cos(phase * np.float32(2 * np.pi / phases))

    def settle(
        self, phases: Sequence[int], radii: np.ndarray, steps: int, *, symmetric: bool = False
    ) -> tuple[float, np.ndarray]:
        """`steps` steps of Lloyd's algorithm → the error per value before the last one, and the radii after it.

        Each moves 1.5 times as far as to the means of the cells, which converges faster; the last moves exactly there.
        """
        along = np.stack([self._along(count, symmetric or ring % 2 == 1) for ring, count in enumerate(phases)])
        radii = np.asarray(radii, np.float64)
        for left in reversed(range(steps)):
            a = radii.astype(np.float32)[:, None]
            scores = a * (a - 2 * along)
            ring = scores.argmin(0)[None]
            squared = np.take_along_axis(scores, ring, 0)[0] + self._radius**2
            mass = np.bincount(ring[0], self._weight, len(phases))
            first = np.bincount(ring[0], self._weight * np.take_along_axis(along, ring, 0)[0], len(phases))
            moved = np.where(mass > 0, first / np.maximum(mass, 1e-300), radii)
            radii = radii + (1.5 if left else 1.0) * (moved - radii)
        return float(self._weight @ squared) / 2, radii


def first_guess(points: int, rings: int, step: int) -> tuple[list[int], np.ndarray]:
    """Phases and radii of a fine quantizer: the density of points goes as the square root of the pair's density.

    Phases are multiples of `step`.
    """
    fine = np.linspace(0, 6, 6001)
    gap = np.exp(-(fine**2) / 8)
    radii = np.interp((np.arange(rings) + 0.6) / rings * 0.985, np.cumsum(gap) / gap.sum(), fine)
    ideal = radii * np.exp(-(radii**2) / 8)
    ideal *= points / ideal.sum()
    phases = np.maximum(1, np.round(ideal / step)).astype(int) * step
    while phases.sum() != points:
        sign = np.sign(points - phases.sum())
        phases[np.argmax(sign * (ideal - phases))] += sign * step
    return phases.tolist(), radii


def search(points: int, rings: int, *, symmetric: bool) -> tuple[list[int], np.ndarray, float]:
    """Phases, radii and error where no exchange of points between two of the rings lowers the error."""
    step, plane = 4 if symmetric else 1, Plane()
    settle = partial(plane.settle, symmetric=symmetric)
    phases, radii = first_guess(points, rings, step)
    best, radii = settle(phases, radii, 30)
    improved = True
    while improved:
        improved = False
        for giver, taker in sorted(permutations(range(rings), 2), key=lambda pair: abs(pair[0] - pair[1])):
            trial = list(phases)
            trial[giver] -= step
            trial[taker] += step
            if trial[giver] < step:
                continue
            error, moved = settle(trial, radii, 6)
            if error < best - 1e-8:
                best, phases, radii, improved = error, trial, moved, True
    error, radii = Plane(1000, 501).settle(phases, settle(phases, radii, 300)[1], 40, symmetric=symmetric)
    return phases, radii, error


if __name__ == "__main__":
    phases, radii, mean_squared_error = search(*map(int, sys.argv[1:3]), symmetric=sys.argv[3:] == ["symmetric"])
    print(tuple(phases), tuple(np.maximum(radii, 0).round(4).tolist()), f"{mean_squared_error:.6f}", sep="\n")

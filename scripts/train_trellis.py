"""Trains the tables of `trellis`.

    python -m scripts.train_trellis BITS

prints the points of a pair of BITS bits, in thousandths, as `engine/codecs/parts/trellis_points.py` holds them, and
the mean squared error per value on Gaussian vectors of 128 values. It is Lloyd's algorithm with best paths in place
of cells: each round finds the best paths of random vectors, then moves every point to the mean of the pairs that took
it, with the signs of state 0. Later rounds move points less, which averages the randomness out.
"""

from __future__ import annotations

import sys

import numpy as np

from polarlm.engine.codecs.parts.viterbi import PathSearch, flip

_ROUNDS, _VECTORS, _DIM = 120, 4000, 64


def train(bits: int) -> np.ndarray:
    """(2^bits, 2) float64, a multiple of 1/1000."""
    random = np.random.default_rng(bits)
    base = random.standard_normal((2**bits, 2)) * np.sqrt(1 - 2.0**-bits)
    for number in range(_ROUNDS):
        x = random.standard_normal((_VECTORS, _DIM), np.float32)
        search = PathSearch(base)
        codes = search(x[None])[0][0]
        pairs = x.reshape(_VECTORS, -1, 2)
        back = flip(pairs, search.states(codes)).reshape(-1, 2)
        taken = np.bincount(codes.ravel(), minlength=2**bits)
        sums = np.stack([np.bincount(codes.ravel(), back[:, axis], 2**bits) for axis in (0, 1)], -1)
        means = sums / np.maximum(taken, 1)[:, None]
        step = np.minimum(1, _ROUNDS / 2 / (number + 1)) ** 2
        base = np.where(taken[:, None] > 0, base + step * (means - base), base)
    return np.round(base, 3)


if __name__ == "__main__":
    points = train(int(sys.argv[1]))
    test = np.random.default_rng(0).standard_normal((4000, 128), np.float32)
    print(" ".join(f"{round(1000 * value)}" for value in points.ravel()))
    print(f"{np.square(PathSearch(points)(test[None])[1] - test).mean():.5f}")

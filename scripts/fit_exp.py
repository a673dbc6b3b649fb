"""Fits the polynomial of the kernels' exponential function, `engine.jit.lang.emit.Emitter.exp`.

    python -m scripts.fit_exp

prints the coefficients that it holds; a test derives them again. e^r = 1 + r + r² · q(r) for |r| ≤ ln 2 / 2.
"""

from __future__ import annotations

import numpy as np

DEGREE = 4  # of q: one less, and the polynomial's error would exceed that of float32
_POINTS, _ROUNDS = 2_001, 200


def points() -> np.ndarray:
    """The interval of r: float64, evenly spaced, with a little on each side for the rounding of x / ln 2."""
    return np.linspace(-1, 1, _POINTS) * (np.log(2) / 2 * 1.00001)


def errors(coefficients: np.ndarray) -> np.ndarray:
    """Relative errors of e^r at `points`, for q with these coefficients, lowest power first."""
    r = points()
    return (1 + r + r * r * np.polynomial.polynomial.polyval(r, coefficients)) / np.exp(r) - 1


def fit() -> np.ndarray:
    """The coefficients of q, lowest power first, float32 (DEGREE + 1,).

    Least squares with weights that grow where the error is large (Lawson's method) comes close to the smallest largest
    error.
    """
    r = points()
    powers = r[:, None] ** np.arange(2, DEGREE + 3) / np.exp(r)[:, None]
    target, weight = (np.exp(r) - 1 - r) / np.exp(r), np.ones(_POINTS)
    for _ in range(_ROUNDS):
        root = np.sqrt(weight)[:, None]
        coefficients = np.linalg.lstsq(powers * root, target * root[:, 0])[0]
        weight *= np.abs(powers @ coefficients - target)
        weight /= weight.max()
    return coefficients.astype(np.float32)


if __name__ == "__main__":
    found = fit()
    print(", ".join(f"{c:.9g}" for c in found))
    print(f"largest relative error {np.abs(errors(found)).max():.2g}")

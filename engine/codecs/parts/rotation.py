"""Random orthogonal matrices that never change, since codes on disk depend on them.

Random bits come from PCG64's raw stream, which is the same in all versions of NumPy; a Generator's may change.
"""

from __future__ import annotations

from functools import cache

import numpy as np

PRECONDITIONINGS = ("hadamard", "dense", "none")

_SEED = 20250204


def _freeze(matrix: np.ndarray) -> np.ndarray:
    matrix = np.ascontiguousarray(matrix, np.float32)
    matrix.flags.writeable = False
    return matrix


def _signs(head_dim: int) -> np.ndarray:
    """Two rows of random signs ±1, (2, D) float64."""
    return np.where(np.random.PCG64(_SEED).random_raw((2, head_dim)) >> 63, -1.0, 1.0)


def preconditioning(kind: str, head_dim: int) -> np.ndarray | None:
    """The rotation of an option: the matrix (D, D) of "hadamard" or "dense", None for "none"."""
    if kind == "none":
        return None
    return dense(head_dim) if kind == "dense" else signed_hadamard(head_dim)


@cache
def signed_hadamard(head_dim: int) -> np.ndarray:
    """diag(±1) · H/√n, (D, D) float32, read-only; n is the largest power of two that divides D. The Hadamard matrix H
    of order n is repeated D/n times along the diagonal."""
    order = head_dim & -head_dim
    hadamard: np.ndarray = np.ones((1, 1))
    while len(hadamard) < order:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return _freeze(_signs(head_dim)[0, :, None] * np.kron(np.eye(head_dim // order), hadamard / np.sqrt(order)))


@cache
def twice_signed_hadamard(head_dim: int) -> np.ndarray:
    """diag(±1) · H/√n · diag(±1), (D, D) float32, read-only: `signed_hadamard` with random signs on both sides."""
    return _freeze(signed_hadamard(head_dim) * _signs(head_dim)[1])


@cache
def dense(head_dim: int) -> np.ndarray:
    """An orthogonal matrix from the uniform (Haar) distribution, (D, D) float32, read-only.

    It is the Q of a Gaussian matrix, with the signs of its columns such that the diagonal of R is positive; otherwise Q
    would not be uniform (Mezzadri, Notices of the AMS 54(5), 2007).
    """
    uniform = (np.random.PCG64(_SEED).random_raw((2, head_dim, head_dim)) >> 11) * 2.0**-53
    gaussian = np.sqrt(-2 * np.log1p(-uniform[0])) * np.cos(2 * np.pi * uniform[1])
    q, r = np.linalg.qr(gaussian)
    return _freeze(q * np.sign(np.diag(r)))

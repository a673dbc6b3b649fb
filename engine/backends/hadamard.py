"""Signed Hadamard matrices: rotations that the fast Walsh-Hadamard transform applies with n · log n additions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Signs(NamedTuple):
    """diag(before) · H/√order · diag(after), where H has D/order Hadamard matrices on its diagonal.

    before, after (D,) float32: ±1.
    """

    order: int
    before: np.ndarray
    after: np.ndarray


def hadamard_signs(rotation: np.ndarray) -> Signs | None:
    """The signs of `rotation` (D, D) if it is a signed Hadamard matrix, else None."""
    dim = len(rotation)
    order = dim & -dim
    firsts = np.arange(dim) // order * order
    # The first row and the first column of a Hadamard matrix are 1.
    before = np.sign(rotation[np.arange(dim), firsts])
    after = np.sign(rotation[firsts, np.arange(dim)]) * before[firsts]
    plain = before[:, None] * rotation * after * np.sqrt(order)
    hadamard: np.ndarray = np.ones((1, 1))
    while len(hadamard) < order:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    if not np.allclose(plain, np.kron(np.eye(dim // order), hadamard), atol=1e-4):
        return None
    return Signs(order, before.astype(np.float32), after.astype(np.float32))

"""Signed Hadamard matrices: rotations that the fast Walsh-Hadamard transform applies with n · log n additions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from polarlm.engine.backends.kv import HeadTransform

Rotation = TypeVar("Rotation")


class Signs(NamedTuple):
    """diag(input_signs) · H/√order · diag(output_signs), where H has D/order Hadamard matrices on its diagonal.

    input_signs, output_signs (D,) float32: ±1.
    """

    order: int
    input_signs: np.ndarray
    output_signs: np.ndarray


def hadamard_signs(rotation: np.ndarray) -> Signs | None:
    """The signs of `rotation` (D, D) if it is a signed Hadamard matrix, else None."""
    dim = len(rotation)
    order = dim & -dim
    block_starts = np.arange(dim) // order * order
    # The first row and the first column of a Hadamard matrix are 1.
    input_signs = np.sign(rotation[np.arange(dim), block_starts])
    output_signs = np.sign(rotation[block_starts, np.arange(dim)]) * input_signs[block_starts]
    plain = input_signs[:, None] * rotation * output_signs * np.sqrt(order)
    hadamard: np.ndarray = np.ones((1, 1))
    while len(hadamard) < order:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    if not np.allclose(plain, np.kron(np.eye(dim // order), hadamard), atol=1e-4):
        return None
    return Signs(order, input_signs.astype(np.float32), output_signs.astype(np.float32))


def with_rotations(
    transforms: Sequence[HeadTransform], make: Callable[[np.ndarray], Rotation], identity: Rotation
) -> Iterator[tuple[HeadTransform, Rotation, Rotation, Rotation]]:
    """Yields each transform with what `make` makes of its rotations of keys and of values, and of the inverse of the
    latter; once of a matrix that several share. identity: stands for no rotation."""
    rotations: dict[tuple[int, bool], Rotation] = {}

    def rotation(matrix: np.ndarray | None, inverse: bool = False) -> Rotation:
        if matrix is None:
            return identity
        key = id(matrix), inverse
        if key not in rotations:
            rotations[key] = make(matrix.T if inverse else matrix)
        return rotations[key]

    for one in transforms:
        yield one, rotation(one.key_rotation), rotation(one.value_rotation), rotation(one.value_rotation, True)

"""How snapshots of a recurrent state keep its matrices: exactly, or as codes.

A matrix has a row for each of A key channels and a column for each of D value channels, and a token reads the same sum
of rows in all columns. A few value channels are often larger than the others, and must cost these no precision, so each
has a scale of its own. bench/quality/snapshots.py of commit 9b83d5be has measured what a coding costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_F32 = np.dtype(np.float32)
LARGEST = 127  # code of eight bits
LEAST = 1e-30  # channels with a smaller scale have codes 0

Fields = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Float32Matrices:
    """The matrices themselves. name: the value of the setting `state_type`."""

    name: str

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return name → (shape, dtype) of the arrays that keep one matrix (keys, values)."""
        return {"matrices": ((keys, values), _F32)}

    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields (..., *shape) of matrices (..., A, D) float32, none a view of them."""
        return {"matrices": matrices.copy()}

    def decode(self, fields: Fields) -> np.ndarray:
        """Return the matrices (..., A, D) float32 that the fields keep."""
        return fields["matrices"]


@dataclass(frozen=True)
class EightBitMatrices:
    """Eight bits for each number, and a scale for each value channel; with the methods of `Float32Matrices`."""

    name: str

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return {"codes": ((keys, values), np.dtype(np.int8)), "scales": ((values,), _F32)}

    @np.errstate(invalid="ignore", over="ignore")  # damaged weights are found by the check of logits
    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        scales = np.abs(matrices).max(axis=-2) / np.float32(LARGEST)
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > LEAST)
        return {"codes": np.rint(matrices * factors[..., None, :]).astype(np.int8), "scales": scales}

    @np.errstate(invalid="ignore", over="ignore")
    def decode(self, fields: Fields) -> np.ndarray:
        return fields["codes"] * fields["scales"][..., None, :]


SnapshotCodes = Float32Matrices | EightBitMatrices
EXACT, EIGHT_BITS = Float32Matrices("f32"), EightBitMatrices("8bit")
ALL: Mapping[str, SnapshotCodes] = {one.name: one for one in (EIGHT_BITS, EXACT)}
"""By the value of the setting `state_type`."""

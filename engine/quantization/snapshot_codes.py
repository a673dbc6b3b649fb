"""How snapshots of a recurrent state keep its matrices: exactly, or as codes.

A matrix has a row for each of A key channels and a column for each of D value channels. A token reads it with one
query for all columns, so the error of a column costs what the column's size says, and scales belong to columns: a
value channel that is larger than the others then costs these no precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_F32 = np.dtype(np.float32)
_LARGEST = 127  # code of eight bits
_LEAST = 1e-30  # a scale whose codes are 0

Fields = Mapping[str, np.ndarray]


class SnapshotCodes(Protocol):
    """A way to keep matrices. Values: two of the same name are equal and have the same hash."""

    @property
    def name(self) -> str:
        """The value of the setting `state_type`."""

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return name → (shape, dtype) of the arrays that keep one matrix (keys, values)."""

    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields (..., *shape) of matrices (..., A, D) float32."""

    def decode(self, fields: Fields) -> np.ndarray:
        """Return the matrices (..., A, D) float32 that the fields keep."""


@dataclass(frozen=True)
class Exact:
    """The matrices themselves."""

    name: str

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return {"matrices": ((keys, values), _F32)}

    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        return {"matrices": matrices}

    def decode(self, fields: Fields) -> np.ndarray:
        return fields["matrices"]


@dataclass(frozen=True)
class Channels:
    """Eight bits for each number, and a scale for each value channel."""

    name: str

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        return {"codes": ((keys, values), np.dtype(np.int8)), "scales": ((values,), _F32)}

    @np.errstate(invalid="ignore", over="ignore")  # of damaged weights, which the check of logits finds
    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        scales = np.abs(matrices).max(axis=-2) / np.float32(_LARGEST)
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > _LEAST)
        return {"codes": np.rint(matrices * factors[..., None, :]).astype(np.int8), "scales": scales}

    @np.errstate(invalid="ignore", over="ignore")
    def decode(self, fields: Fields) -> np.ndarray:
        return fields["codes"] * fields["scales"][..., None, :]


EXACT, EIGHT_BITS = Exact("f32"), Channels("8bit")
ALL: Mapping[str, SnapshotCodes] = {one.name: one for one in (EIGHT_BITS, EXACT)}
"""By the value of the setting `state_type`."""

"""How snapshots of a recurrent state keep its matrices: exactly, or as codes.

A matrix has a row for each of A key channels and a column for each of D value channels, and a token reads the same sum
of rows in all columns. A few value channels are often larger than the others, and must cost these no precision: either
each has a scale of its own, or a rotation mixes them, and each row has a norm. What a coding costs is measured by
`polarlm quality --state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs import Codec

_F32 = np.dtype(np.float32)
_LARGEST = 127  # code of eight bits
_LEAST = 1e-30  # a scale whose codes are 0

Fields = Mapping[str, np.ndarray]


class SnapshotCodes(Protocol):
    """A way to keep matrices. Values: two of the same name are equal and have the same hash."""

    @property
    def name(self) -> str:
        """The value of the setting `state_type`."""

    @property
    def inputs(self) -> np.dtype:
        """The type in which snapshots keep a convolution's last inputs; in half precision they saturate."""

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Return name → (shape, dtype) of the arrays that keep one matrix (keys, values).

        Raises ValueError, with a sentence for the user, for a size that it does not support.
        """

    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields (..., *shape) of matrices (..., A, D) float32."""

    def decode(self, fields: Fields) -> np.ndarray:
        """Return the matrices (..., A, D) float32 that the fields keep."""


@dataclass(frozen=True)
class Exact:
    """The matrices themselves."""

    name: str
    inputs: ClassVar[np.dtype] = _F32

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
    inputs: ClassVar[np.dtype] = _F32

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


@dataclass(frozen=True)
class Rotated:
    """The codes that a codec of keys and values has for rows, whose channels its rotation mixes.

    Every row is then close to a Gaussian vector, whatever the channels are like.
    """

    name: str
    codec: Codec
    inputs: ClassVar[np.dtype] = np.dtype(np.float16)

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        try:
            self.codec.check(values, keys)
        except ValueError:
            problem = f"state_type={self.name} does not suit a recurrent state of {keys} × {values} numbers"
            raise ValueError(f"{problem}; choose {EIGHT_BITS.name} or {EXACT.name}") from None
        return {name: (field.shape, field.dtype) for name, field in self.codec.fields(keys, values).items()}

    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        finite = np.where(np.isfinite(matrices), matrices, np.float32(0))  # the check of logits finds damaged weights
        return self.codec.encode(finite @ self._rotation(matrices.shape[-1]))

    def decode(self, fields: Fields) -> np.ndarray:
        rotated = self.codec.decode(fields)
        return rotated @ self._rotation(rotated.shape[-1]).T

    def _rotation(self, values: int) -> np.ndarray:
        rotation = self.codec.rotation(values)
        assert rotation is not None
        return rotation


def narrowed(inputs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the inputs of a convolution, float32, as `dtype`; numbers beyond the range of half precision saturate."""
    if dtype == inputs.dtype:
        return inputs
    limit = np.float32(np.finfo(dtype).max)
    return np.clip(inputs, -limit, limit).astype(dtype)


EXACT, EIGHT_BITS, FOUR_BITS = Exact("f32"), Channels("8bit"), Rotated("4bit", codecs.get("turbo4"))
ALL: Mapping[str, SnapshotCodes] = {one.name: one for one in (EIGHT_BITS, FOUR_BITS, EXACT)}
"""By the value of the setting `state_type`."""

"""How snapshots of a recurrent state keep its matrices: exactly, or as codes.

A matrix has a row for each of A key channels and a column for each of D value channels, and a token reads the same sum
of rows in all columns. A few value channels are often larger than the others, and must cost these no precision: either
each has a scale of its own, or a rotation mixes them, and each row has a scale. What a coding costs is measured by
`polarlm quality --state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from polarlm.engine.codecs.parts.rotation import signed_hadamard
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers, pack

_F32 = np.dtype(np.float32)
LARGEST = 127  # code of eight bits
LEAST = 1e-30  # channels with a smaller scale have codes 0
_BITS, _MIDDLE = 5, 15.5  # of codes 0 to 31

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
        """Return the fields (..., *shape) of matrices (..., A, D) float32, none a view of them."""

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
        return {"matrices": matrices.copy()}

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
        scales = np.abs(matrices).max(axis=-2) / np.float32(LARGEST)
        factors = np.divide(1, scales, out=np.zeros_like(scales), where=scales > LEAST)
        return {"codes": np.rint(matrices * factors[..., None, :]).astype(np.int8), "scales": scales}

    @np.errstate(invalid="ignore", over="ignore")
    def decode(self, fields: Fields) -> np.ndarray:
        return fields["codes"] * fields["scales"][..., None, :]


@dataclass(frozen=True)
class Rotated:
    """Five bits for each number, after a rotation that mixes the value channels, and a scale for each row.

    A row y, rotated, is kept as s·(code − 15.5) with s = max|y| / 15.5. A few large channels become many numbers of
    about one size, and all others become close to a Gaussian's. Of 128 of these the error is .0028 of the variance, and
    with the best levels it would be .0025 (Max, 1960). Codes of pairs, such as `ring5`, have .0020, but take five times
    as long to choose, and a prompt waits for that.
    """

    name: str
    inputs: ClassVar[np.dtype] = np.dtype(np.float16)

    def fields(self, keys: int, values: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        if keys * values % 8:
            problem = f"state_type={self.name} does not suit a recurrent state of {keys} × {values} numbers"
            raise ValueError(f"{problem}; choose {EIGHT_BITS.name} or {EXACT.name}")
        return {name: (stream.field.shape, stream.field.dtype) for name, stream in _streams(keys, values).items()}

    @np.errstate(invalid="ignore", over="ignore")  # of damaged weights, as above
    def encode(self, matrices: np.ndarray) -> dict[str, np.ndarray]:
        rotated = matrices @ signed_hadamard(matrices.shape[-1])
        scales = narrowed(np.abs(rotated).max(axis=-1) / np.float32(_MIDDLE), self.inputs)
        steps = scales.astype(np.float32)
        rotated *= np.divide(1, steps, out=np.zeros_like(steps), where=steps > 0)[..., None]
        rotated += np.float32(_MIDDLE + 0.5)  # so that the conversion, which cuts, rounds
        np.clip(rotated, 0, 2 * _MIDDLE, out=rotated)
        streams = {"scales": scales, "codes": rotated.astype(np.uint8)}
        return pack(_streams(*matrices.shape[-2:]), streams)

    @np.errstate(invalid="ignore", over="ignore")
    def decode(self, fields: Fields) -> np.ndarray:
        scales = fields["scales"]
        keys = scales.shape[-1]
        values = 8 * fields["codes"].shape[-1] // (_BITS * keys)
        rotated = _streams(keys, values)["codes"].unpack(fields["codes"]) - np.float32(_MIDDLE)
        rotated *= scales[..., None].astype(np.float32)
        return rotated @ signed_hadamard(values).T


def _streams(keys: int, values: int) -> Schema:
    return {"scales": numbers(np.float16, keys), "codes": codes(_BITS, keys, values)}


def narrowed(inputs: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the inputs of a convolution, float32, as `dtype`; numbers beyond the range of half precision saturate."""
    if dtype == inputs.dtype:
        return inputs
    limit = np.float32(np.finfo(dtype).max)
    return np.clip(inputs, -limit, limit).astype(dtype)


EXACT, EIGHT_BITS, FIVE_BITS = Exact("f32"), Channels("8bit"), Rotated("5bit")
ALL: Mapping[str, SnapshotCodes] = {one.name: one for one in (EIGHT_BITS, FIVE_BITS, EXACT)}
"""By the value of the setting `state_type`."""

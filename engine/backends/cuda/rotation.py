"""`HeadTransform` on the device. A rotation that is a signed Hadamard matrix is stored as its signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.backends.cuda.device import Array, Device
from engine.backends.ops import HeadTransform


class Signs(NamedTuple):
    """diag(before) · H/√order · diag(after), with D/order Hadamard matrices H on the diagonal; signs (D,) float32."""

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


class DeviceRotation(NamedTuple):
    """A rotation on the device: `matrix` (D, D) float32 and order 0, or the signs of a Hadamard matrix."""

    order: int
    matrix: Array | None
    before: Array | None
    after: Array | None


NO_ROTATION = DeviceRotation(1, None, None, None)  # a Hadamard matrix of order 1, without signs


class DeviceTransform(NamedTuple):
    """A `HeadTransform` on the device. back: the inverse of `values`."""

    kv_heads: int
    scale: Array | None
    keys: DeviceRotation
    values: DeviceRotation
    back: DeviceRotation
    scale_back: Array | None


def prepare(device: Device, transforms: Sequence[HeadTransform]) -> list[DeviceTransform]:
    """`transforms` on the device. A rotation array that several share is uploaded once."""
    uploaded: dict[tuple[int, bool], DeviceRotation] = {}

    def rotation(matrix: np.ndarray | None, inverse: bool = False) -> DeviceRotation:
        if matrix is None:
            return NO_ROTATION
        key = id(matrix), inverse
        if key not in uploaded:
            uploaded[key] = _upload(device, matrix.T if inverse else matrix)
        return uploaded[key]

    def scale(x: np.ndarray | None) -> Array | None:
        return None if x is None else device.from_host(np.ascontiguousarray(x, np.float32))

    return [
        DeviceTransform(
            transform.kv_heads,
            scale(transform.scale),
            rotation(transform.key_rotation),
            rotation(transform.value_rotation),
            rotation(transform.value_rotation, inverse=True),
            scale(transform.scale_back),
        )
        for transform in transforms
    ]


def _upload(device: Device, rotation: np.ndarray) -> DeviceRotation:
    """`rotation` (D, D) float32 on the device, as signs where it is a signed Hadamard matrix."""
    signs = hadamard_signs(rotation)
    if signs is None:
        return DeviceRotation(0, device.from_host(np.ascontiguousarray(rotation, np.float32)), None, None)
    return DeviceRotation(signs.order, None, device.from_host(signs.before), device.from_host(signs.after))

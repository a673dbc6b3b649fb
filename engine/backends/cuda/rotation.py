"""`HeadTransform` on the device. A rotation that is a signed Hadamard matrix is stored as its signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device
from polarlm.engine.backends.hadamard import hadamard_signs
from polarlm.engine.backends.kv import HeadTransform


class DeviceRotation(NamedTuple):
    """A rotation on the device: `matrix` (D, D) float32 with order 0, or the signs (D,) of a Hadamard matrix."""

    order: int
    matrix: Array | None
    before: Array | None
    after: Array | None


NO_ROTATION = DeviceRotation(1, None, None, None)  # a Hadamard matrix of order 1, without signs


class DeviceTransform(NamedTuple):
    """A `HeadTransform` on the device. back: the inverse of the rotation `values`."""

    kv_heads: int
    scale: Array | None
    keys: DeviceRotation
    values: DeviceRotation
    back: DeviceRotation
    scale_back: Array | None
    value_eps: float | None


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
            transform.value_eps,
        )
        for transform in transforms
    ]


def _upload(device: Device, rotation: np.ndarray) -> DeviceRotation:
    """`rotation` (D, D) float32 on the device: signs if it is a signed Hadamard matrix, else the matrix."""
    signs = hadamard_signs(rotation)
    if signs is None:
        return DeviceRotation(0, device.from_host(np.ascontiguousarray(rotation, np.float32)), None, None)
    return DeviceRotation(signs.order, None, device.from_host(signs.before), device.from_host(signs.after))

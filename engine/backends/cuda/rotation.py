"""`HeadTransform` on the device. A rotation that is a signed Hadamard matrix is stored as its signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device
from polarlm.engine.backends.hadamard import hadamard_signs, with_rotations
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

    def rotation(matrix: np.ndarray) -> DeviceRotation:
        signs = hadamard_signs(matrix)
        if signs is None:
            return DeviceRotation(0, array(matrix), None, None)
        return DeviceRotation(signs.order, None, device.from_host(signs.before), device.from_host(signs.after))

    def array(x: np.ndarray | None) -> Array | None:
        return None if x is None else device.from_host(np.ascontiguousarray(x, np.float32))

    return [
        DeviceTransform(one.kv_heads, array(one.scale), keys, values, back, array(one.scale_back), one.value_eps)
        for one, keys, values, back in with_rotations(transforms, rotation, NO_ROTATION)
    ]

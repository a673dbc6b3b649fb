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
            turned = matrix.T if inverse else matrix
            signs = hadamard_signs(turned)
            if signs is None:
                uploaded[key] = DeviceRotation(0, array(turned), None, None)
            else:
                before, after = device.from_host(signs.before), device.from_host(signs.after)
                uploaded[key] = DeviceRotation(signs.order, None, before, after)
        return uploaded[key]

    def array(x: np.ndarray | None) -> Array | None:
        return None if x is None else device.from_host(np.ascontiguousarray(x, np.float32))

    return [
        DeviceTransform(
            transform.kv_heads,
            array(transform.scale),
            rotation(transform.key_rotation),
            rotation(transform.value_rotation),
            rotation(transform.value_rotation, inverse=True),
            array(transform.scale_back),
            transform.value_eps,
        )
        for transform in transforms
    ]

"""What a layer does to its heads, on the device. Rotations are signs around Hadamard's matrix where they are that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.backends.cuda.device import Array, Device
from engine.backends.ops import HeadTransform


class Signs(NamedTuple):
    """diag(before) · H/√order · diag(behind), H of that order D/order times on the diagonal; signs (D,) float32."""

    order: int
    before: np.ndarray
    behind: np.ndarray


def hadamard_signs(rotation: np.ndarray) -> Signs | None:
    """What is around Hadamard's matrix in `rotation` (D, D); None where it is another matrix."""
    dim = len(rotation)
    order = dim & -dim
    firsts = np.arange(dim) // order * order
    # The first row and the first column of a Hadamard matrix are 1.
    before = np.sign(rotation[np.arange(dim), firsts])
    behind = np.sign(rotation[firsts, np.arange(dim)]) * before[firsts]
    plain = before[:, None] * rotation * behind * np.sqrt(order)
    hadamard: np.ndarray = np.ones((1, 1))
    while len(hadamard) < order:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    if not np.allclose(plain, np.kron(np.eye(dim // order), hadamard), atol=1e-4):
        return None
    return Signs(order, before.astype(np.float32), behind.astype(np.float32))


class OnDevice(NamedTuple):
    """A rotation for the kernels: order 0 is the matrix (D, D) float32, else the signs around Hadamard's."""

    order: int
    matrix: Array | None
    before: Array | None
    behind: Array | None


NO_TURN = OnDevice(1, None, None, None)  # a Hadamard matrix of order 1, without signs


class DeviceTransform(NamedTuple):
    """A `HeadTransform`. back: the inverse of `values`."""

    kv_heads: int
    scale: Array | None
    keys: OnDevice
    values: OnDevice
    back: OnDevice
    scale_back: Array | None


def prepare(device: Device, transforms: Sequence[HeadTransform]) -> list[DeviceTransform]:
    """`transforms` on the device; a rotation that is the same array in several is there once."""
    rope: dict[tuple[int, bool], OnDevice] = {}

    def turn(rotation: np.ndarray | None, inverse: bool = False) -> OnDevice:
        if rotation is None:
            return NO_TURN
        key = id(rotation), inverse
        if key not in rope:
            rope[key] = _upload(device, rotation.T if inverse else rotation)
        return rope[key]

    def scale(x: np.ndarray | None) -> Array | None:
        return None if x is None else device.from_host(np.ascontiguousarray(x, np.float32))

    return [
        DeviceTransform(
            of.kv_heads,
            scale(of.scale),
            turn(of.key_rotation),
            turn(of.value_rotation),
            turn(of.value_rotation, inverse=True),
            scale(of.scale_back),
        )
        for of in transforms
    ]


def _upload(device: Device, rotation: np.ndarray) -> OnDevice:
    """`rotation` (D, D) float32, as one of the kernels takes it."""
    signs = hadamard_signs(rotation)
    if signs is None:
        return OnDevice(0, device.from_host(np.ascontiguousarray(rotation, np.float32)), None, None)
    return OnDevice(signs.order, None, device.from_host(signs.before), device.from_host(signs.behind))

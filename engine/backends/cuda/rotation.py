"""Rotations on the device: signs around Hadamard's matrix where that is what a matrix is, else the matrix itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from engine.backends.cuda.device import Array, Device

Made = TypeVar("Made")


class HostKeyed(Generic[Made]):
    """What was made of arrays of the host, one of each for as long as the array lives."""

    def __init__(self, make: Callable[[np.ndarray], Made]):
        self._make = make
        self._made: dict[int, tuple[weakref.ref[np.ndarray], Made]] = {}

    def __call__(self, host: np.ndarray) -> Made:
        key = id(host)
        if key not in self._made:
            made = self._make(host)
            self._made[key] = weakref.ref(host, lambda _: self._made.pop(key, None)), made
        return self._made[key][1]


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


def upload(device: Device, rotation: np.ndarray) -> OnDevice:
    """`rotation` (D, D) float32, as one of the kernels takes it."""
    signs = hadamard_signs(rotation)
    if signs is None:
        return OnDevice(0, device.from_host(np.ascontiguousarray(rotation, np.float32)), None, None)
    return OnDevice(signs.order, None, device.from_host(signs.before), device.from_host(signs.behind))

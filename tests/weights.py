"""Weights from arrays: as in a file, and as the CPU has them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.backends.ops import Ops
from engine.weight_formats import Linear, Matrix, WeightFormat, get


def pack(x: np.ndarray, name: str) -> np.ndarray:
    """x (rows, columns) in a format, rounded to nearest even: uint8 (rows, bytes of a row). bf16: no NaN."""
    x = np.ascontiguousarray(x, np.float32)
    if name == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)
    return x.astype({"f32": "<f4", "f16": "<f2"}[name]).view(np.uint8)


class StoredArray:
    """A matrix of a file that is in memory; see `engine.weight_formats.StoredMatrix`."""

    def __init__(self, x: np.ndarray, name: str):
        self.raw = pack(x, name)
        self.shape: tuple[int, int] = x.shape
        self._format = get(name)

    @property
    def format(self) -> WeightFormat:
        return self._format

    @property
    def values(self) -> np.ndarray:
        """The values, float32."""
        out = np.empty(self.shape, np.float32)
        self.dequantize(out)
        return out

    def dequantize(self, out: np.ndarray) -> None:
        self.format.dequantize(self.raw, out)

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        step = max(1, nbytes // self.raw.shape[1])
        for first in range(0, len(self.raw), step):
            rows = slice(first, min(first + step, len(self.raw)))
            yield rows, self.raw[rows]


def load(ops: Ops, x: np.ndarray, name: str) -> Matrix:
    """x (rows, columns) in a format, on the device of `ops`."""
    (loaded,) = ops.load([StoredArray(x, name)])
    return loaded


def matrix(x: np.ndarray) -> Matrix:
    """x (out, in) as a matrix of the CPU, in the precision of x."""
    return Matrix(get("f32"), x, x.shape)


def linear(x: np.ndarray, bias: np.ndarray | None = None) -> Linear:
    """x (out, in) and bias (out,) as a `Linear` of the CPU, in the precision of x."""
    return Linear((matrix(x),), bias)

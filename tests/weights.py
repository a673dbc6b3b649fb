"""Weights from arrays: as in a file, and as the CPU has them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from polarlm.bench.random_weights import BLOCKS
from polarlm.bench.random_weights import random_blocks as random_blocks
from polarlm.engine.backends.ops import Ops
from polarlm.engine.weight_formats import Linear, Matrix, StoredMatrix, WeightFormat, get


def pack(x: np.ndarray, name: str) -> np.ndarray:
    """x (rows, columns) in a format, rounded to nearest even: uint8 (rows, bytes of a row). bf16: no NaN.

    Raises NotImplementedError for formats of blocks that gguf cannot write: see `random_blocks`.
    """
    x = np.ascontiguousarray(x, np.float32)
    if name == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").view(np.uint8)
    if name in BLOCKS:
        import gguf  # not every machine has it

        return gguf.quantize(x, gguf.GGMLQuantizationType[name.upper()]).view(np.uint8)
    return x.astype({"f32": "<f4", "f16": "<f2"}[name]).view(np.uint8)


class StoredBytes:
    """A matrix of a file that is in memory; see `engine.weight_formats.StoredMatrix`.

    raw: uint8 (rows, bytes of a row), in the format `name`.
    """

    def __init__(self, raw: np.ndarray, name: str):
        self.raw, self._format = raw, get(name)
        self.shape: tuple[int, int] = (len(raw), raw.shape[1] // self._format.nbytes * self._format.values)

    @property
    def format(self) -> WeightFormat:
        return self._format

    @property
    def values(self) -> np.ndarray:
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


def read_all(stored: StoredMatrix) -> StoredBytes:
    """The matrix in memory, whose values need no package."""
    return StoredBytes(np.concatenate([raw.copy() for _, raw in stored.slabs(1 << 20)]), stored.format.name)


class StoredArray(StoredBytes):
    """x (rows, columns), converted to the format `name`."""

    def __init__(self, x: np.ndarray, name: str):
        super().__init__(pack(x, name), name)


def random_matrix(rng: np.random.Generator, name: str, rows: int, columns: int) -> StoredBytes:
    """In a format without blocks, products with a row have about the size of its numbers."""
    if name in BLOCKS:
        return StoredBytes(random_blocks(rng, name, rows, columns), name)
    return StoredArray(rng.standard_normal((rows, columns)) / columns**0.5, name)


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

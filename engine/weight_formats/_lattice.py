"""Blocks of GGUF files whose values are points of a lattice: `Grid` says which points, `Lattice` has the integers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Grid:
    """What the indices of a format stand for.

    stored: the type whose points gguf has. cell: values of a point, 4 or 8. signs: stored sign bits of 8 values; with 7
    the eighth is their parity, with 0 points have their own signs. factor: what scales are multiplied by, a power of
    two, so that points are integers. delta: the highest bit of an index says whether 1 is added to 8 times a point, or
    subtracted.
    """

    stored: str
    cell: int
    signs: int
    factor: float
    delta: bool = False

    def points(self) -> np.ndarray:
        return _points(self)


@cache
def _points(grid: Grid) -> np.ndarray:
    quants = importlib.import_module("gguf.quants")  # imported only where a file has such a type
    kind = getattr(quants, grid.stored)
    kind.init_grid()
    points = kind.grid.reshape(-1, grid.cell).astype(np.int8)
    return np.concatenate([8 * points + 1, 8 * points - 1]) if grid.delta else points


@dataclass(frozen=True, eq=False)
class Lattice:
    """Rows of a block format, exactly: nothing has been rounded. `in` values of a row make blocks of `VALUES` values,
    blocks make groups of `GROUP` values, and groups make cells.

        w = factor * scale * (2 * sub_scale + 1) * ±point

    indices: (rows, in/cell) uint16, below 2^BITS, of the points.
    scale: (rows, in/VALUES) float16.
    sub_scale: (rows, in/GROUP) uint8, below 16.
    signs: (rows, in/8) uint8, a bit for each value, the first in the lowest, 1 for minus; without the parity, which
    `all_signs` adds. None if points have their own signs.
    """

    grid: Grid
    indices: np.ndarray
    scale: np.ndarray
    sub_scale: np.ndarray
    signs: np.ndarray | None = None

    def all_signs(self) -> np.ndarray:
        """The signs of all values, (rows, in/8) uint8."""
        assert self.signs is not None
        if self.grid.signs == 8:
            return self.signs
        parity = self.signs ^ self.signs >> 4
        parity ^= parity >> 2
        parity ^= parity >> 1
        return self.signs | parity << 7

    def integers(self) -> np.ndarray:
        """The points with their signs, int8 (rows, in)."""
        rows, cells = self.indices.shape
        points = self.grid.points()[self.indices].reshape(rows, cells * self.grid.cell)
        if self.signs is None:
            return points
        return np.where(np.unpackbits(self.all_signs(), axis=1, bitorder="little"), -points, points)

    def dequantize(self) -> np.ndarray:
        """The values (rows, in) float32, which equal gguf's to the bit: all products but the last are exact."""
        odd = 2 * self.sub_scale.astype(np.float32) + 1
        integers = self.integers()
        with np.errstate(all="ignore"):  # a damaged scale gives infinities; a warning would not help the user
            scale = self.scale.astype(np.float32) * np.float32(self.grid.factor)
            scales = np.repeat(scale, odd.shape[1] // max(1, scale.shape[1]), axis=1) * odd
            return integers * np.repeat(scales, integers.shape[1] // max(1, scales.shape[1]), axis=1)


def words(field: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """A field (rows, blocks, bytes) uint8 as integers of `dtype`, (rows, blocks, bytes / size)."""
    return np.ascontiguousarray(field).view(dtype)


def scales_and_signs(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split (rows, blocks, n) uint32, each with 7 signs four times and then 4 bits of a scale: return sub_scale
    and signs as in `Lattice`."""
    return bits_of(numbers, range(28, 29), 4), bits_of(numbers, range(0, 28, 7), 7)


def bits_of(numbers: np.ndarray, shifts: range, bits: int, dtype: type = np.uint8) -> np.ndarray:
    """The integers of `bits` bits that lie at these shifts in each number: (rows, blocks, n) → (rows, blocks · n ·
    shifts)."""
    rows, blocks, count = numbers.shape
    places = np.array(shifts, numbers.dtype)
    integers = (numbers[..., None] >> places) & numbers.dtype.type((1 << bits) - 1)
    return integers.astype(dtype).reshape(rows, blocks * count * len(shifts))

"""How files store the numbers of weight matrices, one format per file; and what a backend has made of them.

A module of this folder whose name does not begin with an underscore is a format, called like its file. It has `VALUES`
and `NBYTES`, of a block, and `dequantize(raw, out)`. There is no list to edit. Rows are whole blocks.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class WeightFormat:
    """Blocks of `values` neighbours of a row, `nbytes` each.

    dequantize: raw (rows, bytes of a row) uint8, C-contiguous, as files have it → out (rows, columns) float32. It is
    the definition of correct for every backend.
    """

    name: str
    values: int
    nbytes: int
    dequantize: Callable[[np.ndarray, np.ndarray], None]

    def size(self, count: int) -> int:
        """Bytes of so many values, a multiple of `values`."""
        return count // self.values * self.nbytes


class StoredMatrix(Protocol):
    """A matrix in a file, not yet read."""

    @property
    def format(self) -> WeightFormat: ...

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    def dequantize(self, out: np.ndarray) -> None:
        """All of it into `out` (out, in) float32, C-contiguous."""

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        """All rows in order, as many at a time as `nbytes` hold, at least one: which, and their bytes as the file has
        them, uint8 (rows, bytes of a row), good until the next."""


@cache
def _formats() -> dict[str, WeightFormat]:
    stems = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{stem}") for stem in stems]
    return {
        stem: WeightFormat(stem, module.VALUES, module.NBYTES, module.dequantize)
        for stem, module in zip(stems, modules, strict=True)
    }


def available() -> tuple[str, ...]:
    """The names of all formats."""
    return tuple(_formats())


def find(stored: str) -> WeightFormat | None:
    """The format that files call `stored`, such as "BF16"; None where there is none."""
    return _formats().get(stored.lower())


def get(name: str) -> WeightFormat:
    """The format called `name`. Raises KeyError where there is none."""
    return _formats()[name]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix on a device. data: the backend's own, which nobody else looks into; shape: (out, in)."""

    format: WeightFormat
    data: Any
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.format.size(math.prod(self.shape))


@dataclass(frozen=True, eq=False)
class Linear:
    """Matrices over the same inputs, their outputs one after the other, and a bias (out,) of all of them.

    Projections that are multiplied together, such as q, k and v, may be parts of different formats, or one part.
    """

    parts: tuple[Matrix, ...]
    bias: Any | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of all parts together."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Of the matrices."""
        return sum(part.nbytes for part in self.parts)

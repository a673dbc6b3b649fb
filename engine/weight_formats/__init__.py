"""Formats in which model files store weight matrices, one per module; and matrices on a device.

A module of this folder whose name does not begin with an underscore is a format of that name. It defines `VALUES` and
`NBYTES` of a block, and `unpack(raw)`, or `dequantize(raw, out)` if it has numbers. There is no list to edit. Rows
consist of whole blocks.

A format of codes and scales also defines `BITS` of a code, `GROUP`, the number of inputs that share a scale, `ZERO` or
`TABLE`, and `unpack(raw)`; see `Grouped`. A format of indices of points has a `GRID` instead; see `Lattice`. One of
digits has `RUNS` instead of bits and zero point; see `Trits`. A format that can be written defines `quantize(x)`, or
`IS_WRITTEN`, if the package gguf does that.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from polarlm.engine.weight_formats._grouped import Grouped, quantize_gguf
from polarlm.engine.weight_formats._lattice import Grid, Lattice
from polarlm.engine.weight_formats._trits import Trits

_SLAB = 1 << 18  # values dequantized at a time, so that temporaries stay in the cache


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """A format of blocks: `values` consecutive values of a row in `nbytes` bytes.

    dequantize: raw (rows, bytes of a row) uint8, C-contiguous, from the file → out (rows, columns) float32. It is the
    definition of correct for every backend.
    quantize: values (rows, columns) float32, C-contiguous → raw, rounded; None for formats that can only be read.
    unpack: raw as before → the same values as integers and scales, without rounding; None for f32, f16 and bf16, which
    lack what follows, too.
    bits: of a code. group: inputs that share a scale. zero: what is subtracted from codes. table: int8 (16,), what
    codes stand for; None where that is the code minus `zero`. grid: what indices of `bits` bits stand for, in formats
    that have no codes. runs: of bytes of digits, in formats that have those.
    """

    name: str
    values: int
    nbytes: int
    dequantize: Callable[[np.ndarray, np.ndarray], None]
    quantize: Callable[[np.ndarray], np.ndarray] | None = None
    unpack: Callable[[np.ndarray], Grouped | Lattice | Trits] | None = None
    bits: int = 0
    group: int = 0
    zero: int = 0
    table: np.ndarray | None = None
    grid: Grid | None = None
    runs: tuple[tuple[int, int], ...] | None = None

    def size(self, count: int) -> int:
        """Bytes of `count` values; count must be a multiple of `values`."""
        return count // self.values * self.nbytes


class StoredMatrix(Protocol):
    """A matrix in a file that has not been read yet."""

    @property
    def format(self) -> WeightFormat:
        """The file's, or the one that the matrix is converted to as it is read."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    def dequantize(self, out: np.ndarray) -> None:
        """Write the whole matrix to `out` (out, in) float32, C-contiguous."""

    def slabs(self, nbytes: int) -> Iterator[tuple[slice, np.ndarray]]:
        """All rows in order, as many at a time as fit into `nbytes`, at least one → their slice, and their bytes in
        `format`, uint8 (rows, bytes of a row), valid until the next."""


class RereadMatrix(StoredMatrix, Protocol):
    """A `StoredMatrix` that is read whenever it is needed."""

    def expect(self) -> None:
        """Let the system read the file's bytes into memory now, since they will be needed soon."""


@cache
def _formats() -> dict[str, WeightFormat]:
    stems = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    modules = [importlib.import_module(f"{__name__}.{stem}") for stem in stems]
    return {stem: _format(stem, module) for stem, module in zip(stems, modules, strict=True)}


def _format(name: str, module: Any) -> WeightFormat:
    optional = {
        key: getattr(module, key.upper())
        for key in ("bits", "group", "zero", "table", "grid", "runs")
        if hasattr(module, key.upper())
    }
    unpack = getattr(module, "unpack", None)
    dequantize = partial(_dequantize, unpack) if unpack else module.dequantize
    written = partial(quantize_gguf, name.upper()) if hasattr(module, "IS_WRITTEN") else None
    quantize = getattr(module, "quantize", written)
    return WeightFormat(name, module.VALUES, module.NBYTES, dequantize, quantize, unpack, **optional)


def _dequantize(unpack: Callable[[np.ndarray], Grouped | Lattice | Trits], raw: np.ndarray, out: np.ndarray) -> None:
    """`WeightFormat.dequantize`. Needs a few MB besides `out`."""
    step = max(1, _SLAB // max(1, out.shape[1]))
    for first in range(0, len(raw), step):
        out[first : first + step] = unpack(raw[first : first + step]).dequantize()


def available() -> tuple[str, ...]:
    return tuple(_formats())


def writable() -> tuple[str, ...]:
    """Names of the formats that values can be converted to."""
    return tuple(name for name, format in _formats().items() if format.quantize)


def find(stored: str) -> WeightFormat | None:
    """The format that files name `stored`, such as "BF16"; None if there is none."""
    return _formats().get(stored.lower())


def get(name: str) -> WeightFormat:
    """The format `name`. Raises KeyError if there is none."""
    return _formats()[name]


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix on a device. data: opaque outside the backend. shape: (out, in)."""

    format: WeightFormat
    data: Any
    shape: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer: matrices with the same inputs, stacked, and one bias (out,) for all, or None.

    Fused projections, such as q, k and v, may be parts in different formats, or a single part. deltas: what adapters
    add to the product; None if no adapter changes it. is_exact: whether its inputs have 16 bits, though others may have
    fewer (`EngineConfig.input_bits`): a small error of a router's product lets other experts compute.
    """

    parts: tuple[Matrix, ...]
    bias: Any | None = None
    deltas: Deltas | None = None
    is_exact: bool = False
    shape: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))


@dataclass(frozen=True, eq=False)
class ExpertLinear:
    """The same linear layer of each of `count` experts.

    parts: as in `Linear`, each with its rows of all experts, the first expert's first: (count · out_i, in).
    bias: (count, out), or None. on_host: whether all of it is in the computer's memory, for the CPU of a GPU's host.
    deltas: what adapters add: those of adapter a and expert e are number a · count + e; None if no adapter changes it.
    """

    count: int
    parts: tuple[Matrix, ...]
    bias: Any | None = None
    on_host: bool = False
    deltas: Deltas | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of one expert."""
        return sum(part.shape[0] for part in self.parts) // self.count, self.parts[0].shape[1]


@dataclass(frozen=True, eq=False)
class Deltas:
    """What each of `a.count` adapters (LoRA) adds to the product of a `Linear` with x: b · (a · x).

    a: (rank, in) of each; b: (out, rank) of each. All have the largest adapter's rank: the rest is zeros.
    """

    a: ExpertLinear
    b: ExpertLinear

"""Tiles: the bytes of one quantized block of one KV head as attention reads them, for each codec that has kernels.

A module here has the name of the codec's module in `engine.codecs`. It defines `keys(codec, block_size, head_dim)` and
`values(codec, block_size, head_dim)`, which return the tiles of that codec, or None for sizes or options without a
kernel; a codec that stores one side only may leave out the other. A codec of pairs with `points` needs no module: its
tiles are those of `_tables`. A layer without tiles of both sides is NumPy's.

All vectors are in the stored space: rotated, scaled, without the block mean. N is the block size, D the head dim.
Addresses are multiples of 64 bytes. Vectors of D float32 have room for D rounded up to a multiple of 16.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Protocol, runtime_checkable

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments
from polarlm.engine.codecs import Codec
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import Value

MOST_QUERIES = 4  # that read a block together


class Tiles(Protocol):
    """The tiles of keys or of values."""

    @property
    def name(self) -> str:
        """Unique: of the layout, with N and D. It is part of the names of kernels."""

    @property
    def nbytes(self) -> int:
        """Bytes of a tile: a multiple of 64."""

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """The codec's fields (..., *shape) → tiles (..., nbytes) uint8."""

    def unpack(self, tiles: np.ndarray) -> dict[str, np.ndarray]:
        """The exact inverse of `pack`."""

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        """The vectors of a tile, exact but for float32 → out (N, D) float32. scratch: memory for 4·N·D bytes.

        For prompts, which read earlier turns so.
        """


class KeyTiles(Tiles, Protocol):
    """Tiles of keys."""

    @property
    def query_bytes(self) -> int:
        """Bytes of a prepared query: a multiple of 64."""

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        """The query at q, D float32 and then zeros, times the scale of scores → its prepared form at out."""

    def emit_scores(
        self, e: Emitter, block: Value, after: Value, queries: Sequence[Value], out: Sequence[Value]
    ) -> None:
        """The scores of 1 to MOST_QUERIES prepared queries with each key of a tile → N float32 at each of out.

        after: a tile that is needed soon. It is prefetched little by little, while this one is read: a core waits if it
        has to prefetch many lines at once.
        """


class ValueTiles(Tiles, Protocol):
    """Tiles of values."""

    def emit_values(
        self, e: Emitter, block: Value, after: Value, weights: Sequence[Value], sums: Sequence[Value]
    ) -> None:
        """Add Σ weightₜ · valueₜ to the D float32 at each of sums, for 1 to MOST_QUERIES rows of weights.

        after: as for `KeyTiles.emit_scores`. weights: N float32 ≥ 0 each, which may be overwritten. What lies beyond
        the D sums is never read.
        """


@runtime_checkable
class EncodedTiles(Protocol):
    """Tiles that a kernel can encode. Others are encoded in NumPy, and packed."""

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | None:
        """The kernel that encodes keys (side 0) or values (1) of a format into tiles; None if there is none."""


def keys(codec: Codec, block_size: int, head_dim: int) -> KeyTiles | None:
    """The tiles of keys; None if no kernel reads them."""
    make = getattr(_module(codecs.file_of(codec)), "keys", None)
    found: KeyTiles | None = None if make is None else make(codec, block_size, head_dim)
    return found


def values(codec: Codec, block_size: int, head_dim: int) -> ValueTiles | None:
    """The tiles of values; None if no kernel reads them."""
    make = getattr(_module(codecs.file_of(codec)), "values", None)
    found: ValueTiles | None = None if make is None else make(codec, block_size, head_dim)
    return found


@cache
def _module(name: str) -> ModuleType:
    """The module for a codec, or that of all tables."""
    own = {module.name for module in pkgutil.iter_modules(__path__)}
    return importlib.import_module(f"{__name__}.{name if name in own else '_tables'}")

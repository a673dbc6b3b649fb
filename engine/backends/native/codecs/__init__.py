"""Code tiles: the bytes of one quantized block of one KV head as attention reads them, for codecs with kernels.

A module here is named like the codec's module in `engine.codecs`. It defines `keys(codec, block_size, head_dim)` and
`values(codec, block_size, head_dim)`, which return the tiles of that codec, or None for sizes or options without a
kernel; a codec that stores one side only may leave out the other. A codec of pairs with `points` needs no module: it
gets the tiles of `parts.tables`. A layer without tiles of both sides is computed by NumPy.

All vectors are in the stored space: rotated, scaled, without the block mean. N is the block size, D the head dim.
Addresses are multiples of 64 bytes. Vectors of D float32 are padded to a multiple of 16.
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

MOST_QUERIES = 4  # most queries that read a block together


class Tiles(Protocol):
    """The tiles of keys or of values."""

    @property
    def name(self) -> str:
        """A unique name of the layout, N and D. It is part of kernel names."""

    @property
    def nbytes(self) -> int:
        """Bytes of a tile: a multiple of 64."""

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """The codec's fields (..., *shape) → tiles (..., nbytes) uint8."""

    def unpack(self, tiles: np.ndarray) -> dict[str, np.ndarray]:
        """The exact inverse of `pack`."""

    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        """Decode a tile's vectors, rounded to float32 only → out (N, D) float32. scratch: 4·N·D bytes.

        Prompts read the blocks of earlier turns this way.
        """


class KeyTiles(Tiles, Protocol):
    """Tiles of keys."""

    @property
    def query_bytes(self) -> int:
        """Bytes of a prepared query: a multiple of 64."""

    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        """Prepare the query at q, D float32 padded with zeros and already scaled → its prepared form at out."""

    def emit_scores(
        self, e: Emitter, block: Value, after: Value, queries: Sequence[Value], out: Sequence[Value]
    ) -> None:
        """The scores of 1 to MOST_QUERIES prepared queries with each key of a tile → N float32 at each of out.

        after: a tile that is needed soon. It is prefetched a few lines at a time while this one is read, since many
        prefetches at once stall the core.
        """


class ValueTiles(Tiles, Protocol):
    """Tiles of values."""

    def emit_values(
        self, e: Emitter, block: Value, after: Value, weights: Sequence[Value], sums: Sequence[Value]
    ) -> None:
        """Add Σ weightₜ · valueₜ to the D float32 at each of sums, for 1 to MOST_QUERIES rows of weights.

        after: as for `KeyTiles.emit_scores`. weights: N float32 ≥ 0 each, which may be overwritten. The padding after
        the D sums is never read.
        """


@runtime_checkable
class EncodedTiles(Protocol):
    """Tiles that a kernel can encode. NumPy encodes others and packs them."""

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
    """The module of this name, or `parts.tables` if there is none."""
    own = {module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}
    return importlib.import_module(f"{__name__}.{name if name in own else 'parts.tables'}")

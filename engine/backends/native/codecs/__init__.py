"""Code tiles: the bytes of one quantized block of one KV head as attention reads them, for codecs with kernels.

A module here is named like the codec's module in `engine.codecs`. It defines `keys(codec, block_size, head_dim)` and
`values(codec, block_size, head_dim)`, which return the tiles of the codec for a block size that is a multiple of 16, or
None for options without a kernel; a codec that stores one side only may leave out the other. A `PairCodec` needs
no module: it gets the tiles of `parts.tables`. A layer without tiles of both sides is computed by NumPy.

All vectors are in the stored space: rotated, scaled, without the block mean. N is the block size, D the head dim.
Addresses are multiples of 64 bytes. Vectors of D float32 are padded to a multiple of 16.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native.kernels.attention.unit import supports
from polarlm.engine.backends.native.kernels.encode.unit import EncodeArguments, side_of
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.codecs.schema.sections import Section, Sections, arrange, numbered
from polarlm.engine.codecs.schema.streams import Stream, pack, unpack
from polarlm.engine.jit.lang import Emitter, Kernel, Value, Values

MOST_QUERIES = 4  # most queries that read a block together


class Tiles(ABC):
    """The tiles of keys or of values: their sections, padded with zeros to a multiple of 64 bytes.

    name: unique for a layout, N and D; it is part of kernel names. nbytes: of a tile.
    """

    def __init__(self, name: str, codec: Codec, block_size: int, head_dim: int, *sections: Section) -> None:
        self.name, self._schema = f"{name}_{block_size}_{head_dim}", codec.schema(block_size, head_dim)
        self._tokens, self._head_dim = block_size, head_dim
        self._sections = Sections(sections, alignment=1, line=64)
        self.nbytes = self._sections.nbytes

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """The codec's fields (..., *shape) → tiles (..., nbytes) uint8."""
        return self._sections.pack(self.from_streams(unpack(self._schema, fields)))

    def unpack(self, tiles: np.ndarray) -> dict[str, np.ndarray]:
        """The exact inverse of `pack`."""
        return pack(self._schema, self.to_streams(self._sections.unpack(tiles)))

    def from_streams(self, streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The codec's streams → the sections' streams."""
        return streams

    def to_streams(self, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inverse of `from_streams`."""
        return stored

    def encoder(self, format: CacheFormat, side: int) -> Kernel[EncodeArguments] | str:
        """The kernel that encodes keys (side 0) or values (1) of a format into tiles, or the reason why NumPy encodes
        them and packs them."""
        return f"no kernel encodes {side_of(format, side)[0].name}"

    @abstractmethod
    def emit_decode(self, e: Emitter, block: Value, out: Value, scratch: Value) -> None:
        """Decode a tile's vectors, rounded to float32 only → out (N, D) float32. scratch: 4·N·D bytes.

        Prompts read the blocks of earlier turns this way.
        """


class KeyTiles(Tiles):
    query_bytes: int  # bytes of a prepared query: a multiple of 64

    @property
    def byte_order(self) -> ByteOrder | None:
        """How steps read keys that are values as bytes; None if they decode them."""
        return None

    def emit_floats(self, e: Emitter, block: Value, out: Value, scratch: Value) -> tuple[int, int]:
        """`emit_decode` in the order that takes least: returns the bytes from token to token, and from channel to
        channel."""
        self.emit_decode(e, block, out, scratch)
        return 4 * self._head_dim, 4

    @abstractmethod
    def emit_query(self, e: Emitter, q: Value, out: Value) -> None:
        """Prepare the query at q, D float32 padded with zeros and already scaled → its prepared form at out."""

    @abstractmethod
    def emit_scores(self, e: Emitter, block: Value, next_tile: Value, queries: Values, out: Values) -> None:
        """The scores of 1 to MOST_QUERIES prepared queries with each key of a tile → N float32 at each of out.

        next_tile: a tile that is needed soon. It is prefetched a few lines at a time while this one is read, since many
        prefetches at once stall the core.
        """


class ValueTiles(Tiles):
    @abstractmethod
    def emit_values(self, e: Emitter, block: Value, next_tile: Value, weights: Values, sums: Values) -> None:
        """Add Σ weightₜ · valueₜ to the D float32 at each of sums, for 1 to MOST_QUERIES rows of weights.

        next_tile: as for `KeyTiles.emit_scores`. weights: N float32 ≥ 0 each, which may be overwritten. The padding
        after the D sums is never read.
        """


class ByteOrder(NamedTuple):
    """Keys that are values, as bytes: D / 4 words of 4 channels, which are every `width`-th, 1 or 2, in turn.

    emit: emit(e, block, next_tile, queries, values) writes the bytes of a tile as values (D / 4, N / 4, 4 channels,
    4 tokens) int8. It yields, for 16 tokens after the other, their norms and, for each prepared query, the sums
    int32 (16,) of their products with it.
    scale: of a byte of a value. factor_at: offset in a prepared query of a float32, which its sums are multiplied by,
    as by norms.
    """

    emit: Callable[[Emitter, Value, Value, Values, Value], Iterator[tuple[Value, list[Value]]]]
    width: int
    scale: float
    factor_at: int


def codes_section(
    name: str, stream: Stream, planes: Planes | None, cuts: Sequence[tuple[int, ...]], order: Sequence[int]
) -> Section:
    """A section of codes in the order of `arrange`: vectors of 64 in bit planes, or bytes if `planes` is None."""
    width = 64 if planes else math.prod(math.prod(pieces) for pieces in cuts)
    return Section(name, stream, arrange(numbered(*stream.shape), cuts, order).reshape(1, -1, width), planes)


def tiles(format: CacheFormat) -> tuple[KeyTiles, ValueTiles] | tuple[KeyTiles] | str:
    """The tiles of a layer's keys and, if they are stored, values, or the reason why no kernel attends over them."""
    n, dim = format.block_size, format.head_dim
    if n % 16:
        return f"kernels read blocks of a multiple of 16 tokens, not of {n}"
    if dim % 8:
        return f"kernels read heads of a multiple of 8 channels, not of {dim}"
    if not supports(dim):
        return f"kernels have no room for heads of {dim} channels"
    k = keys(format.codec_k, n, dim)
    if format.codec_v is None:
        return f"no kernel reads {format.codec_k.name}" if k is None else (k,)
    v = values(format.codec_v, n, dim)
    if k is None or v is None:
        missing = [codec.name for codec, side in ((format.codec_k, k), (format.codec_v, v)) if side is None]
        return f"no kernel reads {' and '.join(dict.fromkeys(missing))}"
    return k, v


def keys(codec: Codec, block_size: int, head_dim: int) -> KeyTiles | None:
    """The tiles of keys; None if no kernel reads them."""
    return _make_tiles("keys", codec, block_size, head_dim)


def values(codec: Codec, block_size: int, head_dim: int) -> ValueTiles | None:
    """The tiles of values; None if no kernel reads them."""
    return _make_tiles("values", codec, block_size, head_dim)


def _make_tiles(side: str, codec: Codec, block_size: int, head_dim: int) -> Any:
    make = getattr(_module(codecs.file_of(codec)), side, None)
    return None if make is None or block_size % 16 else make(codec, block_size, head_dim)


@cache
def _module(name: str) -> ModuleType:
    modules = {module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}
    return importlib.import_module(f"{__name__}.{name if name in modules else 'parts.tables'}")

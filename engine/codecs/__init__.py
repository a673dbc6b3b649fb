"""KV codecs: how the K or V vectors of one block become bytes, and back. One codec per file.

Each module of this folder is a codec; what several share is in `parts/` and `schema/`. It defines `NAMES`, the cache
types that it makes, and `create(name, options)`, which makes one of them, or raises ValueError for an unknown
option. There is no list to edit.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Protocol

import numpy as np

from polarlm.engine.codecs.schema.arrays import NotFinite as NotFinite
from polarlm.engine.codecs.schema.arrays import destination, require_finite, slabs
from polarlm.engine.codecs.schema.streams import FieldSpec as FieldSpec
from polarlm.engine.codecs.schema.streams import Schema, leading_shape, unpack

FULL = "f16"
"""The cache type that does not quantize: half precision."""

KEYS_AND_VALUES = frozenset({"k", "v"})


class Rounding(Protocol):
    """The table of a codec, for an encoder that chooses codes by its own metric (`engine.quantization.encode`).

    A code stands for a point of the table; the codec decodes assembled fields to norm · point.
    """

    @property
    def width(self) -> int:
        """Values per code: 2 (channels 2j, 2j+1) or 1."""

    def assemble(self, codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        """codes (..., N, D / width), norms (..., N) float32 → the codec's fields."""

    def nearest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """x (R, width) float32 of unit variance → codes (R,) uint8 or uint16, their points (R, width) float32."""


class Codec(ABC):
    """The contract of a codec. N tokens in a block, D values in a vector; `...` stands for any leading dimensions.

    A codec maps vectors to streams of codes and numbers, and back; how fields store them follows from the schema.
    Codecs are values: two of the same name are equal and have the same hash. name: the cache type that `get` makes this
    codec from, with its options. serves: the sides that it can store: keys ("k"), values ("v"), or both. takes_metric:
    whether an engine chooses codes by what their errors cost, if there is a table.
    """

    name: str
    serves = KEYS_AND_VALUES
    takes_metric = True

    @abstractmethod
    def schema(self, block_size: int, head_dim: int) -> Schema:
        """The streams of one block."""

    @abstractmethod
    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        """N and D of fields (..., *shape)."""

    @abstractmethod
    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """x (M, N, D) float32, finite, rotated and C-contiguous → streams (M, *shape)."""

    @abstractmethod
    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Streams (M, *shape) → their values in `out` (M, N, D) float32, still rotated; all arrays are C-contiguous."""

    @property
    def rounding(self) -> Rounding | None:
        """The codec's table of values or pairs; None if it has no table."""
        return None

    @property
    def multiples(self) -> tuple[int, int]:
        """What a head dim and a block size must be multiples of."""
        return 1, 1

    def check(self, head_dim: int, block_size: int) -> None:
        """Raises ValueError, with a sentence for the user, for a head dim or block size that it does not support."""
        values, tokens = self.multiples
        if head_dim % values:
            raise ValueError(
                f"Cache type {self.name} needs a head dimension that is a multiple of {values}, "
                f"and this model's is {head_dim}: choose another cache type, such as f16."
            )
        if block_size % tokens:
            raise ValueError(
                f"Cache type {self.name} groups {tokens} tokens, and a block has {block_size}: "
                f"choose a block size that is a multiple of {tokens}."
            )

    def rotation(self, head_dim: int) -> np.ndarray | None:
        """An orthogonal W (D, D) float32, read-only: a vector x is encoded as x @ W. None without rotation."""
        return None

    def fields(self, block_size: int, head_dim: int) -> dict[str, FieldSpec]:
        """The arrays of one encoded block, one per stream, in the order in which they are stored."""
        return {name: stream.field for name, stream in self.schema(block_size, head_dim).items()}

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """x (..., N, D) float32, rotated → every field, (..., *shape). Raises NotFinite on NaN or infinity."""
        x = np.ascontiguousarray(require_finite(x, self.name))
        *lead, block_size, head_dim = x.shape
        self.check(head_dim, block_size)
        schema, blocks = self.schema(block_size, head_dim), x.reshape(-1, block_size, head_dim)
        fields = {name: np.empty((len(blocks), *s.field.shape), s.field.dtype) for name, s in schema.items()}
        for part in slabs(len(blocks), block_size * head_dim):
            for name, stream in self.quantize(blocks[part]).items():
                fields[name][part] = schema[name].pack(stream)
        return {name: field.reshape(*lead, *field.shape[1:]) for name, field in fields.items()}

    def decode(self, fields: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Fields of `encode` → (..., N, D) float32, C-contiguous, still rotated; in `out` if it is given."""
        block_size, head_dim = self.sizes(fields)
        schema = _schema(self, block_size, head_dim)
        out = destination(out, (*leading_shape(schema, fields), block_size, head_dim))
        blocks = out.reshape(-1, block_size, head_dim)
        flat = {
            name: np.ascontiguousarray(fields[name]).reshape(len(blocks), *stream.field.shape)
            for name, stream in schema.items()
        }
        streams = unpack(schema, flat)  # for all blocks at once: it makes many small NumPy calls with a fixed cost
        for part in slabs(len(blocks), block_size * head_dim):
            self.dequantize({name: stream[part] for name, stream in streams.items()}, blocks[part])
        return out


@cache
def _schema(codec: Codec, block_size: int, head_dim: int) -> Schema:
    """The codec's schema, cached: making one takes nearly as long as decoding a block."""
    return codec.schema(block_size, head_dim)


@cache
def _modules() -> dict[str, ModuleType]:
    """Cache type → the module that creates its codec, in the order of file names."""
    stems = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg)
    modules = [importlib.import_module(f"{__name__}.{stem}") for stem in stems]
    return {name: module for module in modules for name in module.NAMES}


@contextmanager
def more_types(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Know the types of more modules for a while: types of a measurement, or of a file outside of the package."""
    types = {name: module for module in modules for name in module.NAMES}
    _modules().update(types)
    try:
        yield
    finally:
        for name in types:
            del _modules()[name]


def available() -> tuple[str, ...]:
    """All cache types that `get` knows, without options."""
    return tuple(_modules())


def is_quantized(codec: Codec) -> bool:
    return codec.name != FULL


def get(name: str) -> Codec:
    """The codec of cache type `name`, such as "polarquant" or, with an option, "polarquant+dense". Raises ValueError,
    with a sentence for the user, on an unknown name or option."""
    base, *options = name.split("+")
    module = _modules().get(base)
    if module is None:
        raise ValueError(f"There is no cache type {base!r}: choose one of {', '.join(available())}.")
    return module.create(base, tuple(options))


def file_of(codec: Codec) -> str:
    """The name of the codec's file without `.py`; its record and its CUDA source have the same name."""
    return _modules()[codec.name.split("+")[0]].__name__.rpartition(".")[2]


def bits_per_value(codec: Codec, block_size: int, head_dim: int) -> float:
    """Bits of an encoded block divided by its number of values."""
    stored = sum(field.nbytes for field in codec.fields(block_size, head_dim).values())
    return 8 * stored / (block_size * head_dim)

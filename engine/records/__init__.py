"""Records: the bytes of the keys, or of the values, of one quantized block of one KV head in the memory of a GPU.

A record has the codec's sections (`Record`), then the block mean if keys are centred, and is padded with zeros to a
multiple of 128 bytes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.pair_codec import PairCodec
from polarlm.engine.codecs.schema.sections import Section, Sections, numbered
from polarlm.engine.codecs.schema.streams import Schema, numbers, pack, unpack
from polarlm.engine.records import pair_table
from polarlm.engine.records.fragments import ALIGNMENT, Geometry, Record

VERSION = 2  # version of the byte layout, since session files contain records

_LINE = 128  # bytes; records are a multiple of it
_LARGEST_HEAD_DIM, _LARGEST_LATENT = 256, 576
_MEAN_TYPES = {8: np.int8, 16: np.float16}

# Bytes of a row of the tables in shared memory: 128 for the keys' tables, 128 for the values'.
ROW_BYTES = 256


def struct_text(name: str, constants: Mapping[str, int]) -> str:
    """The text of a C++ struct of constants."""
    lines = "".join(f"    static constexpr int {constant} = {value};\n" for constant, value in constants.items())
    return f"struct {name} {{\n{lines}}};\n"


@dataclass(frozen=True, eq=False)
class Layout:
    """The byte layout of records of a codec.

    mean_bits: bits per channel of the block mean, 8 or 16; 0 if vectors are not centred.
    """

    schema: Schema
    record: Record
    mean_bits: int = 0

    @property
    def is_quantized(self) -> bool:
        return self.record.codec != codecs.FULL

    @property
    def is_latent(self) -> bool:
        """Whether a vector has more channels than a key or a value may have."""
        return self.record.geometry.head_dim > _LARGEST_HEAD_DIM

    @property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of 128."""
        return self._sections.nbytes

    @property
    def full(self) -> Layout:
        """The layout of full-precision records of the same side, N and D."""
        geometry = self.record.geometry
        shape = geometry.values, geometry.block_size, geometry.head_dim
        return layout(codecs.get(codecs.FULL), *shape, is_latent=self.is_latent)

    def text(self, struct_name: str) -> str:
        """The text of a C++ struct of constants, the argument of the codec's struct template."""
        mean_at, *after_mean = self._sections.offsets[len(self.record.sections) :]
        constants = {
            **self.record.geometry.constants,
            "NBYTES": self.nbytes,
            "ROWS": self.record.rows,
            "MEAN_BITS": self.mean_bits,
            "MEAN": mean_at,
            "MEAN_SCALE": after_mean[0] if after_mean else mean_at,
            **self.record.constants,
        }
        return struct_text(struct_name, constants)

    def pack(self, fields: Mapping[str, np.ndarray], mean_fields: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """Fields of `Codec.encode` (..., *shape), and of `conditioning.centre` → records (..., nbytes) uint8."""
        return self._sections.pack({**self.record.from_streams(unpack(self.schema, fields)), **(mean_fields or {})})

    def unpack(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The inverse of `pack`: fields, and the fields of the mean (empty if there is no mean)."""
        stored = self._sections.unpack(records)
        means = {section.name: stored.pop(section.name) for section in self._means}
        return pack(self.schema, self.record.to_streams(stored)), means

    @cached_property
    def _sections(self) -> Sections:
        return Sections((*self.record.sections, *self._means), ALIGNMENT, _LINE)

    @cached_property
    def _means(self) -> tuple[Section, ...]:
        if not self.mean_bits:
            return ()
        mean = numbers(_MEAN_TYPES[self.mean_bits], self.record.geometry.head_dim)
        order = self.record.geometry.channels(numbered(*mean.shape))
        sections = Section("mean", mean, order.reshape(1, 1, -1)), Section.numbers("mean_scale", numbers(np.float16))
        return sections if self.mean_bits == 8 else sections[:1]


Layouts = tuple[Layout, Layout]  # keys, values


def record_of(codec: Codec, geometry: Geometry) -> Record | None:
    """The record of a codec, from the module here with the name of the codec's module in `engine.codecs`, or else a
    `PairRecord`.

    None if no kernel reads the codec.
    """
    name = codecs.file_of(codec)
    if name not in _names():
        return pair_table.record(codec, geometry) if isinstance(codec, PairCodec) else None
    record: Record | None = importlib.import_module(f"{__name__}.{name}").record(codec, geometry)
    return record


@cache
def _names() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(__path__))


@cache
def layout(
    codec: Codec, values: bool, block_size: int, head_dim: int, mean_bits: int = 0, *, is_latent: bool = False
) -> Layout:
    """The layout of keys or of values in blocks of `block_size` tokens; the same object for the same arguments.

    is_latent: whether these keys are values, too, which may have more channels.

    Raises ValueError, with a sentence for the user, if no kernel reads this codec or this shape.
    """
    most = _LARGEST_LATENT if is_latent else _LARGEST_HEAD_DIM
    if head_dim % 8 or head_dim > most:
        raise ValueError(
            f"On a GPU the head dimension must be a multiple of 8 and at most {most}, "
            f"but this model's is {head_dim}: run it on the CPU."
        )
    part = 64 if head_dim <= 128 else 32
    if block_size % 16 or block_size % min(block_size, part):
        raise ValueError(
            f"On a GPU a block has 16, 32 or a multiple of {part} tokens, not {block_size}: choose another block size."
        )
    record = record_of(codec, Geometry(values, block_size, head_dim))
    if record is None:
        raise ValueError(
            f"Cache type {codec.name} has no GPU kernel for head dimension {head_dim}: "
            "choose another cache type, such as ring4."
        )
    return Layout(codec.schema(block_size, head_dim), record, mean_bits)


def table_bytes(keys: Layout, values: Layout) -> int:
    """Bytes of shared memory for the tables of both sides."""
    return ROW_BYTES * max(keys.record.rows, values.record.rows)

"""Records: the bytes of one quantized block of one KV head, its keys or its values, in the memory of a GPU.

A record consists of the codec's sections (`Record`), the block's mean if keys are centred, and zeros up to a multiple
of 128 bytes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs import Codec
from polarlm.engine.records.fragments import Geometry, Record, aligned, as_bytes, from_bytes

VERSION = 2  # of the byte layout of records, which session files contain

_LINE = 128  # bytes; records are a multiple of it
_LARGEST_HEAD_DIM = 256
_HALF = np.dtype(np.float16)
_MEAN_TYPES: dict[int, np.dtype] = {8: np.dtype(np.int8), 16: _HALF}

# A row of the tables in shared memory: 128 bytes for the keys' tables, 128 for the values'.
ROW_BYTES = 256


@dataclass(frozen=True, eq=False)
class Layout:
    """The bytes of a record. mean_bits: bits per channel of the block mean, 8 or 16; 0 if vectors are not centred."""

    record: Record
    mean_bits: int = 0

    @property
    def codec(self) -> str:
        """Name of `cuda/codecs/<codec>.cuh` and of the struct template in it."""
        return self.record.codec

    @property
    def is_quantized(self) -> bool:
        return self.codec != codecs.FULL

    @property
    def tables(self) -> np.ndarray:
        """The tables that kernels read beside the records, (bytes,) uint8, a multiple of 16."""
        return self.record.tables

    @property
    def nbytes(self) -> int:
        """Bytes of a record, a multiple of 128."""
        end = self._scale_at + (16 if self.mean_bits == 8 else 0)
        return -(-end // _LINE) * _LINE

    @property
    def full(self) -> Layout:
        """The layout of full-precision records of the same side, N and D."""
        geometry = self.record.geometry
        return layout(codecs.get(codecs.FULL), geometry.values, geometry.block_size, geometry.head_dim)

    def text(self, struct_name: str) -> str:
        """A C++ struct of constants, the argument of the codec's struct template."""
        constants = {
            **self.record.geometry.constants,
            "NBYTES": self.nbytes,
            "ROWS": self.record.rows,
            "MEAN_BITS": self.mean_bits,
            "MEAN": self.record.nbytes,
            "MEAN_SCALE": self._scale_at,
            **self.record.constants,
        }
        lines = "".join(f"    static constexpr int {name} = {value};\n" for name, value in constants.items())
        return f"struct {struct_name} {{\n{lines}}};\n"

    def pack(self, fields: Mapping[str, np.ndarray], mean_fields: Mapping[str, np.ndarray] | None = None) -> np.ndarray:
        """Fields of `Codec.encode` (..., *shape) and of `conditioning.centre` → records (..., nbytes) uint8."""
        sections = [self.record.pack(fields)]
        if self.mean_bits:
            assert mean_fields is not None, "centred keys have a mean"
            sections.append(as_bytes(self.record.geometry.channels(mean_fields["mean"])))
            if self.mean_bits == 8:
                sections.append(as_bytes(mean_fields["mean_scale"][..., None]))
        lead = sections[0].shape[:-1]
        rest = self.nbytes - sum(section.shape[-1] for section in sections)
        return np.concatenate([*sections, np.zeros((*lead, rest), np.uint8)], -1)

    def unpack(self, records: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The inverse of `pack`: fields, and mean fields (empty if there is no mean)."""
        fields, geometry, mean_fields = self.record.unpack(records[..., : self.record.nbytes]), self.record.geometry, {}
        if self.mean_bits:
            mean = from_bytes(records[..., self.record.nbytes :], _MEAN_TYPES[self.mean_bits], geometry.padded)
            mean_fields["mean"] = geometry.from_channels(mean)
        if self.mean_bits == 8:
            mean_fields["mean_scale"] = from_bytes(records[..., self._scale_at :], _HALF, 1)[..., 0]
        return fields, mean_fields

    @property
    def _scale_at(self) -> int:
        mean_type = _MEAN_TYPES.get(self.mean_bits)
        return self.record.nbytes + (aligned(self.record.geometry.padded * mean_type.itemsize) if mean_type else 0)


def record_of(codec: Codec, geometry: Geometry) -> Record | None:
    """The record of a codec, from the module here that has the name of the codec's module in `engine.codecs`.

    None if no kernel reads the codec.
    """
    name = codecs.file_of(codec)
    if name not in _names():
        return None
    return importlib.import_module(f"{__name__}.{name}").record(codec, geometry)


@cache
def _names() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(__path__))


@cache
def layout(codec: Codec, values: bool, block_size: int, head_dim: int, mean_bits: int = 0) -> Layout:
    """The layout of keys or of values in blocks of `block_size` tokens; the same object for the same arguments.

    Raises ValueError, with a sentence for the user, where no kernel reads this codec or serves this shape.
    """
    if head_dim % 8 or head_dim > _LARGEST_HEAD_DIM:
        raise ValueError(
            f"On a GPU the head dimension must be a multiple of 8 and at most {_LARGEST_HEAD_DIM}, "
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
    return Layout(record, mean_bits)


def table_bytes(keys: Layout, values: Layout) -> int:
    """Bytes of shared memory for the tables of both sides."""
    return ROW_BYTES * max(keys.record.rows, values.record.rows)

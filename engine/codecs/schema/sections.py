"""Sections: the bytes of a block as a device reads them, in tiles of a CPU and records of a GPU.

A section is data: an order of a stream's codes, and the `Planes` that pack vectors of them. An order is an array of
code numbers, counted from 1; 0 stands for padding, stored as zero. `arrange` makes orders. Packing and its inverse
follow from them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.codecs.schema.streams import Stream


def numbered(*shape: int) -> np.ndarray:
    """The code numbers of a stream: 1, 2, … in this shape, int32."""
    return np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)


def arrange(x: np.ndarray, cuts: Sequence[tuple[int, ...]], order: Sequence[int]) -> np.ndarray:
    """x with each axis i reshaped to the axes cuts[i], and all these axes transposed to `order`. An axis that is
    shorter than the product of its cuts is padded with zeros."""
    ends = [(0, math.prod(pieces) - size) for pieces, size in zip(cuts, x.shape, strict=True)]
    return np.pad(x, ends).reshape(*itertools.chain(*cuts)).transpose(order)


class PackedStreams(Protocol):
    """The bytes of one or more streams of a block."""

    @property
    def nbytes(self) -> int:
        """The number of bytes."""

    def pack(self, streams: Mapping[str, np.ndarray]) -> np.ndarray:
        """Streams (..., *shape) → (..., nbytes) uint8."""

    def unpack(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of `pack`: the streams that are stored here."""


@dataclass(frozen=True, eq=False)
class Section:
    """The bytes of the stream `name`. order (P, V, W): P parts of V vectors of codes, which `planes` packs; without
    planes each code or number is stored unpacked."""

    name: str
    stream: Stream
    order: np.ndarray
    planes: Planes | None = None

    @classmethod
    def numbers(
        cls, name: str, stream: Stream, cuts: Sequence[tuple[int, ...]] = (), order: Sequence[int] = ()
    ) -> Section:
        """A section of numbers, in the order of `arrange`, or in their own if `order` is empty."""
        places = numbered(*stream.shape)
        return cls(name, stream, (arrange(places, cuts, order) if order else places).reshape(1, 1, -1))

    @property
    def vectors(self) -> int:
        count = self.order.shape[1]
        return count if self.planes is None else self.planes.stored_count(count)

    @property
    def width(self) -> int:
        return self.order.shape[2] * (self.stream.dtype.itemsize if self.planes is None else 1)

    @property
    def nbytes(self) -> int:
        return self.order.shape[0] * self.vectors * self.width

    @cached_property
    def places(self) -> np.ndarray:
        """The index of each code in the flattened order, in the stream's shape, intp."""
        places, order = np.zeros(self.stream.size + 1, np.intp), self.order.reshape(-1)
        places[order] = np.arange(order.size)
        return places[1:].reshape(self.stream.shape)

    def pack(self, streams: Mapping[str, np.ndarray]) -> np.ndarray:
        vectors = self.pack_vectors(streams)
        return vectors.reshape(*vectors.shape[:-3], self.nbytes)

    def unpack(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        return self.unpack_vectors(raw.reshape(*raw.shape[:-1], len(self.order), self.vectors, self.width))

    def pack_vectors(self, streams: Mapping[str, np.ndarray]) -> np.ndarray:
        """Streams (..., *shape) → (..., P, vectors, width) uint8."""
        x = streams[self.name]
        flat = x.reshape(*x.shape[: x.ndim - len(self.stream.shape)], self.stream.size)
        values = np.take(flat, self.order - 1, axis=-1)
        if not self.order.all():
            values[..., self.order == 0] = 0
        return values.view(np.uint8) if self.planes is None else self.planes.pack(values)

    def unpack_vectors(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of `pack_vectors`."""
        if self.planes is None:
            codes = np.ascontiguousarray(raw).view(self.stream.dtype)
        else:
            codes = self.planes.unpack(raw, self.order.shape[1])
        return {self.name: np.take(codes.reshape(*raw.shape[:-3], self.order.size), self.places, axis=-1)}


@dataclass(frozen=True, eq=False)
class Sections:
    """Consecutive sections, each aligned to `alignment` bytes, padded with zeros to a multiple of `line` bytes."""

    sections: tuple[PackedStreams, ...]
    alignment: int
    line: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each section in bytes, and the end of the last one."""
        ends = [0]
        for section in self.sections:
            ends.append(ends[-1] + -(-section.nbytes // self.alignment) * self.alignment)
        return tuple(ends)

    @cached_property
    def nbytes(self) -> int:
        return -(-self.offsets[-1] // self.line) * self.line

    def pack(self, streams: Mapping[str, np.ndarray]) -> np.ndarray:
        packed = [section.pack(streams) for section in self.sections]
        raw = np.zeros((*packed[0].shape[:-1], self.nbytes), np.uint8)
        for at, part in zip(self.offsets, packed, strict=False):
            raw[..., at : at + part.shape[-1]] = part
        return raw

    def unpack(self, raw: np.ndarray) -> dict[str, np.ndarray]:
        streams: dict[str, np.ndarray] = {}
        for at, section in zip(self.offsets, self.sections, strict=False):
            streams |= section.unpack(raw[..., at : at + section.nbytes])
        return streams

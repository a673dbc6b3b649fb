"""What codecs of pairs with a norm for each vector share: everything but the points of the table."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.nearest import NearestPoint
from polarlm.engine.codecs.parts.norms import ByteNorm, HalfNorm
from polarlm.engine.codecs.parts.rotation import PRECONDITIONINGS, preconditioning
from polarlm.engine.codecs.schema.streams import Schema, codes, join, join_wide, joined_table, numbers, pack

NORM16 = "norm16"


def parse_options(name: str, options: tuple[str, ...]) -> tuple[str, bool]:
    """The preconditioning that the options name, and whether norms are stored in half precision. Raises ValueError
    unless the options are at most one preconditioning and at most one `norm16`, in any order."""
    rotations = [option for option in options if option != NORM16]
    if len(rotations) > 1 or not set(rotations) <= set(PRECONDITIONINGS) or len(options) > len(rotations) + 1:
        raise ValueError(
            f"Cache type {name} has the options {', '.join(PRECONDITIONINGS)} (at most one) and {NORM16}, "
            f"as in {name}+{PRECONDITIONINGS[1]}+{NORM16}."
        )
    return (*rotations, PRECONDITIONINGS[0])[0], NORM16 in options


@dataclass(frozen=True)
class PairStore(ABC):
    """The table of a codec of pairs (`Codec.rounding`), and the formats of norms and codes.

    bits: bits per pair; reach: the largest factor of a norm; width: values per code of the table.
    """

    bits: int
    half_norms: bool
    reach: float

    width: ClassVar[int] = 2

    @property
    def code_bits(self) -> int:
        """Bits of a code of the table."""
        return self.bits * self.width // 2

    @property
    def norms(self) -> ByteNorm | HalfNorm:
        return HalfNorm(self.reach) if self.half_norms else ByteNorm()

    def schema(self, block_size: int, head_dim: int) -> Schema:
        return {"norm": numbers(self.norms.dtype, block_size), "codes": codes(self.bits, block_size, head_dim // 2)}

    @property
    @abstractmethod
    def points(self) -> np.ndarray:
        """Point of each code, (P, width) float32: a pair, or one value where two codes are joined."""

    def nearest(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See `Rounding.nearest`. Here of pairs: magnitudes of x are under 1e37."""
        return _search(self)(x)

    def assemble(self, codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        """codes (..., N, D / width), norms (..., N) float32 → the fields."""
        codes = codes if self.width == 2 else join(codes, self.code_bits)
        *_, block_size, pairs = codes.shape
        return pack(self.schema(block_size, 2 * pairs), {"norm": self.norms.pack(norms), "codes": codes})


@cache
def _search(store: PairStore) -> NearestPoint:
    return NearestPoint(store.points)


@dataclass(frozen=True)
class PairCodec(Codec):
    """A codec of pairs with a norm for each vector. Kernels of all devices read it: tiles and records follow from its
    table."""

    name: str
    store: PairStore

    @property
    def rounding(self) -> PairStore:
        return self.store

    @property
    def largest(self) -> np.float32:
        """The largest norm that a vector is divided by before its codes are chosen."""
        return self.store.norms.largest

    def schema(self, block_size: int, head_dim: int) -> Schema:
        return self.store.schema(block_size, head_dim)

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        norms, codes = fields["norm"], fields["codes"]
        block_size = norms.shape[-1]
        nbytes = math.prod(codes.shape[norms.ndim - 1 :]) * codes.itemsize
        return block_size, 16 * nbytes // (block_size * self.store.bits)

    def norms(self, x: np.ndarray) -> np.ndarray:
        """What vectors x (..., D) are divided by before their codes are chosen: the rms, (...) float32."""
        with np.errstate(over="ignore"):  # if a square overflows, the norm is infinite and saturates
            return np.minimum(np.sqrt(np.square(x).mean(-1)), self.largest)

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        norms = self.norms(x)
        unit = x / np.where(norms > 0, norms, np.float32(1))[..., None]
        codes = self.store.nearest(unit.reshape(-1, self.store.width))[0].reshape(*norms.shape, -1)
        if self.store.width == 1:
            codes = join(codes, self.store.code_bits)
        return {"norm": self.store.norms.pack(norms), "codes": codes}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        codes, table = streams["codes"], _rows(self)
        rows = join_wide(codes, self.store.bits) if self.store.bits <= 8 else codes
        np.take(table, rows, axis=0, mode="clip", out=out.reshape(*rows.shape, table.shape[1]))
        out *= self.store.norms.unpack(streams["norm"])[..., None]


def pair_points(codec: PairCodec) -> np.ndarray:
    """The values of each pair code, (2^bits, 2) float32."""
    points = codec.store.points
    return points if codec.store.width == 2 else joined_table(points, codec.store.bits // 2)


@cache
def _rows(codec: PairCodec) -> np.ndarray:
    """What `PairCodec.dequantize` looks up: a row of four values for each two codes, of two for each code of ten
    bits."""
    bits = codec.store.bits
    return joined_table(pair_points(codec), bits) if bits <= 8 else pair_points(codec)


@dataclass(frozen=True)
class RotatedPairs(PairCodec):
    preconditioning: str

    multiples = 8, 4

    def rotation(self, head_dim: int) -> np.ndarray | None:
        return preconditioning(self.preconditioning, head_dim)

"""What codecs of pairs with a norm for each vector share: everything but the points of the table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from polarlm.engine.codecs import Codec, PathRounding, Rounding
from polarlm.engine.codecs.parts.checks import check_block_size, check_head_dim
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
class PairStore:
    """The formats of norms and codes, and with `nearest` or `best_path` a table (`Codec.rounding`).

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

    def assemble(self, codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        """codes (..., N, D / width), norms (..., N) float32 → the fields."""
        codes = codes if self.width == 2 else join(codes, self.code_bits)
        *_, block_size, pairs = codes.shape
        return pack(self.schema(block_size, 2 * pairs), {"norm": self.norms.pack(norms), "codes": codes})


@dataclass(frozen=True)
class PairCodec(Codec):
    """A codec of pairs with a norm for each vector. If it has `points`, kernels can read it: tiles and records follow
    from them."""

    name: str
    store: PairStore

    @property
    def rounding(self) -> Rounding | PathRounding | None:
        return self.store if isinstance(self.store, Rounding | PathRounding) else None

    @property
    def largest(self) -> np.float32:
        """The largest norm that a vector is divided by before its codes are chosen."""
        return self.store.norms.largest

    @property
    def points(self) -> np.ndarray | None:
        """Point of each code of `rounding`, (P, width) float32: a pair, or one value where two codes are joined. With
        `flips`, the points of a vector's first code."""
        return None

    @property
    def flips(self) -> bool:
        """Whether the two lowest bits of the code before, in the same vector, negate the first and the second value of
        a point; there is none before the first code."""
        return False

    def choose(self, unit: np.ndarray) -> np.ndarray:
        """unit (R, D) float32, divided by their `norms` → codes (R, D/2)."""
        rounding = self.rounding
        assert isinstance(rounding, Rounding)
        codes = rounding.nearest(unit.reshape(-1, rounding.width))[0].reshape(len(unit), -1)
        return codes if rounding.width == 2 else join(codes, self.store.code_bits)

    def lookup(self, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """codes (M, N, D/2), C-contiguous → row indices (M, N, U) into a table, and the table (rows, D/U) float32."""
        bits = self.store.bits
        return join_wide(codes, bits) if bits <= 8 else codes, _rows(self)

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
        codes = self.choose(unit.reshape(-1, x.shape[-1]))
        return {"norm": self.store.norms.pack(norms), "codes": codes.reshape(*norms.shape, -1)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        rows, table = self.lookup(streams["codes"])
        np.take(table, rows, axis=0, mode="clip", out=out.reshape(*rows.shape, table.shape[1]))
        out *= self.store.norms.unpack(streams["norm"])[..., None]


def pair_points(codec: PairCodec) -> np.ndarray:
    """The values of each pair code, (2^bits, 2) float32."""
    points = codec.points
    assert points is not None, "it depends on other codes"
    return points if points.shape[1] == 2 else joined_table(points, codec.store.bits // 2)


@cache
def _rows(codec: PairCodec) -> np.ndarray:
    """The table of `PairCodec.lookup`: a row of four values for each two codes, or of two for each code of ten bits."""
    bits = codec.store.bits
    return joined_table(pair_points(codec), bits) if bits <= 8 else pair_points(codec)


@dataclass(frozen=True)
class RotatedPairs(PairCodec):
    preconditioning: str

    def check(self, head_dim: int, block_size: int) -> None:
        check_head_dim(self.name, head_dim, 8)
        check_block_size(self.name, block_size, 4)

    def rotation(self, head_dim: int) -> np.ndarray | None:
        return preconditioning(self.preconditioning, head_dim)

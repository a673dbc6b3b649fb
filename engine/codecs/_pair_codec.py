"""Common part of codecs of pairs: all but the choice of codes and the table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import BaseCodec, Field
from polarlm.engine.codecs._arrays import checked, destination, slabs
from polarlm.engine.codecs._checks import check_block_size, check_head_dim
from polarlm.engine.codecs._norms import ByteNorm, HalfNorm, NormFormat
from polarlm.engine.codecs._pairs import PairPacking
from polarlm.engine.codecs._rotation import PRECONDITIONINGS, preconditioning

NORM16 = "norm16"


def parse_options(name: str, options: tuple[str, ...]) -> tuple[str, bool]:
    """The preconditioning, and whether norms are stored in half precision.

    Raises ValueError unless the options are at most one preconditioning and at most one `norm16`, in any order.
    """
    rotations = [option for option in options if option != NORM16]
    if len(rotations) > 1 or not set(rotations) <= set(PRECONDITIONINGS) or len(options) > len(rotations) + 1:
        raise ValueError(
            f"Cache type {name} has the options {', '.join(PRECONDITIONINGS)} (at most one) and {NORM16}, "
            f"as in {name}+{PRECONDITIONINGS[1]}+{NORM16}."
        )
    return (*rotations, PRECONDITIONINGS[0])[0], NORM16 in options


@dataclass(frozen=True)
class PairStore:
    """Formats of norms and codes. bits: of a pair; reach: the largest factor of a norm."""

    bits: int
    half_norms: bool
    reach: float

    @property
    def norms(self) -> NormFormat:
        return HalfNorm(self.reach) if self.half_norms else ByteNorm()

    @property
    def packing(self) -> PairPacking:
        return PairPacking(self.bits)

    def assemble(self, codes: np.ndarray, norms: np.ndarray) -> dict[str, np.ndarray]:
        """codes (..., N, D/2), norms (..., N) float32 → the fields."""
        return {"norm": self.norms.pack(norms), **self.packing.pack(codes)}


@dataclass(frozen=True)
class PairCodec(BaseCodec, ABC):
    """A codec of pairs, after a signed Hadamard matrix, a dense random rotation, or no rotation."""

    name: str
    store: PairStore
    preconditioning: str

    @abstractmethod
    def choose(self, unit: np.ndarray) -> np.ndarray:
        """unit (M, D) float32, rms 1 → codes (M, D/2)."""

    @abstractmethod
    def lookup(self, fields: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes (M, *shape) → rows (M, N, U) of a table, and the table, (rows, D/U) float32."""

    def check(self, head_dim: int, block_size: int) -> None:
        check_head_dim(self.name, head_dim, 8)
        check_block_size(self.name, block_size, 4)

    def rotation(self, head_dim: int) -> np.ndarray | None:
        return preconditioning(self.preconditioning, head_dim)

    def fields(self, block_size: int, head_dim: int) -> dict[str, Field]:
        norm = Field((block_size,), self.store.norms.dtype)
        return {"norm": norm, **self.store.packing.fields(block_size, head_dim)}

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        x = np.ascontiguousarray(checked(x, self.name))
        *lead, block_size, head_dim = x.shape
        self.check(head_dim, block_size)
        tokens = x.reshape(-1, head_dim)
        norms = np.empty(len(tokens), np.float32)
        codes = np.empty((len(tokens), head_dim // 2), np.min_scalar_type(2**self.store.bits - 1))
        for part in slabs(len(tokens), head_dim):
            with np.errstate(over="ignore"):  # a square beyond float32 makes the norm infinite, and it saturates
                rms = np.sqrt(np.square(tokens[part]).mean(-1))
            norms[part] = np.minimum(rms, self.store.norms.largest)
            codes[part] = self.choose(tokens[part] / np.where(norms[part] > 0, norms[part], np.float32(1))[:, None])
        return self.store.assemble(codes.reshape(*lead, block_size, head_dim // 2), norms.reshape(*lead, block_size))

    def decode(self, codes: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        *lead, block_size = codes["norm"].shape
        head_dim = self.store.packing.head_dim(codes)
        out = destination(out, (*lead, block_size, head_dim))
        blocks = out.reshape(-1, block_size, head_dim)
        fields = {name: field.reshape(-1, *field.shape[len(lead) :]) for name, field in codes.items()}
        norms = self.store.norms.unpack(fields.pop("norm"))[..., None]
        for part in slabs(len(blocks), block_size * head_dim):
            rows, table = self.lookup({name: field[part] for name, field in fields.items()})
            np.take(table, rows, axis=0, mode="clip", out=blocks[part].reshape(*rows.shape, table.shape[1]))
            blocks[part] *= norms[part]
        return out

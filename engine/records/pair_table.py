"""Records of codecs whose codes index a table of pairs, with a norm for every token.

Sections: codes, and the norms in `Geometry.tokens` order, one byte or a half each. Twin: `cuda/pair_table.cuh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from polarlm.engine.codecs._norms import ByteNorm, NormFormat
from polarlm.engine.records.fragments import (
    Geometry,
    aligned,
    as_bytes,
    from_bytes,
    pack_pairs,
    unpack_pairs,
    word_count,
)

_FLOAT = np.dtype(np.float32)


class Packing(Protocol):
    """The packing of pair codes in a codec's fields."""

    def codes(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Fields without the norm → codes of pairs (..., N, D/2)."""

    def pack(self, codes: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of `codes`, for codes of any integer type."""


@dataclass(frozen=True, eq=False)
class PairRecord:
    """Codes of pairs, and norms.

    points (P, width) float32: the value (width 1) or pair (width 2) of each code that the encoder chooses. pairs
    (2^bits, 2) float32: the pair of values of each pair code.
    """

    codec: str
    geometry: Geometry
    bits: int
    norms: NormFormat
    points: np.ndarray
    pairs: np.ndarray
    packing: Packing

    @property
    def nbytes(self) -> int:
        return self._norms_at + aligned(self.geometry.block_size * self.norms.dtype.itemsize)

    @property
    def rows(self) -> int:
        """A row for each byte, and rows for the 256 norms of one-byte norms."""
        return 256 + (8 if self.norms.dtype.itemsize == 1 else 0)

    @property
    def constants(self) -> dict[str, int]:
        offsets, nbytes = {"NORM_TABLE": 0, "NORM_THRESHOLDS": 0}, 0
        for name, table in self._tables.items():
            offsets[name], nbytes = nbytes, nbytes + table.nbytes
        width = self.points.shape[1]
        return {
            "BITS": self.bits,
            "WORDS": word_count(self.bits, self.geometry.tiles),
            "NORM_BYTES": self.norms.dtype.itemsize,
            "NORMS": self._norms_at,
            "LARGEST_NORM": int(np.float32(self.norms.largest).view(np.int32)),
            "WIDTH": width,
            "CODE_BITS": self.bits // (2 // width),
            "POINTS": len(self.points),
            **offsets,
        }

    @property
    def tables(self) -> np.ndarray:
        return np.concatenate([table.view(np.uint8) for table in self._tables.values()])

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        codes = self.geometry.pairs(self.packing.codes({name: x for name, x in fields.items() if name != "norm"}))
        norms = self.geometry.tokens(fields["norm"])
        return np.concatenate([pack_pairs(codes, self.bits), as_bytes(norms)], -1)

    def unpack(self, sections: np.ndarray) -> dict[str, np.ndarray]:
        geometry = self.geometry
        codes = unpack_pairs(sections[..., : self._norms_at], self.bits, geometry.parts, geometry.tiles)
        norms = from_bytes(sections[..., self._norms_at :], self.norms.dtype, geometry.block_size)
        return {"norm": geometry.from_tokens(norms), **self.packing.pack(geometry.from_pairs(codes))}

    @property
    def _norms_at(self) -> int:
        return self.geometry.parts * word_count(self.bits, self.geometry.tiles) * 128

    @property
    def _tables(self) -> dict[str, np.ndarray]:
        """Name of its offset → table, each a multiple of 16 bytes."""
        tables: dict[str, np.ndarray] = {
            "PAIRS": self.pairs.astype(np.float16).reshape(-1),
            "POINTS_F32": self.points.astype(_FLOAT).reshape(-1),
        }
        if isinstance(self.norms, ByteNorm):
            tables["NORM_TABLE"] = self.norms.unpack(np.arange(256))
            tables["NORM_THRESHOLDS"] = np.append(self.norms.thresholds, np.float32(np.inf))
        return tables

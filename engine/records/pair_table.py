"""Records of codecs whose codes index a table of pairs, with a norm for every token.

Sections: codes, then norms in the order of `Geometry.tokens`, uint8 or float16. Twin: `cuda/pair_table.cuh`, with
`cuda/codecs/linear.cuh` for codes of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs.parts.norms import ByteNorm
from polarlm.engine.codecs.parts.pair_codec import PairCodec, PairStore, pair_points
from polarlm.engine.codecs.schema.sections import Section, numbered
from polarlm.engine.records.fragments import Geometry, LaneWords, Record


@dataclass(frozen=True, eq=False)
class PairRecord(Record):
    """The record of pair codes and norms.

    pairs (2^bits, 2) float32: the values of each pair code, or (256, 2): of each byte, which with ten bits is a code
    without its signs; empty with 16 bits, which no table decodes.
    """

    codec: str
    geometry: Geometry
    store: PairStore
    pairs: np.ndarray
    takes_metric: bool = True

    @property
    def points(self) -> np.ndarray:
        return self.store.points

    @property
    def rows(self) -> int:
        """A row for each byte that is looked up, and 8 more for the 256 norms if norms are bytes."""
        return (256 if len(self.pairs) else 0) + (8 if self.store.norms.dtype.itemsize == 1 else 0)

    @cached_property
    def constants(self) -> dict[str, int]:
        offsets, nbytes = {"NORM_TABLE": 0, "NORM_THRESHOLDS": 0}, 0
        for name, table in self._tables.items():
            offsets[name], nbytes = nbytes, nbytes + table.nbytes
        return {
            "BITS": self.store.bits,
            "WORDS": self._words.count,
            "NORM_BYTES": self.store.norms.dtype.itemsize,
            "NORMS": self._words.nbytes,
            "LARGEST_NORM": int(np.float32(self.store.norms.largest).view(np.int32)),
            "WIDTH": self.store.width,
            "CODE_BITS": self.store.code_bits,
            "POINTS": len(self.points),
            **offsets,
        }

    @property
    def tables(self) -> np.ndarray:
        return np.concatenate([table.view(np.uint8) for table in self._tables.values()])

    @property
    def sections(self) -> tuple[LaneWords, Section]:
        norm = self.store.schema(self.geometry.block_size, self.geometry.head_dim)["norm"]
        order = self.geometry.tokens(numbered(*norm.shape))
        return self._words, Section("norm", norm, order.reshape(1, 1, -1))

    @cached_property
    def _words(self) -> LaneWords:
        codes = self.store.schema(self.geometry.block_size, self.geometry.head_dim)["codes"]
        return LaneWords((self.geometry.pair_codes(codes, self.store.bits),))

    @cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        """Name of the constant with a table's offset → the table, a multiple of 16 bytes."""
        tables: dict[str, np.ndarray] = {
            "PAIRS": self.pairs.astype(np.float16).reshape(-1),
            "POINTS_F32": self.points.astype(np.float32).reshape(-1),
        }
        if isinstance(self.store.norms, ByteNorm):
            tables["NORM_TABLE"] = self.store.norms.unpack(np.arange(256))
            tables["NORM_THRESHOLDS"] = np.append(self.store.norms.thresholds, np.float32(np.inf))
        return tables


def record(codec: PairCodec, geometry: Geometry) -> PairRecord:
    pairs = pair_points(codec)[:256] if codec.store.bits <= 10 else np.empty((0, 2), np.float32)
    return PairRecord(codecs.file_of(codec), geometry, codec.store, pairs, codec.takes_metric)

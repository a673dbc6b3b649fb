"""Records of full precision, and of the codec `f16`: halves. Twin: `cuda/codecs/f16.cuh`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.records.fragments import Geometry, as_bytes, from_bytes


@dataclass(frozen=True)
class HalfRecord:
    """Halves in fragment order, tile by tile. No tables."""

    geometry: Geometry

    codec = "f16"
    rows = 0
    points = None
    tables = np.zeros(0, np.uint8)

    @property
    def constants(self) -> dict[str, int]:
        return {}

    @property
    def nbytes(self) -> int:
        return 2 * self.geometry.block_size * self.geometry.padded

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        return as_bytes(self.geometry.halves(fields["values"]))

    def unpack(self, sections: np.ndarray) -> dict[str, np.ndarray]:
        return {"values": self.geometry.from_halves(from_bytes(sections, np.dtype(np.float16), self.nbytes // 2))}


def record(codec: Codec, geometry: Geometry) -> HalfRecord:
    """The record of a block of keys or values."""
    return HalfRecord(geometry)

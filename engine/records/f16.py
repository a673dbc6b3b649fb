"""Records of the codec `f16`, which are also the full-precision records. Twin: `cuda/codecs/f16.cuh`."""

from __future__ import annotations

from dataclasses import dataclass

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.schema.sections import Section, numbered
from polarlm.engine.codecs.schema.streams import Stream
from polarlm.engine.records.fragments import Geometry, Record


@dataclass(frozen=True, eq=False)
class HalfRecord(Record):
    """float16 values in fragment order, tile by tile. No tables."""

    geometry: Geometry
    values: Stream

    codec = "f16"
    rows = 0

    @property
    def constants(self) -> dict[str, int]:
        return {}

    @property
    def sections(self) -> tuple[Section]:
        order = self.geometry.halves(numbered(*self.values.shape))
        return (Section("values", self.values, order.reshape(1, 1, -1)),)


def record(codec: Codec, geometry: Geometry) -> HalfRecord:
    return HalfRecord(geometry, codec.schema(geometry.block_size, geometry.head_dim)["values"])

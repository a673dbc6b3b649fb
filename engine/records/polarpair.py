"""Records of `polarpair`, keys only: pair codes, then their scales. Twin: `cuda/codecs/polarpair.cuh`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polarlm.engine.codecs.polarpair import COSINES, SINES, TANGENTS, PolarPair
from polarlm.engine.codecs.schema.arrays import SATURATION
from polarlm.engine.codecs.schema.sections import PackedStreams, Section
from polarlm.engine.records.fragments import Geometry, LaneWords, Record


@dataclass(frozen=True, eq=False)
class PolarPairRecord(Record):
    """The record of pair codes and the scales of groups of tokens."""

    quantizer: PolarPair
    geometry: Geometry

    codec = "polarpair"

    @property
    def group(self) -> int:
        """Tokens that share scales."""
        return self.quantizer.group or self.geometry.block_size

    @property
    def rows(self) -> int:
        """A row for each byte; no rows if every group has its own angles."""
        return 256 if len(self.quantizer.scales) < 4 else 0

    @property
    def constants(self) -> dict[str, int]:
        return {
            "BITS": self.quantizer.bits,
            "PAIR_WORDS": self._words.count,
            "WORDS": self._words.count + self._width,  # registers that codes and scales take
            "SCALED": self.group,
            "RANGED": len(self.quantizer.scales) // 2,
            "SCALES_AT": self._words.nbytes,
            "TANGENTS": 4 * 2**self.quantizer.bits,
            "SATURATION": int(SATURATION),
        }

    @property
    def tables(self) -> np.ndarray:
        """Two float16 for each code, then two tangents as float32, and eight bytes of padding."""
        codes = np.arange(2**self.quantizer.bits)
        points = np.stack([COSINES, SINES], -1)[codes & 15]
        if len(self.quantizer.scales) == 1:
            points = points * (codes >> 4)[:, None]
        tangents = np.append(TANGENTS, np.zeros(2)).astype(np.float32)
        return np.concatenate([points.astype(np.float16).reshape(-1).view(np.uint8), tangents.view(np.uint8)])

    @property
    def sections(self) -> tuple[PackedStreams, ...]:
        schema = self.quantizer.schema(self.geometry.block_size, self.geometry.head_dim)
        cuts = (self.geometry.block_size // self.group,), (self._width, 2, 4)
        names = self.quantizer.scales  # of streams (N/G, D/2) float16
        return self._words, *(Section.numbers(name, schema[name], cuts, (0, 3, 1, 2)) for name in names)

    @cached_property
    def _words(self) -> LaneWords:
        schema = self.quantizer.schema(self.geometry.block_size, self.geometry.head_dim)
        return LaneWords((self.geometry.pair_codes(schema["codes"], self.quantizer.bits),))

    @property
    def _width(self) -> int:
        """Steps of the matrix product whose scales a lane loads: a multiple of four, which fill 16 bytes."""
        return -(-self.geometry.padded // 64) * 4


def record(codec: PolarPair, geometry: Geometry) -> PolarPairRecord | None:
    """The record of a block of keys; None if a group is not whole tiles, or if groups and parts overlap partially."""
    group = codec.group or geometry.block_size
    if geometry.values or group % 16 or (group % geometry.part and geometry.part % group):
        return None
    return PolarPairRecord(codec, geometry)

"""Records of `turbo`: a pair code is made of the codes of its two values. Twin: `cuda/codecs/turbo.cuh`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs._bits import pack_nibbles, pack_row_of_sixes, unpack_nibbles, unpack_row_of_sixes
from polarlm.engine.codecs.turbo import Turbo, levels_of
from polarlm.engine.records.fragments import Geometry
from polarlm.engine.records.pair_table import PairRecord


@dataclass(frozen=True)
class _Pairs:
    """A pair code has the code of the first value in its low bits, and that of the second above it."""

    bits: int  # of a value

    def codes(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Fields → the codes of pairs (..., N, D/2) uint8."""
        packed = fields["codes"]
        if self.bits == 2:
            return unpack_nibbles(packed)
        return unpack_row_of_sixes(packed) if self.bits == 3 else packed

    def pack(self, codes: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of `codes`, for codes of any integer type."""
        codes = codes.astype(np.uint8)
        if self.bits == 2:
            return {"codes": pack_nibbles(codes)}
        return {"codes": pack_row_of_sixes(codes) if self.bits == 3 else codes}


def record(codec: Turbo, geometry: Geometry) -> PairRecord:
    """The record of a block."""
    levels, pair = levels_of(codec.bits), np.arange(4**codec.bits)
    pairs = np.stack([levels[pair & 2**codec.bits - 1], levels[pair >> codec.bits]], -1)
    norms = codec.rounding.norms
    return PairRecord("turbo", geometry, 2 * codec.bits, norms, levels[:, None], pairs, _Pairs(codec.bits))

"""Records of `turbo`: a pair code is made of the codes of its two values. Twin: `cuda/codecs/turbo.cuh`."""

from __future__ import annotations

from polarlm.engine.codecs.turbo import Turbo, levels_of, pair_levels
from polarlm.engine.records.fragments import Geometry
from polarlm.engine.records.pair_table import PairRecord


def record(codec: Turbo, geometry: Geometry) -> PairRecord:
    """The record of a block."""
    return PairRecord("turbo", geometry, codec.store, levels_of(codec.bits)[:, None], pair_levels(codec.bits))

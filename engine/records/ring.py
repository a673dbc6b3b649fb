"""Records of `ring`: pair codes index one table. Twin: `cuda/codecs/ring.cuh`."""

from __future__ import annotations

from polarlm.engine.codecs.ring import Ring, points_of
from polarlm.engine.records.fragments import Geometry
from polarlm.engine.records.pair_table import PairRecord


def record(codec: Ring, geometry: Geometry) -> PairRecord:
    """The record of a block."""
    points = points_of(codec.store.bits)
    return PairRecord("ring", geometry, codec.store, points, points)

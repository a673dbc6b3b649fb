"""Records of `trellis`: pair codes index one table. Twin: `cuda/codecs/trellis.cuh`."""

from __future__ import annotations

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.codecs.parts.cosets import STATES
from polarlm.engine.codecs.parts.viterbi import flip
from polarlm.engine.codecs.trellis import Trellis
from polarlm.engine.records.fragments import Geometry
from polarlm.engine.records.pair_table import PairRecord


def record(codec: Trellis, geometry: Geometry) -> PairRecord:
    """The codec's record. Codes of five or six bits leave room for the state in a byte: then `pairs` has every state's
    points, by 4 · code + state; otherwise the first code's points."""
    points, bits = codec.points, codec.store.bits
    pairs = points
    if bits <= 6:
        pairs = flip(points[:, None], np.arange(STATES)).reshape(-1, 2)
    return PairRecord(codecs.file_of(codec), geometry, codec.store, points, pairs, searches_paths=True)

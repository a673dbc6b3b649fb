"""Records of `polarquant`. Twin: `cuda/codecs/polarquant.cuh`, which describes the words.

In arrays of words, (PARTS, words, 32, n), the last two axes are lanes and the codes or float16 of a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from polarlm.engine.codecs.polarquant import (
    CENTRES,
    TAN_SQUARED,
    PolarQuant,
    from_rows,
    level_count,
    rows_of,
    upper_table,
)
from polarlm.engine.codecs.schema.planes import Planes
from polarlm.engine.codecs.schema.sections import Section, numbered
from polarlm.engine.codecs.schema.streams import codes, join, numbers, split
from polarlm.engine.records.fragments import LANES, Geometry, LaneWords, Record

_POINT_BYTES = 4 * 256 * 4  # bytes of the points: two float16 for each pair of a half and each byte


class _Sharing(NamedTuple):
    """32 lanes as an array (before, members, after), whose members need the same words: each stores a share."""

    before: int
    members: int
    after: int

    def share(self, words: np.ndarray) -> np.ndarray:
        """The words (PARTS, words, 32, n) that every lane needs → the words that it stores, fewer of them.

        Member i stores words i, i + members, …
        """
        parts, count, _, size = words.shape
        kept = np.zeros((parts, -(-count // self.members) * self.members, self.before, self.after, size), words.dtype)
        kept[:, :count] = words.reshape(parts, count, *self, size)[..., 0, :, :]
        apart = kept.reshape(parts, -1, self.members, self.before, self.after, size)
        return apart.swapaxes(2, 3).reshape(parts, -1, LANES, size)


@dataclass(frozen=True, eq=False)
class PolarRecord(Record):
    """The record of angles of pairs, rows of half groups, and radii, each as words of lanes."""

    geometry: Geometry

    codec = "polarquant"
    rows = 256

    @property
    def constants(self) -> dict[str, int]:
        low, high = np.cos(CENTRES[4]).astype(np.float16).view(np.uint32).tolist()
        factors = {"LEVEL4_LOW": low, "LEVEL4_HIGH": high}
        return {"LEVELS": self._levels, "WORDS": self._words.count, "TAN_SQUARED": _POINT_BYTES, **factors}

    @property
    def tables(self) -> np.ndarray:
        return _tables()

    @property
    def sections(self) -> tuple[LaneWords]:
        return (self._words,)

    def from_streams(self, streams: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = rows_of(streams)
        return {**streams, "level1": split(streams["level1"], 4), "rows": rows << 6 | rows >> 2}

    def to_streams(self, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        rows = stored["rows"]
        upper = from_rows(rows << 2 | rows >> 6, self._levels)
        return {"radius": stored["radius"], "level1": join(stored["level1"], 4), **upper}

    @cached_property
    def _words(self) -> LaneWords:
        geometry, levels = self.geometry, self._levels
        parts, tokens, dim = geometry.parts, geometry.block_size, geometry.head_dim
        level1, rows = codes(4, tokens, dim // 2), codes(8, tokens, dim // 8)
        radius = numbers(np.float16, tokens, dim >> levels)
        row_sharing = _Sharing(2, 4, 4) if geometry.values else _Sharing(8, 4, 1)
        radius_sharing = _Sharing(1, 8, 4) if geometry.values and levels == 4 else row_sharing
        own_rows = geometry.pairs(np.repeat(numbered(*rows.shape), 4, axis=1))
        own_radii = geometry.pairs(np.repeat(numbered(*radius.shape), 2 ** (levels - 1), axis=1))
        # For keys with four levels, two registers have the same radii, so a tile needs one word.
        words = 2 if geometry.values or levels == 3 else 1
        radius_words = own_radii.reshape(parts, geometry.tiles, LANES, 2, 2)[..., :words, :].swapaxes(2, 3)
        orders = (
            geometry.pairs(numbered(*level1.shape)),
            row_sharing.share(own_rows),
            radius_sharing.share(radius_words.reshape(parts, -1, LANES, 2)),
        )
        angles, upper, radii = (order.reshape(*order.shape[:2], -1) for order in orders)
        return LaneWords(
            (
                Section("level1", level1, angles, Planes(4)),
                Section("rows", rows, upper),
                Section("radius", radius, radii),
            )
        )

    @property
    def _levels(self) -> int:
        return level_count(self.geometry.head_dim)


def record(codec: PolarQuant, geometry: Geometry) -> PolarRecord:
    return PolarRecord(geometry)


@cache
def _tables() -> np.ndarray:
    """Points for each pair of a half and each code of levels 1 to 3; then tan² of each level's first threshold."""
    four = np.arange(16, dtype=np.uint8)
    # Codes of a half without level 4: level 3, second level 2, first level 2. A pair needs only its level 2.
    upper = np.stack([(four & 3) << 4 | four >> 2] * 2 + [four << 2] * 2)
    factors = upper_table(3)[upper, [[0], [2], [4], [6]]]
    angles = np.array(CENTRES[1])
    units = np.stack([np.cos(angles), np.sin(angles)], -1)
    points = units[:, None] * factors[:, None, :, None]
    thresholds = np.array([TAN_SQUARED[level] for level in sorted(TAN_SQUARED)], np.float32)
    return np.concatenate([part.ravel().view(np.uint8) for part in (points.astype(np.float16), thresholds)])

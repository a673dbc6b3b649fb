"""Records of `polarquant`. Twin: `cuda/codecs/polarquant.cuh`, which describes the words.

In arrays of words, (..., PARTS, words, 32, 4) uint8, the last two axes are lanes and the bytes of a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.codecs.polarquant import (
    CENTRES,
    TAN_SQUARED,
    PolarQuant,
    level_count,
    pack,
    unpack,
    upper_codes,
    upper_table,
)
from polarlm.engine.records.fragments import LANES, Geometry, pack_pairs, unpack_pairs

_POINT_BYTES = 4 * 256 * 4  # two halves, by the pair of a row and eight bits


class _Sharing(NamedTuple):
    """32 lanes as (before, members, behind) whose members need the same words, so that each stores a share of them."""

    before: int
    members: int
    behind: int

    def words(self, count: int) -> int:
        """Words of `count` that a member stores."""
        return -(-count // self.members)

    def share(self, words: np.ndarray) -> np.ndarray:
        """The words (..., n, 32, 4) of every lane → those that it stores, (..., words(n), 32, 4).

        Member i stores words i, i + members, …
        """
        *lead, count, _, size = words.shape
        kept = np.zeros((*lead, self.words(count) * self.members, self.before, self.behind, size), np.uint8)
        kept[..., :count, :, :, :] = words.reshape(*lead, count, *self, size)[..., 0, :, :]
        apart = kept.reshape(*lead, -1, self.members, self.before, self.behind, size)
        return apart.swapaxes(-4, -3).reshape(*lead, -1, LANES, size)

    def gather(self, kept: np.ndarray, count: int) -> np.ndarray:
        """The inverse of `share`: `count` words of every lane."""
        *lead, words, _, size = kept.shape
        apart = kept.reshape(*lead, words, *self, size).swapaxes(-4, -3)
        one = apart.reshape(*lead, -1, self.before, 1, self.behind, size)[..., :count, :, :, :, :]
        return np.broadcast_to(one, (*lead, count, *self, size)).reshape(*lead, count, LANES, size)


@dataclass(frozen=True)
class PolarRecord:
    """Angles of pairs, rows of half groups and radii, each as words of lanes."""

    geometry: Geometry
    codec = "polarquant"
    rows = 256
    points = None

    @property
    def nbytes(self) -> int:
        return self.geometry.parts * sum(self._counts) * LANES * 4

    @property
    def constants(self) -> dict[str, int]:
        low, high = np.cos(CENTRES[4]).astype(np.float16).view(np.uint32).tolist()
        factors = {"LEVEL4_LOW": low, "LEVEL4_HIGH": high}
        return {"LEVELS": self._levels, "WORDS": sum(self._counts), "TAN_SQUARED": _POINT_BYTES, **factors}

    @property
    def tables(self) -> np.ndarray:
        return _tables()

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        geometry = self.geometry
        pairs = geometry.pairs(unpack(fields)[0])
        if geometry.tiles % 2:
            pairs = np.concatenate([pairs, np.zeros_like(pairs[..., :1, :, :])], -3)
        angles = pairs[..., 0::2, :, :] | pairs[..., 1::2, :, :] << 4
        upper = upper_codes(fields, self._levels)
        rows = geometry.pairs(np.repeat(upper << 6 | upper >> 2, 4, axis=-1))
        radii = geometry.pairs(np.repeat(fields["radius"].view(np.uint16), 2 ** (self._levels - 1), axis=-1))
        kept = self._row_sharing.share(rows), self._radius_sharing.share(self._radius_words_from(radii))
        return pack_pairs(np.concatenate([angles, *kept], -3), 8)

    def unpack(self, sections: np.ndarray) -> dict[str, np.ndarray]:
        geometry, tiles = self.geometry, self.geometry.tiles
        words = unpack_pairs(sections, 8, geometry.parts, sum(self._counts)).astype(np.uint8)
        angles, rows, radii = np.split(words, np.cumsum(self._counts)[:2], axis=-3)
        pairs = np.stack([angles & 15, angles >> 4], -3).reshape(*angles.shape[:-3], -1, LANES, 4)[..., :tiles, :, :]
        row = geometry.from_pairs(self._row_sharing.gather(rows, tiles))[..., ::4]
        halves = self._radius_halves_from(self._radius_sharing.gather(radii, self._radius_words * tiles))
        radius = np.ascontiguousarray(geometry.from_pairs(halves)[..., :: 2 ** (self._levels - 1)]).view(np.float16)
        level4 = [row[..., 0::2] >> 4 & 3] if self._levels == 4 else []
        level2 = np.stack([row >> 6, row & 3], -1).reshape(*row.shape[:-1], -1)
        level1 = geometry.from_pairs(pairs)
        shapes = PolarQuant().fields(geometry.block_size, geometry.head_dim)
        fields = {name: np.empty((*sections.shape[:-1], *f.shape), f.dtype) for name, f in shapes.items()}
        pack([level1, level2, row >> 2 & 3, *level4], radius.astype(np.float32), fields)
        return fields

    @property
    def _levels(self) -> int:
        return level_count(self.geometry.head_dim)

    @property
    def _radius_words(self) -> int:
        """Words of radii that a lane needs per tile."""
        return 2 if self.geometry.values or self._levels == 3 else 1

    @property
    def _row_sharing(self) -> _Sharing:
        return _Sharing(2, 4, 4) if self.geometry.values else _Sharing(8, 4, 1)

    @property
    def _radius_sharing(self) -> _Sharing:
        return _Sharing(1, 8, 4) if self.geometry.values and self._levels == 4 else self._row_sharing

    @property
    def _counts(self) -> tuple[int, int, int]:
        """Words of a lane per part: angles, rows, radii."""
        tiles = self.geometry.tiles
        return -(-tiles // 2), self._row_sharing.words(tiles), self._radius_sharing.words(self._radius_words * tiles)

    def _radius_words_from(self, halves: np.ndarray) -> np.ndarray:
        """halves (..., TILES, 32, 4) uint16 of four registers → words (..., radius words · TILES, 32, 4) uint8."""
        *lead, tiles, _, _ = halves.shape
        words = halves.view(np.uint8).reshape(*lead, tiles, LANES, 2, 4)[..., : self._radius_words, :]
        return words.swapaxes(-3, -2).reshape(*lead, -1, LANES, 4)

    def _radius_halves_from(self, words: np.ndarray) -> np.ndarray:
        """The inverse of `_radius_words_from`."""
        lead = words.shape[:-3]
        by_tile = words.reshape(*lead, -1, self._radius_words, LANES, 4).swapaxes(-3, -2)
        both = np.broadcast_to(by_tile, (*by_tile.shape[:-2], 2, 4))
        return np.ascontiguousarray(both).view(np.uint16).reshape(*lead, -1, LANES, 4)


def record(codec: PolarQuant, geometry: Geometry) -> PolarRecord:
    """The record of a block."""
    return PolarRecord(geometry)


@cache
def _tables() -> np.ndarray:
    """Points by pair of a row and codes of levels 1 to 3, and tan² of the first threshold of each level."""
    four = np.arange(16, dtype=np.uint8)
    # Codes of a half without level 4: level 3, second level 2, first level 2. Of the other level 2 any will do.
    upper = np.stack([(four & 3) << 4 | four >> 2] * 2 + [four << 2] * 2)
    factors = upper_table(3)[upper, [[0], [2], [4], [6]]]
    angles = np.array(CENTRES[1])
    units = np.stack([np.cos(angles), np.sin(angles)], -1)
    points = units[:, None] * factors[:, None, :, None]
    thresholds = np.array([TAN_SQUARED[level] for level in sorted(TAN_SQUARED)], np.float32)
    return np.concatenate([part.ravel().view(np.uint8) for part in (points.astype(np.float16), thresholds)])

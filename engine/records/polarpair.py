"""Records of `polarpair`, keys only: codes of pairs, then their scales. Twin: `cuda/codecs/polarpair.cuh`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs._arrays import SATURATION
from polarlm.engine.codecs.polarpair import COSINES, SINES, TANGENTS, PolarPair
from polarlm.engine.records.fragments import Geometry, pack_pairs, unpack_pairs, word_count

_HALF = np.dtype(np.float16)


@dataclass(frozen=True)
class PolarPairRecord:
    """Codes of pairs, and the scales of groups of tokens."""

    quantizer: PolarPair
    geometry: Geometry
    codec = "polarpair"
    points = None

    @property
    def bits(self) -> int:
        """Bits of a pair's code."""
        return 4 + self.quantizer.radius_bits

    @property
    def group(self) -> int:
        """Tokens that share scales."""
        return self.quantizer.group or self.geometry.block_size

    @property
    def scales(self) -> tuple[str, ...]:
        """The fields of scales, (N/G, D/2) float16 each."""
        return self.quantizer.scales

    @property
    def nbytes(self) -> int:
        halves = self._groups * 4 * self._width * 2
        return self._scales_at + len(self.scales) * halves * _HALF.itemsize

    @property
    def rows(self) -> int:
        """A row for each byte; none if every group has its own angles."""
        return 256 if len(self.scales) < 4 else 0

    @property
    def constants(self) -> dict[str, int]:
        pair_words = word_count(self.bits, self.geometry.tiles)
        return {
            "BITS": self.bits,
            "PAIR_WORDS": pair_words,
            "WORDS": pair_words + self._width,  # registers that codes and scales take
            "SCALED": self.group,
            "RANGED": len(self.scales) // 2,
            "SCALES_AT": self._scales_at,
            "TANGENTS": 4 * 2**self.bits,
            "SATURATION": int(SATURATION),
        }

    @property
    def tables(self) -> np.ndarray:
        """A pair of halves for each code, two tangents, and eight bytes of padding."""
        codes = np.arange(2**self.bits)
        points = np.stack([COSINES, SINES], -1)[codes & 15]
        if len(self.scales) == 1:
            points = points * (codes >> 4)[:, None]
        tangents = np.append(TANGENTS, np.zeros(2)).astype(np.float32)
        return np.concatenate([points.astype(_HALF).reshape(-1).view(np.uint8), tangents.view(np.uint8)])

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        codes = pack_pairs(self.geometry.pairs(self.quantizer.pair_codes(fields)), self.bits)
        lead, steps = codes.shape[:-1], self.geometry.padded // 16
        sections = [codes]
        for name in self.scales:
            padded = np.zeros((*lead, self._groups, steps * 8), _HALF)
            padded[..., : self.geometry.head_dim // 2] = fields[name]
            stored = np.zeros((*lead, self._groups, 4, self._width, 2), _HALF)
            stored[..., :steps, :] = np.moveaxis(padded.reshape(*lead, self._groups, steps, 2, 4), -1, -3)
            sections.append(stored.reshape(*lead, -1).view(np.uint8))
        return np.concatenate(sections, -1)

    def unpack(self, sections: np.ndarray) -> dict[str, np.ndarray]:
        geometry, lead, steps = self.geometry, sections.shape[:-1], self.geometry.padded // 16
        codes = unpack_pairs(sections[..., : self._scales_at], self.bits, geometry.parts, geometry.tiles)
        fields = {"codes": self.quantizer.code_field(geometry.from_pairs(codes).astype(np.uint8))}
        stored = np.ascontiguousarray(sections[..., self._scales_at : self.nbytes]).view(_HALF)
        stored = stored.reshape(*lead, len(self.scales), self._groups, 4, self._width, 2)[..., :steps, :]
        scales = np.moveaxis(stored, -3, -1).reshape(*lead, len(self.scales), self._groups, -1)
        for k, name in enumerate(self.scales):
            fields[name] = scales[..., k, :, : geometry.head_dim // 2]
        return fields

    @property
    def _groups(self) -> int:
        return self.geometry.block_size // self.group

    @property
    def _width(self) -> int:
        """Steps whose scales a lane loads, a multiple of the four that fill 16 bytes."""
        return -(-self.geometry.padded // 64) * 4

    @property
    def _scales_at(self) -> int:
        return self.geometry.parts * word_count(self.bits, self.geometry.tiles) * 128


def record(codec: PolarPair, geometry: Geometry) -> PolarPairRecord | None:
    """The record of a block of keys; None if groups are not whole tiles, or a group and a part overlap partially."""
    group = codec.group or geometry.block_size
    if geometry.values or group % 16 or (group % geometry.part and geometry.part % group):
        return None
    return PolarPairRecord(codec, geometry)

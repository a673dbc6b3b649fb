"""Packing of codes of pairs, 6, 7, 8 or 10 bits each, without unused bits; two are decoded with one lookup.

One lookup decodes a unit: two pairs of 6, 7 or 8 bits, the first in the low bits, or one pair of 10. A unit has 8 + h
bits, h = 4, 6, 8 or 2. The low bytes lie side by side. The h bits above them share bytes with those of other tokens of
the block, and so fill whole bytes for any head dim. With q₀ to q₃ of tokens t, t + N/4, t + N/2 and t + 3N/4:

    h = 2: one byte       q₀ | q₁ << 2 | q₂ << 4 | q₃ << 6
    h = 4: two bytes      q₀ | q₂ << 4  and  q₁ | q₃ << 4
    h = 6: three bytes    `_bits.pack_sixes`
    h = 8: none: the two bytes of a unit lie side by side, and are the codes of its pairs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import Field
from polarlm.engine.codecs._bits import pack_sixes

_BYTE = np.dtype(np.uint8)


@dataclass(frozen=True)
class PairPacking:
    """The layout of N tokens of one KV head, U units each. N is a multiple of 4, the head dim a multiple of 8.

    low   (N, U)         uint8  the low bytes; (N, 2U) for pairs of 8 bits
    high  (h/2, N/4, U)  uint8  the bits above; absent for pairs of 8 bits
    """

    bits: int

    @property
    def pairs(self) -> int:
        """Pairs in a unit."""
        return 1 if self.bits > 8 else 2

    @property
    def _high_bits(self) -> int:
        return self.bits * self.pairs - 8

    def fields(self, block_size: int, head_dim: int) -> dict[str, Field]:
        """The fields that `pack` returns."""
        units = head_dim // 2 // self.pairs
        if self.bits == 8:
            return {"low": Field((block_size, 2 * units), _BYTE)}
        high = Field((self._high_bits // 2, block_size // 4, units), _BYTE)
        return {"low": Field((block_size, units), _BYTE), "high": high}

    def head_dim(self, fields: Mapping[str, np.ndarray]) -> int:
        """The head dim D of packed fields."""
        return fields["low"].shape[-1] * (2 if self.bits >= 8 else 4)

    def pack(self, codes: np.ndarray) -> dict[str, np.ndarray]:
        """codes (..., N, D/2) below 2^bits, of any integer type → the fields."""
        if self.bits == 8:
            return {"low": codes.astype(np.uint8)}
        units: np.ndarray = codes.astype(np.uint16)
        if self.pairs == 2:
            units = units[..., 0::2] | units[..., 1::2] << self.bits
        high = (units >> 8).astype(np.uint8)
        *lead, block_size, width = high.shape
        q = high.reshape(*lead, 4, block_size // 4, width)
        if self._high_bits == 6:
            packed = pack_sixes(high)
        elif self._high_bits == 4:
            packed = q[..., :2, :, :] | q[..., 2:, :, :] << 4
        else:
            shift = np.array([0, 2, 4, 6], np.uint8)[:, None, None]
            packed = np.bitwise_or.reduce(q << shift, axis=-3, keepdims=True)
        return {"low": units.astype(np.uint8), "high": packed}

    def units(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Fields with one leading axis, (M, *shape) → units (M, N, U) uint16."""
        if self.bits == 8:
            return np.ascontiguousarray(fields["low"]).view("<u2")
        units: np.ndarray = fields["low"].astype(np.uint16)
        high: np.ndarray = fields["high"].astype(np.uint16)
        blocks, block_size, width = units.shape
        q: np.ndarray = units.reshape(blocks, 4, block_size // 4, width)
        # All operands have 16 bits from the start: conversions in between would cost more than the shifts.
        if self._high_bits == 6:
            q[:, :3] |= (high & 63) << 8
            high >>= 6
            q[:, 3] |= high[:, 0] << 8 | high[:, 1] << 10 | high[:, 2] << 12
        elif self._high_bits == 4:
            q[:, :2] |= (high & 15) << 8
            q[:, 2:] |= high >> 4 << 8
        else:
            for quarter in range(4):
                q[:, quarter] |= (high[:, 0] >> 2 * quarter & 3) << 8
        return units

    def codes(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inverse of `pack`: fields (..., *shape) → codes (..., N, D/2), uint8 or uint16."""
        low = fields["low"]
        if self.bits == 8:
            return low
        lead = low.shape[:-2]
        units = self.units({name: x.reshape(-1, *x.shape[len(lead) :]) for name, x in fields.items()})
        codes = np.stack([units >> self.bits * i & 2**self.bits - 1 for i in range(self.pairs)], -1)
        return codes.reshape(*lead, low.shape[-2], -1)

    def table(self, points: np.ndarray) -> np.ndarray:
        """points (2^bits, 2) float32 → a row of values for each unit, (2^(bits·pairs), 2·pairs) float32."""
        unit = np.arange(2 ** (self.bits * self.pairs))
        return np.concatenate([points[unit >> self.bits * i & 2**self.bits - 1] for i in range(self.pairs)], axis=1)

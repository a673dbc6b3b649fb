"""Fragment order: the order of codes in a record, in which a CUDA kernel loads them into registers.

A warp loads the codes of a record as A operands of the matrix instruction m16n8k16: the codes of each lane are
contiguous, so that 16-byte loads of 32 lanes read 512 contiguous bytes. The head of `cuda/fragments.cuh` describes the
bytes; this module converts the fields of `Codec.encode` to them and back.

Letters: N tokens of a block, D head dim, DP = D rounded up to 16. Lane 4·g + tg has g < 8 and tg < 4. A tile is one A
operand: 16 × 16 values, in four registers of two halves per lane; codes of pairs are numbered r = 0 … 3 like the
registers. Channels from D to DP have codes and values of zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

LANES = 32
ALIGNMENT = 16  # of every section of a record
_CHUNK = 4  # 4-byte words of a lane in one load


class Record(Protocol):
    """The sections of one codec's record. Its twin is the struct template `codec` in `cuda/codecs/<codec>.cuh`."""

    @property
    def codec(self) -> str:
        """Name of the file and of the struct."""

    @property
    def geometry(self) -> Geometry:
        """Side, N and D of the block."""

    @property
    def nbytes(self) -> int:
        """Bytes of the sections, a multiple of 16."""

    @property
    def rows(self) -> int:
        """Rows of 128 bytes that the codec's tables take in shared memory."""

    @property
    def tables(self) -> np.ndarray:
        """Constants in global memory, (bytes,) uint8, a multiple of 16; `constants` has offsets into them."""

    @property
    def points(self) -> np.ndarray | None:
        """(P, 1 or 2) float32: the value or pair of each code, if the kernel encodes by search in it; else None."""

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the struct beside those of the geometry."""

    def pack(self, fields: Mapping[str, np.ndarray]) -> np.ndarray:
        """Fields of `Codec.encode`, (..., *shape) → (..., nbytes) uint8."""

    def unpack(self, sections: np.ndarray) -> dict[str, np.ndarray]:
        """The inverse of `pack`."""


class _Order(NamedTuple):
    """A permutation: trailing axes `shape` are split into axes of sizes `cut`, which are stored in the order `axes`."""

    shape: tuple[int, ...]
    cut: tuple[int, ...]
    axes: tuple[int, ...]

    def apply(self, x: np.ndarray) -> np.ndarray:
        """(..., *shape) → (..., values)."""
        lead = x.shape[: x.ndim - len(self.shape)]
        cut = x.reshape(*lead, *self.cut)
        return cut.transpose(*range(len(lead)), *(len(lead) + axis for axis in self.axes)).reshape(*lead, -1)

    def invert(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `apply`."""
        lead, inverse = x.shape[:-1], np.argsort(self.axes)
        stored = x.reshape(*lead, *(self.cut[axis] for axis in self.axes))
        return stored.transpose(*range(len(lead)), *(len(lead) + axis for axis in inverse)).reshape(*lead, *self.shape)


@dataclass(frozen=True)
class Geometry:
    """Side, N and D of a block, and how its tiles are ordered. values: whether it holds values, not keys."""

    values: bool
    block_size: int
    head_dim: int

    @property
    def padded(self) -> int:
        """DP."""
        return -(-self.head_dim // 16) * 16

    @property
    def part(self) -> int:
        """Tokens of a part: a warp holds their codes in registers at once."""
        return min(self.block_size, 64 if self.padded <= 128 else 32)

    @property
    def parts(self) -> int:
        return self.block_size // self.part

    @property
    def tiles(self) -> int:
        """Tiles of a part."""
        return self.part // 16 * self.padded // 16

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the layout structs in CUDA."""
        return {
            "N": self.block_size,
            "D": self.head_dim,
            "DP": self.padded,
            "PART": self.part,
            "PARTS": self.parts,
            "PT": self.part // 16,
            "STEPS": self.padded // 16,
            "TILES": self.tiles,
            "VALUES": int(self.values),
        }

    def pairs(self, codes: np.ndarray) -> np.ndarray:
        """codes (..., N, D/2) → (..., PARTS, TILES, 32, 4): the codes of each lane and tile."""
        ordered = self._pair_order.apply(_padded(codes, self.padded // 2))
        return ordered.reshape(*codes.shape[:-2], self.parts, self.tiles, LANES, 4)

    def from_pairs(self, codes: np.ndarray) -> np.ndarray:
        """The inverse of `pairs`."""
        return self._pair_order.invert(codes.reshape(*codes.shape[:-4], -1))[..., : self.head_dim // 2]

    def halves(self, x: np.ndarray) -> np.ndarray:
        """x (..., N, D) → (..., PARTS · TILES · 32 · 8): the values in registers 0, 2, 1, 3 of each lane and tile."""
        return self._half_order.apply(_padded(x, self.padded))

    def from_halves(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `halves`."""
        return self._half_order.invert(x)[..., : self.head_dim]

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """x (..., N), one value per token → for each part [g][2i + h]: token 16i + 8h + g of the part."""
        return self._token_order.apply(x)

    def from_tokens(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `tokens`."""
        return self._token_order.invert(x)

    def channels(self, x: np.ndarray) -> np.ndarray:
        """x (..., D), one value per channel → (..., DP) as [tg][s][4]: channels 16s + 2tg + {0, 1, 8, 9}."""
        return self._channel_order.apply(_padded(x, self.padded))

    def from_channels(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `channels`."""
        return self._channel_order.invert(x)[..., : self.head_dim]

    @property
    def _pair_order(self) -> _Order:
        shape, rows, steps = (self.block_size, self.padded // 2), self.part // 16, self.padded // 16
        if self.values:  # part, u, r >> 1, tg, r & 1; j, g
            return _Order(shape, (self.parts, rows, 2, 4, 2, steps, 8), (0, 1, 5, 6, 3, 2, 4))
        # part, i, r & 1, g; s, r >> 1, tg
        return _Order(shape, (self.parts, rows, 2, 8, steps, 2, 4), (0, 4, 1, 3, 6, 5, 2))

    @property
    def _half_order(self) -> _Order:
        shape, rows, steps = (self.block_size, self.padded), self.part // 16, self.padded // 16
        if self.values:  # part, u, r >> 1, tg, half; j, g, r & 1
            return _Order(shape, (self.parts, rows, 2, 4, 2, steps, 8, 2), (0, 1, 5, 6, 3, 7, 2, 4))
        # part, i, r & 1, g; s, r >> 1, tg, half
        return _Order(shape, (self.parts, rows, 2, 8, steps, 2, 4, 2), (0, 4, 1, 3, 6, 2, 5, 7))

    @property
    def _token_order(self) -> _Order:
        return _Order((self.block_size,), (self.parts, self.part // 16, 2, 8), (0, 3, 1, 2))

    @property
    def _channel_order(self) -> _Order:
        return _Order((self.padded,), (self.padded // 16, 2, 4, 2), (2, 0, 1, 3))


def word_count(bits: int, tiles: int) -> int:
    """4-byte words of a lane for the codes of `tiles` tiles with `bits` per pair: 4, 6, 7, 8 or 10."""
    return tiles + -(-tiles // 4) if bits == 10 else -(-tiles * bits // 8)


def pack_pairs(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes (..., PARTS, TILES, 32, 4) below 2^bits → (..., PARTS · words · 128) uint8.

    With up to eight bits, a byte has a code in its upper bits and a digit of another code in its spare lower bits; the
    last codes are stored as digits only. With ten bits, words of the low bytes precede words whose bytes hold the two
    upper bits of four tiles.
    """
    tiles = codes.shape[-3]
    count = word_count(bits, tiles)
    words = np.zeros((*codes.shape[:-3], count, LANES, 4), np.uint8)
    if bits == 10:
        words[..., :tiles, :, :] = codes & 255
        for tile in range(tiles):
            words[..., tiles + tile // 4, :, :] |= (codes[..., tile, :, :] >> 8 << tile % 4 * 2).astype(np.uint8)
        return _chunked(words)
    spare = 8 - bits
    words[:] = codes[..., :count, :, :] << spare
    for word, tile, digit in _digits(bits, tiles):
        words[..., word, :, :] |= (codes[..., tile, :, :] >> digit * spare & 2**spare - 1).astype(np.uint8)
    return _chunked(words)


def unpack_pairs(packed: np.ndarray, bits: int, parts: int, tiles: int) -> np.ndarray:
    """The inverse of `pack_pairs`, uint16."""
    count = word_count(bits, tiles)
    words = _from_chunks(packed, parts, count).astype(np.uint16)
    codes = np.zeros((*words.shape[:-3], tiles, LANES, 4), np.uint16)
    if bits == 10:
        codes[:] = words[..., :tiles, :, :]
        for tile in range(tiles):
            codes[..., tile, :, :] |= (words[..., tiles + tile // 4, :, :] >> tile % 4 * 2 & 3) << 8
        return codes
    spare = 8 - bits
    codes[..., :count, :, :] = words >> spare
    for word, tile, digit in _digits(bits, tiles):
        codes[..., tile, :, :] |= (words[..., word, :, :] & 2**spare - 1) << digit * spare
    return codes


def _digits(bits: int, tiles: int) -> list[tuple[int, int, int]]:
    """(word whose spare bits hold the digit, tile of its code, index of the digit, lowest first)."""
    count = word_count(bits, tiles)
    span = bits // (8 - bits) if bits < 8 else 1
    return [((tile - count) * span + digit, tile, digit) for tile in range(count, tiles) for digit in range(span)]


def _chunked(words: np.ndarray) -> np.ndarray:
    """words (..., PARTS, W, 32, 4) uint8 → (..., bytes), in chunks of four words per lane; the last may have fewer."""
    *lead, parts, count, _, _ = words.shape
    cuts = [words[..., at : at + _CHUNK, :, :] for at in range(0, count, _CHUNK)]
    chunks = [cut.swapaxes(-3, -2).reshape(*lead, parts, -1) for cut in cuts]
    return np.concatenate(chunks, -1).reshape(*lead, -1)


def _from_chunks(packed: np.ndarray, parts: int, count: int) -> np.ndarray:
    """The inverse of `_chunked`."""
    lead = packed.shape[:-1]
    chunks = np.split(packed.reshape(*lead, parts, count * LANES * 4), range(512, count * LANES * 4, 512), axis=-1)
    words = [chunk.reshape(*lead, parts, LANES, -1, 4).swapaxes(-3, -2) for chunk in chunks]
    return np.concatenate(words, -3)


def as_bytes(x: np.ndarray) -> np.ndarray:
    """x (..., n) of any type → (..., n · item size) uint8, followed by zeros up to a multiple of 16."""
    raw = np.ascontiguousarray(x).view(np.uint8)
    return _padded(raw, -(-raw.shape[-1] // ALIGNMENT) * ALIGNMENT)


def from_bytes(raw: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    """The inverse of `as_bytes`: `count` values of each row."""
    return np.ascontiguousarray(raw[..., : count * dtype.itemsize]).view(dtype)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of sections."""
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


def _padded(x: np.ndarray, width: int) -> np.ndarray:
    """x (..., n) padded with zeros to (..., width)."""
    if x.shape[-1] == width:
        return x
    return np.concatenate([x, np.zeros((*x.shape[:-1], width - x.shape[-1]), x.dtype)], -1)

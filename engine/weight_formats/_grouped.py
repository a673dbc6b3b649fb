"""Blocks of GGUF files as integers: `Grouped`, and the functions that unpack bytes; and gguf's quantizers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Grouped:
    """Rows of a block format, exactly: nothing has been rounded. `in` values of a row make blocks of `VALUES` values,
    and blocks make groups of `GROUP` values.

        w = scale * sub_scale * (code - zero) + offset * sub_offset

    or TABLE[code] instead of (code - zero). A factor that is None is 1; without an offset its product is 0.

    codes: (rows, in) uint8, below 2^BITS.
    scale: (rows, in/VALUES) float16; float32 for formats whose scales are powers of two, which bfloat16 holds exactly.
    sub_scale: (rows, in/GROUP) int8, or None.
    offset: (rows, in/VALUES) float16, or None.
    sub_offset: (rows, in/GROUP) uint8, or None.
    zero, table: the constants ZERO and TABLE of the format; table is int8 (16,), or None.
    """

    codes: np.ndarray
    scale: np.ndarray
    sub_scale: np.ndarray | None = None
    offset: np.ndarray | None = None
    sub_offset: np.ndarray | None = None
    zero: int = 0
    table: np.ndarray | None = None

    def dequantize(self) -> np.ndarray:
        """The values (rows, in) float32: the factors are multiplied in the formula's order, as gguf does, so they equal
        gguf's to the bit."""
        rows, width = self.codes.shape
        if self.table is None:
            codes = self.codes.astype(np.float32)
            codes -= self.zero
        else:
            codes = self.table.astype(np.float32)[self.codes]
        scale = _product(self.scale, self.sub_scale)
        with np.errstate(all="ignore"):  # a damaged scale gives infinities; a warning would not help the user
            values = codes.reshape(*scale.shape, width // max(1, scale.shape[1]))
            values *= scale[..., None]
            if self.offset is not None:
                values += _product(self.offset, self.sub_offset)[..., None]
        return values.reshape(rows, width)


def _product(factor: np.ndarray, sub_factor: np.ndarray | None) -> np.ndarray:
    """factor * sub_factor of every group, float32; factor itself if it has no sub_factor."""
    wide = factor.astype(np.float32)
    if sub_factor is None:
        return wide
    groups = sub_factor.reshape(*factor.shape, sub_factor.shape[1] // max(1, factor.shape[1]))
    with np.errstate(all="ignore"):
        return (wide[..., None] * groups.astype(np.float32)).reshape(sub_factor.shape)


def fields(raw: np.ndarray, *sizes: int) -> list[np.ndarray]:
    """raw (rows, bytes of a row) uint8 of blocks that consist of fields of these sizes → each field, (rows, blocks,
    size) uint8, as views."""
    rows, nbytes = raw.shape
    blocks = raw.reshape(rows, nbytes // sum(sizes), sum(sizes))
    return np.split(blocks, np.cumsum(sizes)[:-1], axis=-1)


def unpack_bits(packed: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Codes of `bits` bits from packed (rows, blocks, n) uint8 → (rows, blocks * n * 8 / bits) uint8. Each run of
    `width` bytes holds 8 / bits runs of `width` codes, the first in the lowest bits."""
    rows, blocks, n = packed.shape
    codes = np.empty((rows, blocks, n // width, 8 // bits, width), np.uint8)
    runs = packed.reshape(rows, blocks, n // width, width)
    for place in range(8 // bits):
        np.right_shift(runs, np.uint8(bits * place), out=codes[:, :, :, place])
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(rows, blocks * n * (8 // bits))


def halves(field: np.ndarray) -> np.ndarray:
    """(rows, blocks, 2) uint8 → (rows, blocks) float16."""
    return np.ascontiguousarray(field).view("<f2")[..., 0]


def flat(field: np.ndarray) -> np.ndarray:
    """(rows, blocks, n) → (rows, blocks * n)."""
    rows, blocks, n = field.shape
    return np.ascontiguousarray(field).reshape(rows, blocks * n)


def scales_and_mins(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima of 6 bits that Q4_K and Q5_K pack into 12 bytes: (rows, blocks, 12) uint8 → int8 and
    uint8 (rows, blocks * 8)."""
    scale, low, rest = np.split(packed, 3, axis=-1)
    scales = np.concatenate([scale & 0x3F, (rest & 0x0F) | ((scale >> 2) & 0x30)], axis=-1)
    mins = np.concatenate([low & 0x3F, (rest >> 4) | ((low >> 2) & 0x30)], axis=-1)
    return flat(scales).view(np.int8), flat(mins)


def quantize_gguf(stored: str, x: np.ndarray) -> np.ndarray:
    """`quantize` of a weight format, by the package gguf, which names it `stored`."""
    from gguf.constants import GGMLQuantizationType  # imported only where weights are converted
    from gguf.quants import quantize

    with np.errstate(all="ignore"):  # NaN gives NaN; a warning would not help the user
        return quantize(x, GGMLQuantizationType[stored])

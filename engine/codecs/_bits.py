"""Codes of 4 and of 6 bits packed into bytes without unused bits."""

from __future__ import annotations

import numpy as np


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """codes (..., 2n) uint8 below 16 → (..., n) uint8: the code of even index in the low half of its byte.

    >>> pack_nibbles(np.array([0xA, 0xB, 0x1, 0x2], np.uint8)).tobytes().hex()
    'ba21'
    """
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack_nibbles`: (..., n) uint8 → (..., 2n) uint8."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_sixes(codes: np.ndarray) -> np.ndarray:
    """codes (..., 4n, g) uint8 below 64 → (..., 3, n, g) uint8: rows t, t+n, t+2n and t+3n share three bytes.

    The low six bits of byte i hold row t+i·n; its top two hold bits 2i and 2i+1 of row t+3n. So three quarters of
    the rows are read with one mask.

    >>> pack_sixes(np.array([[0b000001], [0b000010], [0b000011], [0b100111]], np.uint8)).ravel().tolist() == [
    ...     0b11_000001, 0b01_000010, 0b10_000011]
    True
    """
    *lead, rows, width = codes.shape
    quarters = codes.reshape(*lead, 4, rows // 4, width)
    split = quarters[..., 3:, :, :] >> np.array([0, 2, 4], np.uint8)[:, None, None]
    return quarters[..., :3, :, :] | split << 6


def unpack_sixes(packed: np.ndarray, out: np.ndarray) -> None:
    """The inverse of `pack_sixes`: packed (..., 3, n, g) uint8 → out (..., 4, n, g) uint8, of any strides."""
    np.bitwise_and(packed, 63, out=out[..., :3, :, :])
    high = packed >> 6
    out[..., 3, :, :] = high[..., 0, :, :] | high[..., 1, :, :] << 2 | high[..., 2, :, :] << 4


def pack_row_of_sixes(codes: np.ndarray) -> np.ndarray:
    """codes (..., 4n) uint8 below 64 → (..., 3n) uint8: `pack_sixes` along a row, columns j, j+n, j+2n and j+3n."""
    packed = pack_sixes(codes[..., None])
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 4 * 3)


def unpack_row_of_sixes(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack_row_of_sixes`: (..., 3n) uint8 → (..., 4n) uint8."""
    *lead, width = packed.shape
    codes = np.empty((*lead, 4, width // 3, 1), np.uint8)
    unpack_sixes(packed.reshape(*lead, 3, width // 3, 1), codes)
    return codes.reshape(*lead, width // 3 * 4)

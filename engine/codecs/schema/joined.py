"""Two adjacent codes joined into one, the first in the low bits: one lookup decodes both."""

from __future__ import annotations

import numpy as np


def join(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes (..., 2n) uint8 below 2^bits → (..., n), with bits ≤ 4 uint8; with 8 bits uint16."""
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u2")
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(bits)


def split(codes: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of `join`: (..., n) → (..., 2n) uint8."""
    if bits == 8:
        return np.ascontiguousarray(codes, "<u2").view(np.uint8)
    both = np.stack([codes & np.uint8(2**bits - 1), codes >> np.uint8(bits)], -1)
    return both.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def join_wide(codes: np.ndarray, bits: int) -> np.ndarray:
    """codes (..., 2n) uint8 below 2^bits, the last axis contiguous → (..., n) uint16."""
    both = codes.view("<u2")
    return both if bits == 8 else both - (both >> 8) * np.uint16(256 - 2**bits)


def joined_table(points: np.ndarray, bits: int) -> np.ndarray:
    """points (2^bits, width) → the points of joined codes, (4^bits, 2·width)."""
    both = np.arange(4**bits)
    return np.concatenate([points[both & 2**bits - 1], points[both >> bits]], axis=1)

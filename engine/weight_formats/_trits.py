"""Blocks of GGUF files whose bytes are digits of base 3, which stand for -1, 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Trits:
    """Rows of a block format, exactly: nothing has been rounded. `in` values of a row make blocks of `VALUES` values.

        w = scale * (digit - 1)

    A byte is a fraction of 256, rounded up, so that its digits come one by one, the highest first: three times the byte
    is a digit, in the bits above the lowest 8, and the rest, in these.

    runs: bytes and digits of each run of a block; its values come by digits, then by bytes.
    packed: (rows, blocks, bytes of all runs) uint8.
    scale: (rows, blocks) float16.
    """

    runs: Sequence[tuple[int, int]]
    packed: np.ndarray
    scale: np.ndarray

    def integers(self) -> np.ndarray:
        """The values over their scale, int8 (rows, in)."""
        rows, blocks, _ = self.packed.shape
        values, start = [], 0
        for count, digits in self.runs:
            left = self.packed[..., start : start + count].astype(np.uint16)
            start += count
            for _ in range(digits):
                left *= 3
                values.append((left >> 8).astype(np.int8) - np.int8(1))
                left &= 255
        return np.concatenate(values, axis=-1).reshape(
            rows, blocks * sum(count * digits for count, digits in self.runs)
        )

    def dequantize(self) -> np.ndarray:
        """The values (rows, in) float32, which equal gguf's to the bit."""
        integers = self.integers()
        with np.errstate(all="ignore"):  # a damaged scale gives infinities; a warning would not help the user
            return integers * np.repeat(
                self.scale.astype(np.float32), integers.shape[1] // max(1, self.scale.shape[1]), axis=1
            )

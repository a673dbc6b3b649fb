"""Half precision: every value rounded to a float16. Not rotated.

Bits per value: 16. Decode: three integer passes and one multiplication (`_arrays.widen`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import BaseCodec, Field
from polarlm.engine.codecs._arrays import HALF_MAX, checked, destination, widen
from polarlm.engine.codecs._checks import check_no_options

NAMES = ("f16",)


@dataclass(frozen=True)
class Half(BaseCodec):
    """Half precision. Values beyond ±65504 saturate."""

    name: str = "f16"

    def fields(self, block_size: int, head_dim: int) -> dict[str, Field]:
        return {"values": Field((block_size, head_dim), np.dtype(np.float16))}

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        return {"values": np.clip(checked(x, self.name), -HALF_MAX, HALF_MAX).astype(np.float16)}

    def decode(self, codes: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        out = destination(out, codes["values"].shape)
        widen(codes["values"], out)
        return out


def create(name: str, options: tuple[str, ...]) -> Half:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return Half()

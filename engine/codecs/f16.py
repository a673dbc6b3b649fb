"""Half precision: every value is rounded to float16. No rotation.

Bits per value: 16. Decode: three integer passes and one multiplication (`widen`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.schema.arrays import HALF_MAX, widen
from polarlm.engine.codecs.schema.streams import Schema, numbers

NAMES = ("f16",)


@dataclass(frozen=True)
class HalfPrecision(Codec):
    """Half precision. Values beyond ±65504 saturate."""

    name: str = "f16"

    def schema(self, block_size: int, head_dim: int) -> Schema:
        return {"values": numbers(np.float16, block_size, head_dim)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        return fields["values"].shape[-2:]

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        return {"values": np.clip(x, -HALF_MAX, HALF_MAX).astype(np.float16)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        widen(streams["values"], out)


def create(name: str, options: tuple[str, ...]) -> HalfPrecision:
    check_no_options(name, options)
    return HalfPrecision()

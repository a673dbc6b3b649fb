"""FP8 E4M3 as vLLM stores it: with the scale 1.0, or with a scale for each token and head. No rotation.

    x ≈ ±s·m·2^(e − 10),  e = 1 … 15, m = 8 … 15;  or e = 1, m = 0 … 7;  at most 448·s

`fp8` has s = 1, `fp8-token-head` s = max|x| of the vector / 448, a float32.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, table 1, E4M3; the scale 1.0 is vLLM's default of
`--kv-cache-dtype fp8_e4m3`, where nothing was calibrated; `fp8_per_token_head` has the others. To the nearest, halves
to even; beyond ±448 saturates. Bits per value: 8, and 8 + 32/D, 8.5 at D = 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("fp8", "fp8-token-head")

_SIGN, _MOST = 0x80, 448


def _magnitudes() -> np.ndarray:
    """What the codes 0 to 126 stand for (127 is NaN), (127,) float64."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


E4M3 = _magnitudes()


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the magnitudes of x in an ascending `table`; halves go to the even code."""
    size, middles = np.abs(x).astype(np.float64), (table[1:] + table[:-1]) / 2
    code = np.searchsorted(middles, size, side="left")
    code += (code < len(middles)) & (size == middles[np.minimum(code, len(middles) - 1)]) & (code % 2 == 1)
    return code.astype(np.uint8)


@dataclass(frozen=True)
class Fp8(Codec):
    """Each value by itself."""

    name: str = "fp8"

    def schema(self, block_size: int, head_dim: int) -> Schema:
        return {"codes": codes(8, block_size, head_dim)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        *_, block_size, head_dim = fields["codes"].shape
        return block_size, head_dim

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        return {"codes": nearest(x, E4M3) | np.where(np.signbit(x), _SIGN, 0).astype(np.uint8)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        code = streams["codes"]
        out[...] = np.where(code & _SIGN, -1, 1) * E4M3[np.minimum(code & 0x7F, 126)]


@dataclass(frozen=True)
class ScaledFp8(Fp8):
    """Each value over its vector's scale."""

    name: str = "fp8-token-head"

    def schema(self, block_size: int, head_dim: int) -> Schema:
        return {"scale": numbers(np.float32, block_size), **super().schema(block_size, head_dim)}

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        scale = (np.abs(x).max(-1) / np.float32(_MOST)).astype(np.float32)
        return {"scale": scale, **super().quantize(x / np.where(scale > 0, scale, 1)[..., None])}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        super().dequantize(streams, out)
        out *= streams["scale"][..., None]


def create(name: str, options: tuple[str, ...]) -> Fp8:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return ScaledFp8() if name == ScaledFp8.name else Fp8()

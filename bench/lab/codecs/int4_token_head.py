"""vLLM's int4_per_token_head: 4 bits with a scale and a zero point for each token and head, after a rotation.

    scale = max((max x − min x)/15, 10⁻⁶),  zero = round(−min x / scale),  code = round(x/scale + zero), 0 … 15
    x ≈ scale·(code − zero)

Source: vLLM, pull request 40835 (`int4_per_token_head.py`): a Hadamard matrix with random signs; the zero point, of 4
bits, takes the place of the last bits of the scale, a float32. Halves away from zero.
Bits per value: 4 + 32/D, 4.5 at D = 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.parts.rotation import signed_hadamard
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("int4-token-head",)

_MOST = 15


@dataclass(frozen=True)
class Int4TokenHead(Codec):
    """One scale for each vector."""

    name: str = "int4-token-head"

    multiples = 8, 1

    def rotation(self, head_dim: int) -> np.ndarray:
        return signed_hadamard(head_dim)

    def schema(self, block_size: int, head_dim: int) -> Schema:
        return {"scale": numbers(np.uint32, block_size), "codes": codes(4, block_size, head_dim)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        block_size = fields["scale"].shape[-1]
        return block_size, 2 * fields["codes"].shape[-1] // block_size

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        scale = np.maximum((high - low) / np.float32(_MOST), np.float32(1e-6))
        zero = np.clip(_round(-low / scale), 0, _MOST)
        code = np.clip(_round(x / scale + zero), 0, _MOST)
        bits = (scale[..., 0].view(np.uint32) & ~np.uint32(_MOST)) | zero[..., 0].astype(np.uint32)
        return {"scale": bits, "codes": code.astype(np.uint8)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        bits = streams["scale"][..., None]
        scale, zero = (bits & ~np.uint32(_MOST)).view(np.float32), (bits & np.uint32(_MOST)).astype(np.float32)
        np.multiply(streams["codes"] - zero, scale, out=out)


def _round(x: np.ndarray) -> np.ndarray:
    return np.trunc(x + np.copysign(np.float32(0.5), x))


def create(name: str, options: tuple[str, ...]) -> Int4TokenHead:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return Int4TokenHead()

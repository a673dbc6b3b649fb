"""The two ggml types most used for llama.cpp's KV cache: 32 values share one scale. No rotation.

    q8_0: d = max|x| / 127, x ≈ d·(code − 128), codes 1 … 255
    q4_0: d = −m / 8, m the value of largest magnitude with its sign, x ≈ d·(code − 8), codes 0 … 15

Source: ggml, `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref`, `dequantize_row_q8_0` and `dequantize_row_q4_0`:
the scale is rounded to half precision after the codes are chosen, halves round away from zero (q8_0) or up (q4_0).
Bits per value: 8 + 16/32 = 8.5 and 4 + 16/32 = 4.5.
Decode, per value: a subtraction, a conversion and a multiplication; for q4_0 also a mask or a shift.

**Streams.** N tokens of one KV head, G = D/32 groups; ggml's own block is the scale and then the codes of one group,
the codes of q8_0 less 128.

    scale  (N, G)      float16  d
    codes  (N, G, 32)  8 or 4 bits

Values beyond ±65376 saturate; ggml's scale would become infinity. A scale that is 0 in half precision decodes to zeros
for any codes. If 1/d exceeds a float32, all codes stand for 0.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.schema.arrays import SATURATION
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("q8_0", "q4_0")

_GROUP = 32


@dataclass(frozen=True)
class Grouped(Codec):
    """What both types share: groups of 32 channels of one token, and codes with a zero point."""

    name: str
    bits: ClassVar[int]
    multiples = _GROUP, 1

    @property
    def zero(self) -> int:
        return 1 << self.bits - 1

    def schema(self, block_size: int, head_dim: int) -> Schema:
        groups = block_size, head_dim // _GROUP
        return {"scale": numbers(np.float16, *groups), "codes": codes(self.bits, *groups, _GROUP)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        *_, block_size, groups = fields["scale"].shape
        return block_size, _GROUP * groups

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        groups = np.clip(x, -SATURATION, SATURATION).reshape(*x.shape[:-1], -1, _GROUP)
        scale, signed = self.round(groups)
        return {"scale": scale[..., 0].astype(np.float16), "codes": (signed + self.zero).astype(np.uint8)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        signed = (streams["codes"] - np.uint8(self.zero)).view(np.int8)
        np.multiply(signed, streams["scale"][..., None].astype(np.float32), out=out.reshape(signed.shape))

    @abstractmethod
    def round(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """groups (M, N, G, 32) → d (M, N, G, 1), and codes minus the zero point (M, N, G, 32), both float32."""


class Q8(Grouped):
    bits = 8

    def round(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
        scaled = groups * _inverse(scale)
        size = np.abs(scaled)
        whole = np.floor(size)
        whole += size - whole >= 0.5  # adding 0.5 before `floor` could round up a value just under a half
        return scale, np.copysign(whole, scaled)


class Q4(Grouped):
    """Four bits: the value of largest magnitude has code 0."""

    bits = 4

    def round(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        farthest = np.abs(groups).argmax(-1, keepdims=True)
        scale = np.take_along_axis(groups, farthest, -1) / np.float32(-8)
        scaled = np.minimum(groups * _inverse(scale) + np.float32(8.5), np.float32(15))
        return scale, np.floor(scaled) - np.float32(8)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale in float32, or 0 where that overflows."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / scale
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def create(name: str, options: tuple[str, ...]) -> Q8 | Q4:
    check_no_options(name, options)
    return Q8(name) if name == "q8_0" else Q4(name)

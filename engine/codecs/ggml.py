"""The two ggml types most used for llama.cpp's KV cache: 32 values share one scale. Not rotated.

    q8_0: d = max|x| / 127, x ≈ d·code, codes −127 … 127
    q4_0: d = −m / 8, m the value of largest magnitude with its sign, x ≈ d·(code − 8), codes 0 … 15

Source: ggml, `quantize_row_q8_0_ref` and `quantize_row_q4_0_ref`, `dequantize_row_q8_0` and `dequantize_row_q4_0`:
the scale is rounded to half precision after the codes are chosen, halves round away from zero (q8_0) or up (q4_0).
Bits per value: 8 + 16/32 = 8.5 and 4 + 16/32 = 4.5.
Decode, per value: one conversion and one multiplication; for q4_0 also a mask or a shift and a subtraction.

**Bytes.** N tokens of one KV head, G = D/32 groups; ggml's own block is the scale and then the codes of one group.

    scale  (N, G)      float16  d
    codes  (N, G, 32)  int8     q8_0
           (N, G, 16)  uint8    q4_0: values i (low four bits) and i + 16 (high) of the group in byte i

Values beyond ±65376 saturate; ggml's scale would become infinity. A scale that is 0 in half precision decodes to zeros
for any codes. If 1/d exceeds a float32, the codes are 0 (q8_0) and 8 (q4_0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import BaseCodec, Field
from polarlm.engine.codecs._arrays import SATURATION, checked, destination
from polarlm.engine.codecs._checks import check_head_dim, check_no_options

NAMES = ("q8_0", "q4_0")

_GROUP = 32


@dataclass(frozen=True)
class _Grouped(BaseCodec):
    """The common part of both types: groups of 32 channels of one token."""

    name: str

    def check(self, head_dim: int, block_size: int) -> None:
        check_head_dim(self.name, head_dim, _GROUP)

    def _groups(self, x: np.ndarray) -> np.ndarray:
        """x (..., N, D) → (..., N, G, 32) float32, saturated."""
        x = checked(x, self.name)
        self.check(x.shape[-1], x.shape[-2])
        return np.clip(x, -SATURATION, SATURATION).reshape(*x.shape[:-1], x.shape[-1] // _GROUP, _GROUP)


class Q8(_Grouped):
    """Eight bits, symmetric."""

    def fields(self, block_size: int, head_dim: int) -> dict[str, Field]:
        groups = head_dim // _GROUP
        return {
            "scale": Field((block_size, groups), np.dtype(np.float16)),
            "codes": Field((block_size, groups, _GROUP), np.dtype(np.int8)),
        }

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        groups = self._groups(x)
        scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
        scaled = groups * _inverse(scale)
        size = np.abs(scaled)
        whole = np.floor(size)
        whole += size - whole >= 0.5  # adding a half instead could round a value just under a half upwards
        return {"scale": scale[..., 0].astype(np.float16), "codes": np.copysign(whole, scaled).astype(np.int8)}

    def decode(self, codes: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        *lead, groups, _ = codes["codes"].shape
        out = destination(out, (*lead, groups * _GROUP))
        np.multiply(
            codes["codes"], codes["scale"][..., None].astype(np.float32), out=out.reshape(*lead, groups, _GROUP)
        )
        return out


class Q4(_Grouped):
    """Four bits: the value of largest magnitude has code 0."""

    def fields(self, block_size: int, head_dim: int) -> dict[str, Field]:
        groups = head_dim // _GROUP
        return {
            "scale": Field((block_size, groups), np.dtype(np.float16)),
            "codes": Field((block_size, groups, _GROUP // 2), np.dtype(np.uint8)),
        }

    def encode(self, x: np.ndarray) -> dict[str, np.ndarray]:
        groups = self._groups(x)
        farthest = np.abs(groups).argmax(-1, keepdims=True)
        scale = np.take_along_axis(groups, farthest, -1) / np.float32(-8)
        codes = np.minimum(groups * _inverse(scale) + np.float32(8.5), np.float32(15)).astype(np.uint8)
        low, high = np.split(codes, 2, axis=-1)
        return {"scale": scale[..., 0].astype(np.float16), "codes": low | high << 4}

    def decode(self, codes: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        packed = codes["codes"]
        *lead, groups, half = packed.shape
        out = destination(out, (*lead, 2 * groups * half))
        values = out.reshape(*lead, groups, 2, half)
        values[..., 0, :] = packed & 15
        values[..., 1, :] = packed >> 4
        values -= 8
        values *= codes["scale"][..., None, None].astype(np.float32)
        return out


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale float32, and 0 where that exceeds a float32."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = 1 / scale
    return np.where(np.isinf(inverse), np.float32(0), inverse)


def create(name: str, options: tuple[str, ...]) -> Q8 | Q4:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return Q8(name) if name == "q8_0" else Q4(name)

"""NVFP4: values of 4 bits (E2M1), a scale of 8 bits (E4M3) for 16 of them, and one in float32 for all. No rotation.

    x ≈ g·s·v,  v in ±{0, .5, 1, 1.5, 2, 3, 4, 6},  s = E4M3(max|x| of 16 / (6·g)),  g = max|x| of all / (6·448)

Source: NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference", 2025; its KV cache has the same
format. There a tensor has one g; here a block of 64 tokens of a head has one, which is never worse.
Bits per value: 4 + 8/16 = 4.5, and 32 for a block. To the nearest, halves to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.bench.lab.codecs.fp8 import E4M3, nearest
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("nvfp4",)

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_GROUP, _SIGN = 16, 8


@dataclass(frozen=True)
class Nvfp4(Codec):
    """Groups of 16 channels of one token."""

    name: str = "nvfp4"

    multiples = _GROUP, 1

    def schema(self, block_size: int, head_dim: int) -> Schema:
        groups = block_size, head_dim // _GROUP
        return {"all": numbers(np.float32, 1), "scale": codes(8, *groups), "codes": codes(4, *groups, _GROUP)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        *_, block_size, groups = fields["scale"].shape
        return block_size, _GROUP * groups

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        groups = x.reshape(*x.shape[:-1], -1, _GROUP)
        most = np.abs(groups).max(-1, keepdims=True)
        whole = (most.max(axis=(1, 2, 3), keepdims=True) / (E2M1[-1] * E4M3[-1])).astype(np.float32)
        scale = nearest(most / (E2M1[-1] * np.where(whole > 0, whole, 1)), E4M3)
        step = whole * E4M3[scale]
        code = nearest(groups / np.where(step > 0, step, 1), E2M1) * (step > 0).astype(np.uint8)
        return {"all": whole.reshape(-1, 1), "scale": scale[..., 0], "codes": code | np.uint8(_SIGN) * (groups < 0)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        step = streams["all"][..., None].astype(np.float64) * E4M3[streams["scale"]]
        signed = np.where(streams["codes"] & _SIGN, -1, 1) * E2M1[streams["codes"] & 7]
        out[...] = (signed * step[..., None]).reshape(out.shape)


def create(name: str, options: tuple[str, ...]) -> Nvfp4:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return Nvfp4()

"""KIVI at four bits: 32 values share a scale and a zero point. Keys by channel, values by token. No rotation.

    code = round((x − zero) / scale),  zero = min x,  scale = (max x − min x) / 15;  x ≈ scale·code + zero

Source: Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024, §3: keys have outlier
channels, so a group is 32 tokens of one channel (`kivi4`); values have none, so a group is 32 channels of one token
(`kivi4+token`). The source's full-precision residual is the cache's current block.
Bits per value: 4 + (16 + 16)/32 = 5.
Decode, per value: a mask or a shift, one conversion, one multiplication and one addition.

**Streams.** N tokens of one KV head.

    scale, zero  (N/32, D)  float16  by channel, or (N, D/32) by token
    codes        (N, D)     4 bits

Zero point and scale are rounded to half precision before the codes are chosen. Values beyond ±65376 saturate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.schema.arrays import SATURATION
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("kivi4",)

_GROUP = 32


@dataclass(frozen=True)
class Kivi4(Codec):
    name: str = "kivi4"
    by_token: bool = False

    @property
    def multiples(self) -> tuple[int, int]:
        return (_GROUP, 1) if self.by_token else (2, _GROUP)

    def schema(self, block_size: int, head_dim: int) -> Schema:
        groups = (block_size, head_dim // _GROUP) if self.by_token else (block_size // _GROUP, head_dim)
        scales = {name: numbers(np.float16, *groups) for name in ("scale", "zero")}
        return {**scales, "codes": codes(4, block_size, head_dim)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        *_, tokens, channels = fields["scale"].shape
        return (tokens, _GROUP * channels) if self.by_token else (_GROUP * tokens, channels)

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        grouped = self._group(np.clip(x, -SATURATION, SATURATION))
        low, high = grouped.min(self._axis, keepdims=True), grouped.max(self._axis, keepdims=True)
        scale, zero = ((high - low) / np.float32(15)).astype(np.float16), low.astype(np.float16)
        step = np.where(scale == 0, np.float16(1), scale).astype(np.float32)
        values = np.clip(np.rint((grouped - zero.astype(np.float32)) / step), 0, 15).astype(np.uint8)
        return {"scale": scale.squeeze(self._axis), "zero": zero.squeeze(self._axis), "codes": values.reshape(x.shape)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        scale, zero = (np.expand_dims(streams[name], self._axis).astype(np.float32) for name in ("scale", "zero"))
        grouped = self._group(out)
        np.multiply(self._group(streams["codes"]), scale, out=grouped)
        grouped += zero

    @property
    def _axis(self) -> int:
        return -1 if self.by_token else -2

    def _group(self, x: np.ndarray) -> np.ndarray:
        """x (..., N, D), C-contiguous → a view: (..., N, D/32, 32) by token, (..., N/32, 32, D) by channel."""
        *lead, block_size, head_dim = x.shape
        if self.by_token:
            return x.reshape(*lead, block_size, head_dim // _GROUP, _GROUP)
        return x.reshape(*lead, block_size // _GROUP, _GROUP, head_dim)


def create(name: str, options: tuple[str, ...]) -> Kivi4:
    if options not in ((), ("token",)):
        raise ValueError(f"Cache type {name} has one option, token: write {name} for keys, {name}+token for values.")
    return Kivi4("+".join((name, *options)), bool(options))

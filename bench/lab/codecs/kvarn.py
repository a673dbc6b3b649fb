"""KVarN: a rotation, then scales of tokens and of channels that make all variances of a block equal, then rounding.

A block after the rotation is divided by scales of its tokens and of its channels. These are found by dividing by the
standard deviations of tokens and of channels in turn, 16 times; the scales with the least imbalance are taken: the
largest deviation of a token over the smallest, plus the same of channels. Then codes with a scale and a zero point (the
minimum), for each channel of keys and each token of values, which take up the scale of that channel or token.

    keys:    x ≈ t_token·(a_channel·code + z_channel),    values:    x ≈ c_channel·(a_token·code + z_token)

Source: Muller et al., "KVarN: Variance-Normalized KV-Cache Quantization", arXiv 2606.03458, and the limits of its code
(vLLM, pull request 46613): logs of scales from −0.3 to 10, deviations from 10⁻³ to 10³. A block is a tile here, of 64
tokens. All scales are halves. Bits per value: b + (2·16/64 + 16/D) for keys and b + (2·16/D + 16/64) for values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from polarlm.bench.lab.codecs.ggml_rotated import hadamard
from polarlm.engine.codecs import Codec
from polarlm.engine.codecs.parts.checks import check_no_options
from polarlm.engine.codecs.schema.streams import Schema, codes, numbers

NAMES = ("kvarn-k4", "kvarn-v4", "kvarn-v2")

_TIMES = 16
_LOGS, _DEVIATIONS = (-0.3, 10.0), (1e-3, 1e3)


@dataclass(frozen=True)
class KVarN(Codec):
    """Of keys, by channel, or of values, by token."""

    name: str
    bits: int

    @property
    def serves(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset("k" if "-k" in self.name else "v")

    @property
    def _axis(self) -> int:
        """The axis of (M, N, D) along which values share a scale and a zero point."""
        return 1 if self.serves == {"k"} else 2

    def check(self, head_dim: int, block_size: int) -> None:
        if head_dim & (head_dim - 1) or head_dim < 8:
            raise ValueError(f"Cache type {self.name} is for heads of a power of two, and these have {head_dim}.")

    def rotation(self, head_dim: int) -> np.ndarray:
        return hadamard(head_dim)

    def schema(self, block_size: int, head_dim: int) -> Schema:
        main, other = (head_dim, block_size) if self._axis == 1 else (block_size, head_dim)
        scales = {"scale": numbers(np.float16, main), "zero": numbers(np.float16, main)}
        return {**scales, "other": numbers(np.float16, other), "codes": codes(self.bits, block_size, head_dim)}

    def sizes(self, fields: Mapping[str, np.ndarray]) -> tuple[int, int]:
        main, other = fields["scale"].shape[-1], fields["other"].shape[-1]
        return (other, main) if self._axis == 1 else (main, other)

    def quantize(self, x: np.ndarray) -> dict[str, np.ndarray]:
        axis, most = self._axis, (1 << self.bits) - 1
        # What shares no scale of codes is first: tokens of keys, channels of values.
        tokens, channels = variance_scales(x.astype(np.float64), (0, 1) if axis == 1 else (1, 0))
        even = x / tokens / channels
        low = even.min(axis, keepdims=True)
        step = np.maximum((even.max(axis, keepdims=True) - low) / most, 1e-10)
        code = np.clip(np.rint((even - low) / step), 0, most)
        main, other = (channels, tokens) if axis == 1 else (tokens, channels)
        numbers = {"scale": main * step, "zero": main * low, "other": other}
        halves = {name: np.clip(value, -65504, 65504).astype(np.float16) for name, value in numbers.items()}
        scales = {name: half.reshape(len(x), -1) for name, half in halves.items()}
        return {**scales, "codes": code.astype(np.uint8)}

    def dequantize(self, streams: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        main, other = self._axis, 3 - self._axis
        scale, zero = (np.expand_dims(streams[name].astype(np.float32), main) for name in ("scale", "zero"))
        factor = np.expand_dims(streams["other"].astype(np.float32), other)
        np.multiply(streams["codes"] * scale + zero, factor, out=out)


def variance_scales(x: np.ndarray, order: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Scales of tokens (M, N, 1) and of channels (M, 1, D) of blocks x (M, N, D). order: which of these come first."""
    logs = [np.zeros((len(x), *shape)) for shape in ((x.shape[1], 1), (1, x.shape[2]))]
    best, least = [np.exp(log) for log in logs], _imbalance(x)
    for _ in range(_TIMES):
        for part in order:  # a token's deviation is over its channels, a channel's over its tokens
            now = x / np.exp(logs[0]) / np.exp(logs[1])
            deviation = now.std(axis=2 - part, ddof=1, keepdims=True).clip(*_DEVIATIONS)
            logs[part] = (logs[part] + np.log(deviation)).clip(*_LOGS)
        scales = [np.exp(log) for log in logs]
        imbalance = _imbalance(x / scales[0] / scales[1])
        better = (imbalance <= least)[:, None, None]
        best = [np.where(better, new, old) for new, old in zip(scales, best, strict=True)]
        least = np.minimum(imbalance, least)
    return best[0], best[1]


def _imbalance(x: np.ndarray) -> np.ndarray:
    spreads = [x.std(axis=axis, ddof=1) for axis in (1, 2)]
    return sum(spread.max(-1) / np.maximum(spread.min(-1), 1e-8) for spread in spreads)


def create(name: str, options: tuple[str, ...]) -> KVarN:
    """Raises ValueError on any option."""
    check_no_options(name, options)
    return KVarN(name, int(name[-1]))

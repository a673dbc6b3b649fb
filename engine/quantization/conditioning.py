"""Conditioning: transforms of keys and values before a codec, and the matching ones of queries and of the output.

Without quantization none of them changes attention. They change the vectors that a codec has to represent:

* Centring. softmax(q·k + c) does not depend on c, so the mean μ of a block of keys can be taken out and its product
  with q added back once per block: q·k = q·μ + q·(k − μ). A constant key bias, which a rotation would spread over all
  channels, then costs the codec nothing.
* Smoothing. For any positive s, q·k = (s∘q)·(k/s): channels with a large variance of keys and a small one of queries
  are scaled down, so that the codec does not spend its precision on them (as in Xiao et al., "SmoothQuant", 2023, §4).
* Scaling. Codes have a limited range, so keys and values of each KV head are divided by a power of two near their rms.
  Queries are multiplied by their keys' power, the attention output by its values' power. Only exponents change.
* Rotation. For orthogonal W, (qW)·(kW) = q·k. Each codec has its W (`Codec.rotation`). Queries are rotated by the W of
  the keys; values have their own, and the attention output is rotated back by it once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Scale(NamedTuple):
    """Divisors s of the keys and of the values of one layer, float32, positive."""

    keys: np.ndarray  # (K, D): smoothing times a power of two; equal on both channels of a RoPE pair
    values: np.ndarray  # (K,): powers of two


@dataclass(frozen=True)
class Conditioning:
    """The transform of one layer's vectors to the stored space. key_rotation, value_rotation: W (D, D) float32
    orthogonal, applied as x @ W, or None. scale: divisors of keys and values, applied before the rotation, or None."""

    key_rotation: np.ndarray | None = None
    value_rotation: np.ndarray | None = None
    scale: Scale | None = None

    def scales(self, heads: int) -> np.ndarray | None:
        """Return factors (H + 2K, D) of [queries | keys | values] before the rotation; None for no scaling: of a query,
        the s of the KV head that it reads, of keys and values 1/s."""
        if self.scale is None:
            return None
        keys, values = self.scale
        queries = np.repeat(keys, heads // len(keys), axis=0)
        return np.concatenate([queries, 1 / keys, np.broadcast_to(1 / values[:, None], keys.shape)])

    def scales_back(self, heads: int) -> np.ndarray | None:
        """Return factors (H,) float32 of each query head's attention output; None for no scaling."""
        return None if self.scale is None else np.repeat(self.scale.values, heads // len(self.scale.values))


def mean_fields(bits: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Return name → (shape, dtype) of the stored mean of one block of one KV head. bits: 8, with one scale, or 16."""
    half = np.dtype(np.float16)
    if bits == 16:
        return {"mean": ((head_dim,), half)}
    return {"mean": ((head_dim,), np.dtype(np.int8)), "mean_scale": ((), half)}


def centre(keys: np.ndarray, bits: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Subtract the mean over the tokens of each block from `keys` (..., N, D) float32. Returns the centred keys and the
    fields of the mean, which is subtracted as it is stored: rounding it loses nothing."""
    limit = np.float32(np.finfo(np.float16).max)
    mean = np.clip(keys.mean(axis=-2), -limit, limit)
    fields: dict[str, np.ndarray]
    if bits == 16:
        fields = {"mean": mean.astype(np.float16)}
    else:
        scale = (np.abs(mean).max(axis=-1) / np.float32(127)).astype(np.float16)
        step = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
        with np.errstate(invalid="ignore"):  # a codec refuses keys that are not finite
            codes = np.rint(mean / step).clip(-127, 127).astype(np.int8)
        fields = {"mean": codes, "mean_scale": scale}
    return keys - read_mean(fields)[..., None, :], fields


def read_mean(fields: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the mean (..., D) float32 that the fields of `centre` store."""
    mean = fields["mean"].astype(np.float32)
    if "mean_scale" in fields:
        mean *= fields["mean_scale"].astype(np.float32)[..., None]
    return mean

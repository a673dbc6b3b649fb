"""What happens to keys and values before any codec, and the matching transforms of queries and of the output.

Attention does not change under any of these when nothing is quantized, but what the codec sees does:

* Centring. softmax(q·k + c) does not depend on c, so the mean μ of a block of keys can be taken out and its product
  with q added back once per block: q·k = q·μ + q·(k − μ). A constant key bias, which a rotation would smear over all
  channels, costs the codec nothing then.
* Smoothing. For any positive s, q·k = (s∘q)·(k/s): channels whose keys vary much and whose queries ask little are made
  smaller before the codec spends its precision on them (as in Xiao et al., "SmoothQuant", 2023, §4).
* Scaling. Codes have a range, so keys and values of each KV head are divided by a power of two near their size: queries
  are multiplied by that of their keys, the attention output by that of its values. Only exponents change.
* Rotation. For orthogonal W, (qW)·(kW) = q·k. The codec declares its W; queries are rotated as the keys, values by
  a W of their own, and the attention output is rotated back once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Scale(NamedTuple):
    """s of the keys and of the values of one layer, float32, positive."""

    keys: np.ndarray  # (K, D): smoothing times a power of two; equal on both channels of a RoPE pair
    values: np.ndarray  # (K,): powers of two


@dataclass(frozen=True)
class Conditioning:
    """How the vectors of one layer enter the stored space.

    key_rotation, value_rotation: (D, D) float32 orthogonal, applied as x @ W; None leaves x alone.
    scale: what keys and values are divided by before; None leaves them alone.
    """

    key_rotation: np.ndarray | None = None
    value_rotation: np.ndarray | None = None
    scale: Scale | None = None

    def scales(self, heads: int) -> np.ndarray | None:
        """What [queries | keys | values] (T, H + 2K, D) are multiplied with before they are rotated, (H + 2K, D).

        A query takes the s of the KV head that it reads, a key and a value 1/s.
        """
        if self.scale is None:
            return None
        keys, values = self.scale
        queries = np.repeat(keys, heads // len(keys), axis=0)
        return np.concatenate([queries, 1 / keys, np.broadcast_to(1 / values[:, None], keys.shape)])

    def scales_back(self, heads: int) -> np.ndarray | None:
        """What the attention output of each query head is multiplied with, (H,) float32."""
        return None if self.scale is None else np.repeat(self.scale.values, heads // len(self.scale.values))


# The stored mean of one block of one KV head, by format: field name → shape for head dim D, dtype.
_MEAN_FIELDS: dict[int, dict[str, tuple[bool, np.dtype]]] = {
    8: {"mean": (True, np.dtype(np.int8)), "mean_scale": (False, np.dtype(np.float16))},
    16: {"mean": (True, np.dtype(np.float16))},
}


def mean_fields(bits: int, head_dim: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Arrays that hold the mean of one block of one KV head; `bits` are 8 (with one scale for all D) or 16."""
    return {name: ((head_dim,) if wide else (), dtype) for name, (wide, dtype) in _MEAN_FIELDS[bits].items()}


def centre(keys: np.ndarray, bits: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Take the mean over the tokens of each block out of `keys` (..., N, D) float32.

    Returns the residual (..., N, D) float32 and the fields of the mean. The residual is taken against the mean as it
    reads back, so that rounding it loses nothing.
    """
    limit = np.float32(np.finfo(np.float16).max)
    mean = np.clip(keys.mean(axis=-2), -limit, limit)
    fields: dict[str, np.ndarray]
    if bits == 16:
        fields = {"mean": mean.astype(np.float16)}
    else:
        scale = (np.abs(mean).max(axis=-1) / np.float32(127)).astype(np.float16)
        step = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
        with np.errstate(invalid="ignore"):  # no codec takes the residual of what is not finite
            codes = np.rint(mean / step).clip(-127, 127).astype(np.int8)
        fields = {"mean": codes, "mean_scale": scale}
    return keys - read_mean(fields)[..., None, :], fields


def read_mean(fields: Mapping[str, np.ndarray]) -> np.ndarray:
    """Fields of `centre` → the mean (..., D) float32."""
    mean = fields["mean"].astype(np.float32)
    if "mean_scale" in fields:
        mean *= fields["mean_scale"].astype(np.float32)[..., None]
    return mean

"""What happens to keys before any codec, and the matching transform of queries.

Attention does not change under any of these when nothing is quantized, but what the codec sees does:

* Centring. softmax(q·k + c) does not depend on c, so the mean μ of a block of keys can be taken out and its product
  with q added back once per block: q·k = q·μ + q·(k − μ). A constant key bias, which a rotation would smear over all
  channels, costs the codec nothing then.
* Balancing. For any positive s, q·k = (s∘q)·(k/s): channels whose keys vary much and whose queries ask little are made
  smaller before the codec spends its precision on them.
* Rotation. For orthogonal W, (qW)·(kW) = q·k. The codec declares its W; queries turn with the keys, values turn with
  a W of their own and the attention output is turned back once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Conditioning:
    """How the vectors of one layer enter the stored space.

    key_rotation, value_rotation: (D, D) float32 orthogonal, applied as x @ W; None leaves x alone.
    balance: s (K, D) float32, equal on both channels of a RoPE pair; None for all ones.
    """

    key_rotation: np.ndarray | None = None
    value_rotation: np.ndarray | None = None
    balance: np.ndarray | None = None

    def scales(self, heads: int) -> np.ndarray | None:
        """What [queries | keys] (T, H + K, D) are multiplied with before they are rotated, (H + K, D).

        A query takes the s of the KV head that it reads, a key 1/s.
        """
        if self.balance is None:
            return None
        queries = np.repeat(self.balance, heads // len(self.balance), axis=0)
        return np.concatenate([queries, 1 / self.balance])


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
    if bits == 16:
        fields = {"mean": mean.astype(np.float16)}
    else:
        scale = (np.abs(mean).max(axis=-1) / np.float32(127)).astype(np.float16)
        step = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]
        fields = {"mean": np.rint(mean / step).clip(-127, 127).astype(np.int8), "mean_scale": scale}
    return keys - read_mean(fields)[..., None, :], fields


def read_mean(fields: Mapping[str, np.ndarray]) -> np.ndarray:
    """Fields of `centre` → the mean (..., D) float32."""
    mean = fields["mean"].astype(np.float32)
    if "mean_scale" in fields:
        mean *= fields["mean_scale"].astype(np.float32)[..., None]
    return mean

"""What happens to keys before any codec, and the matching transform of queries.

Attention does not change under either of these when nothing is quantized, but what the codec sees does:

* Centring. softmax(q·k + c) does not depend on c, so the mean μ of a block of keys can be taken out and its product
  with q added back once per block: q·k = q·μ + q·(k − μ). A constant key bias, which a rotation would smear over all
  channels, costs the codec nothing then.
* Rotation. For orthogonal W, (qW)·(kW) = q·k. The codec declares its W; queries turn with the keys, values turn with
  a W of their own and the attention output is turned back once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Conditioning:
    """How the vectors of a model enter the stored space.

    key_rotation, value_rotation: (D, D) float32 orthogonal, applied as x @ W; None leaves x alone.
    centre_keys: the mean of every encoded block of keys is taken out and stored beside the codes, in half precision.
    """

    key_rotation: np.ndarray | None
    value_rotation: np.ndarray | None
    centre_keys: bool


def centre(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take the mean over the tokens of each block out of `keys` (..., N, D) float32.

    Returns the residual (..., N, D) float32 and the mean (..., D) float16. The residual is taken against the rounded
    mean, so that rounding it loses nothing.
    """
    limit = np.finfo(np.float16).max
    mean = np.clip(keys.mean(axis=-2), -limit, limit).astype(np.float16)
    return keys - mean.astype(np.float32)[..., None, :], mean

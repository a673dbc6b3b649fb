"""Functions of rows of float32: RMS norm, soft cap, RoPE, rotation."""

from __future__ import annotations

import numpy as np

# Damaged weights give NaN, which the checks of logits and codecs find; NumPy's warnings would add nothing.
quiet = np.errstate(invalid="ignore", over="ignore")


def softcap(x: np.ndarray, cap: float) -> None:
    """cap · tanh(x / cap), in place; NaN for an infinity."""
    x[np.isinf(x)] = np.nan
    x /= np.float32(cap)
    np.tanh(x, out=x)
    x *= np.float32(cap)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x (..., n) / rms(x) * weight (n,)."""
    mean_square = np.vecdot(x, x)[..., None] / np.float32(x.shape[-1])
    normed = x * (1 / np.sqrt(mean_square + np.float32(eps)))
    normed *= weight
    return normed


def apply_rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> None:
    """Rotate channel j of x (T, heads, D) with channel j + D/2, in place; cos, sin (T, D/2)."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    low, high = x[..., :half], x[..., half:]
    rotated = low * cos - high * sin
    high *= cos
    high += low * sin
    low[...] = rotated


def rotate(x: np.ndarray, rotation: np.ndarray | None, scale: np.ndarray | None = None) -> np.ndarray:
    """(x * scale) @ rotation for x (T, heads, D), scale (heads, D or 1), rotation (D, D); None means no factor."""
    x = x if scale is None else x * scale
    return x if rotation is None else x @ rotation

"""Functions of rows of float32: RMS norm, soft cap, RoPE, rotation, activations of the feed-forward layer."""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.config import is_gated

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


def apply_gate(activation: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """activation(gate) * up (T, F), in memory of its own; of networks without a gate, gate and up are the same.

    It is gate / (1 + e^u) * up, with u = -gate (SiLU), u = -√(8/π) · (gate + 0.044715 gate³) (GELU by tanh), or
    u = -1.702 gate, with gate up to 7 and (up clipped to ±7) + 1 instead of up (gpt-oss's clamped SwiGLU); or
    relu(gate) * up; or Φ(gate) * up (GELU), or gate * Φ(gate) * up (GELU of a gate).
    """
    if activation == "relu_squared":
        return np.maximum(gate, np.float32(0)) * up
    if activation in ("gelu", "gated_gelu"):
        y = _normal_share(gate)
        if activation == "gated_gelu":
            y *= gate
        y *= up
        return y
    if activation == "swiglu_clamped":
        gate = np.minimum(gate, np.float32(7))
        up = np.clip(up, np.float32(-7), np.float32(7)) + np.float32(1)
        return _times_sigmoid(gate, gate * np.float32(-1.702), up)
    exponent = -gate if activation == "silu" else _exponent(gate)
    return _times_sigmoid(gate, exponent, np.float32(1) if activation == "plain_gelu_tanh" else up)


def apply_activation(x: np.ndarray, activation: str) -> np.ndarray:
    """x (T, 2F) = [gate | up] → activation(gate) * up (T, F); or, without a gate, x (T, F) → activation(x)."""
    gate, up = np.split(x, 2, axis=-1) if is_gated(activation) else (x, x)
    return apply_gate(activation, gate, up)


def _exponent(gate: np.ndarray) -> np.ndarray:
    """u of the GELU by tanh: -√(8/π) · (gate + 0.044715 gate³)."""
    with np.errstate(over="ignore"):  # the cube of a large gate is infinite
        exponent = gate * gate
        exponent *= np.float32(0.044715)
        exponent += 1
        exponent *= gate
    exponent *= np.float32(-((8 / np.pi) ** 0.5))
    return exponent


# 2 · (1 − Φ(x)) = (a₁t + … + a₅t⁵) · e^−x²/2 with t = 1 / (1 + px/√2), x ≥ 0: Abramowitz and Stegun, Handbook of
# Mathematical Functions, 7.1.26. The error is at most 1.5e-7.
ERF_P = 0.3275911
ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)  # a₁ … a₅


def _normal_share(x: np.ndarray) -> np.ndarray:
    """Φ(x)."""
    t = np.abs(x)
    tail = np.exp(t * t * np.float32(-0.5))
    tail *= np.float32(0.5)
    t *= np.float32(ERF_P / 2**0.5)
    t += 1
    np.reciprocal(t, out=t)
    sums = t * np.float32(ERF[-1])
    for factor in ERF[-2::-1]:
        sums += np.float32(factor)
        sums *= t
    tail *= sums  # 1 − Φ(|x|)
    np.subtract(1, tail, out=tail, where=x >= 0)
    return tail


def _times_sigmoid(gate: np.ndarray, exponent: np.ndarray, up: np.ndarray | np.float32) -> np.ndarray:
    """gate / (1 + e^exponent) * up, in the memory of `exponent`."""
    # exp overflows to inf above 88, where the quotient is 0 = gate / inf.
    with np.errstate(over="ignore"):
        y = np.exp(exponent, out=exponent)
    y += 1
    np.divide(gate, y, out=y)
    y *= up
    return y

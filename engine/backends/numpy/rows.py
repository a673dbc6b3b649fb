"""Functions of rows of float32: RMS norm, soft cap, RoPE, rotation, activations of the feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    """gate_up (T, 2F) = [gate | up] → silu(gate) * up (T, F)."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return _times_sigmoid(gate, -gate, up)


def gelu_tanh_mul(gate_up: np.ndarray) -> np.ndarray:
    """gate_up (T, 2F) = [gate | up] → gelu(gate) * up (T, F), where gelu(x) = x/2 · (1 + tanh u) = x / (1 + e^-2u) and
    u = √(2/π) · (x + 0.044715 x³)."""
    half = gate_up.shape[-1] // 2
    gate, up = gate_up[..., :half], gate_up[..., half:]
    return _times_sigmoid(gate, _exponent(gate), up)


def plain_gelu_tanh(up: np.ndarray) -> np.ndarray:
    """up (T, F) → gelu(up) (T, F), as in `gelu_tanh_mul`."""
    return _times_sigmoid(up, _exponent(up), np.float32(1))


def _exponent(gate: np.ndarray) -> np.ndarray:
    """-2u of `gelu_tanh_mul`."""
    with np.errstate(over="ignore"):  # the cube of a large gate is infinite
        exponent = gate * gate
        exponent *= np.float32(0.044715)
        exponent += 1
        exponent *= gate
    exponent *= np.float32(-((8 / np.pi) ** 0.5))
    return exponent


_LIMIT, _STEEPNESS = 7.0, 1.702  # constants of gpt-oss's activation


def swiglu_clamped_mul(gate_up: np.ndarray) -> np.ndarray:
    """gate_up (T, 2F) = [gate | up] → g / (1 + e^-1.702g) * (u + 1) (T, F), where g = min(gate, 7) and
    u = up clipped to ±7."""
    half = gate_up.shape[-1] // 2
    gate = np.minimum(gate_up[..., :half], np.float32(_LIMIT))
    up = np.clip(gate_up[..., half:], np.float32(-_LIMIT), np.float32(_LIMIT)) + np.float32(1)
    return _times_sigmoid(gate, gate * np.float32(-_STEEPNESS), up)


def relu_squared(up: np.ndarray) -> np.ndarray:
    """up (T, F) → relu(up)² (T, F)."""
    return np.maximum(up, np.float32(0)) * up


# 2 · (1 − Φ(x)) = (a₁t + … + a₅t⁵) · e^−x²/2 with t = 1 / (1 + px/√2), x ≥ 0: Abramowitz and Stegun, Handbook of
# Mathematical Functions, 7.1.26. The error is at most 1.5e-7.
ERF_P = 0.3275911
ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)  # a₁ … a₅


def gelu(up: np.ndarray) -> np.ndarray:
    """up (T, F) → up · Φ(up) (T, F)."""
    t = np.abs(up)
    tail = np.exp(t * t * np.float32(-0.5))
    tail *= np.float32(0.5)
    t *= np.float32(ERF_P / 2**0.5)
    t += 1
    np.reciprocal(t, out=t)
    sums = t * np.float32(ERF[-1])
    for factor in ERF[-2::-1]:
        sums += np.float32(factor)
        sums *= t
    tail *= sums  # 1 − Φ(|up|)
    np.subtract(1, tail, out=tail, where=up >= 0)
    tail *= up
    return tail


def gated_gelu_mul(gate_up: np.ndarray) -> np.ndarray:
    """gate_up (T, 2F) = [gate | up] → gelu(gate) * up (T, F), as in `gelu`."""
    half = gate_up.shape[-1] // 2
    y = gelu(gate_up[..., :half])
    y *= gate_up[..., half:]
    return y


def _times_sigmoid(gate: np.ndarray, exponent: np.ndarray, up: np.ndarray | np.float32) -> np.ndarray:
    """gate / (1 + e^exponent) * up, in the memory of `exponent`."""
    # exp overflows to inf above 88, where the quotient is 0 = gate / inf.
    with np.errstate(over="ignore"):
        y = np.exp(exponent, out=exponent)
    y += 1
    np.divide(gate, y, out=y)
    y *= up
    return y


# Name → the function [gate | up] → activation(gate) * up, or, without a gate, up → activation(up).
ACTIVATIONS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "silu": silu_mul,
    "gelu_tanh": gelu_tanh_mul,
    "swiglu_clamped": swiglu_clamped_mul,
    "relu_squared": relu_squared,
    "gelu": gelu,
    "gated_gelu": gated_gelu_mul,
    "plain_gelu_tanh": plain_gelu_tanh,
}

"""Rotary position embedding: what a configuration asks for, and the frequencies that follow from it."""

from __future__ import annotations

import math

import numpy as np

from model_loaders.config import RopeConfig
from model_loaders.fields import Fields

_DEFAULT_THETA = 10_000.0
_MIN_THETA = 2.0  # at one all channels would turn alike, and yarn would divide by zero
KINDS = ("default", "linear", "llama3", "yarn")


def rope_config(fields: Fields, max_context: int) -> RopeConfig:
    """Reads `rope_parameters` (theta inside) or the older `rope_scaling` beside `rope_theta`.

    Raises LoadError for a kind other than KINDS, by its name, and for RoPE on a part of the channels only.
    """
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    outer_theta = fields.number("rope_theta", _DEFAULT_THETA, minimum=_MIN_THETA)
    _whole_head_only(fields)
    if section is None:
        return RopeConfig(theta=outer_theta)
    _whole_head_only(section)
    if nested := section.sections():
        raise section.refuse(nested[0], "but RoPE that differs between layers is not supported")
    kind_key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(kind_key, "default")
    if kind not in KINDS:
        raise section.refuse(kind_key, f"a kind of RoPE that is not supported (supported: {', '.join(KINDS)})")
    theta = section.number("rope_theta", outer_theta, minimum=_MIN_THETA)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=section.positive("factor"))
    original = section.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_context)
    )
    return _llama3(section, theta, original) if kind == "llama3" else _yarn(section, theta, original, max_context)


def _whole_head_only(fields: Fields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor", "but RoPE on a part of the channels is not supported")


def _llama3(section: Fields, theta: float, original: int) -> RopeConfig:
    low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
    if high <= low:
        raise section.refuse("high_freq_factor", f"but must be greater than low_freq_factor, {low:g}")
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=section.positive("factor"),
        original_context=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(section: Fields, theta: float, original: int, max_context: int) -> RopeConfig:
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=section.positive("factor", max_context / original),
        original_context=original,
        # Zero counts as absent, as in transformers.
        beta_fast=section.number("beta_fast", 0.0) or 32.0,
        beta_slow=section.number("beta_slow", 0.0) or 1.0,
        attention_factor=section.number("attention_factor") if section.has("attention_factor") else None,
        mscale=section.number("mscale", 0.0),
        mscale_all_dim=section.number("mscale_all_dim", 0.0),
        truncate=section.flag("truncate", True),
    )


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Radians that each channel pair turns per position, float64 (D/2,), and the factor on cos and sin.

    The kinds and their parameters are those of transformers' `modeling_rope_utils`; llama3 is the rule of Llama 3.1's
    release, yarn that of Peng et al. 2023 (arXiv:2309.00071).
    """
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor_on_cos_sin = 1.0
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn_frequencies(rope, frequencies)
        factor_on_cos_sin = _yarn_attention_factor(rope)
    if rope.divisors:
        frequencies = frequencies / np.array(rope.divisors, dtype=np.float64)
    return frequencies, factor_on_cos_sin


def _llama3_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Slow channels are slowed by `factor`, fast ones kept, those between blended by turns per trained context."""
    turns = rope.original_context * frequencies / (2 * math.pi)
    kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def _yarn_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """As llama3, but the blend is linear in the channel number, between the channels of beta_fast and beta_slow."""
    head_dim = 2 * len(frequencies)

    def channel_turning(turns: float) -> float:
        """The (fractional) channel pair that makes so many turns within the trained context."""
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel_turning(rope.beta_fast), channel_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    slowed = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1 - slowed + slowed / rope.factor)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)

"""Rotary position embedding: reading its configuration, and computing its frequencies."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polarlm.model_loaders import elementary
from polarlm.model_loaders.config import RopeConfig
from polarlm.model_loaders.fields import Fields

_DEFAULT_THETA = 10_000.0
_MIN_THETA = 2.0  # with 1 all channels would have the same frequency, and yarn would divide by zero
_UNROTATED = 2.0**100  # the divisor of pairs that RoPE leaves as they are; files of llama.cpp have about as much
_KINDS = ("default", "linear", "llama3", "yarn")  # supported by every family
_LONGROPE = ("longrope", "su", "yarn")  # names of one kind, in files of Phi-3 only


def rope_config(
    fields: Fields,
    max_context: int,
    *,
    section: Fields | None = None,
    theta: float = _DEFAULT_THETA,
    longrope: bool = False,
    partial: bool = False,
) -> RopeConfig:
    """RoPE from `rope_parameters` (with theta), or from the older `rope_scaling` and `rope_theta`.

    section: read instead of these two. theta: the family's default. longrope, partial: whether the family supports
    longrope, and RoPE on a part of the channels (`rotary_dim`). Raises LoadError for a kind or a key that the family
    does not support.
    """
    if section is None:
        section = fields.section("rope_parameters") or fields.section("rope_scaling")
    outer_theta = fields.number("rope_theta", theta, minimum=_MIN_THETA)
    for holder in (fields, section or fields):
        if not partial and holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.refuse("partial_rotary_factor", "but RoPE on a part of the channels is not supported")
    if section is None:
        return RopeConfig(theta=outer_theta)
    if nested := section.sections():
        raise section.refuse(nested[0], "but RoPE that differs between layers is not supported")
    kind_key = "rope_type" if section.has("rope_type") else "type"
    kind = section.text(kind_key, "default")
    if longrope and kind in _LONGROPE:
        kind = "longrope"
    kinds = (*_KINDS, "longrope") if longrope else _KINDS
    if kind not in kinds:
        raise section.refuse(kind_key, f"a kind of RoPE that is not supported (supported: {', '.join(kinds)})")
    theta = section.number("rope_theta", outer_theta, minimum=_MIN_THETA)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=section.positive("factor"))
    original = section.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_context)
    )
    if kind == "longrope" and original == 1:  # the attention factor divides by its logarithm
        raise fields.refuse("original_max_position_embeddings", "but longrope needs an original context of 2 tokens")
    return _scaled_rope(section, kind, theta, original, max_context)


def proportional(fields: Fields, max_context: int, section: Fields, head_dim: int, *, theta: float) -> RopeConfig:
    """`rope_config` of a `section` whose kind may be "proportional", which rotates the first pairs of channels, at the
    frequencies of all."""
    if section.text("rope_type", "default") != "proportional":
        return rope_config(fields, max_context, section=section)
    rotary_pairs = int(head_dim * section.number("partial_rotary_factor", 1.0, maximum=1.0)) // 2
    factor = section.positive("factor", 1.0)
    return RopeConfig(
        theta=section.number("rope_theta", theta, minimum=_MIN_THETA),
        kind="default" if factor == 1.0 else "linear",
        factor=factor,
        divisors=(1.0,) * rotary_pairs + (_UNROTATED,) * (head_dim // 2 - rotary_pairs),
    )


def rotary_dim(fields: Fields, head_dim: int) -> int | None:
    """The number of channels of a head, from the first, that RoPE rotates; None for all. Raises LoadError if odd."""
    if fields.has("rotary_dim"):
        channels = fields.integer("rotary_dim", maximum=head_dim)
        if channels % 2:
            raise fields.refuse("rotary_dim", "but RoPE needs an even number of channels per head")
        return None if channels == head_dim else channels
    section = fields.section("rope_parameters")
    holder = section if section is not None and section.has("partial_rotary_factor") else fields
    channels = int(head_dim * holder.number("partial_rotary_factor", 1.0, maximum=1.0))
    if channels % 2 or channels == 0:
        raise holder.refuse(
            "partial_rotary_factor", f"but RoPE needs an even number of channels per head, not {channels}"
        )
    return None if channels == head_dim else channels


def _scaled_rope(section: Fields, kind: str, theta: float, original: int, max_context: int) -> RopeConfig:
    """RoPE of llama3, yarn and longrope, which is for `max_context`: see `RopeConfig.for_context`."""
    common: dict[str, Any] = {"theta": theta, "kind": kind, "original_context": original}
    if kind == "llama3":
        low, high = section.positive("low_freq_factor"), section.positive("high_freq_factor")
        if high <= low:
            raise section.refuse("high_freq_factor", f"but must be greater than low_freq_factor, {low:g}")
        return RopeConfig(**common, factor=section.positive("factor"), low_freq_factor=low, high_freq_factor=high)
    common["factor"] = section.positive("factor", max_context / original)
    common["attention_factor"] = section.number("attention_factor") if section.has("attention_factor") else None
    if kind == "longrope":
        short = section.numbers("short_factor")
        divisors = short if max_context <= original else section.numbers("long_factor")
        return RopeConfig(**common, divisors=divisors, short_divisors=short)
    return RopeConfig(
        **common,
        # Zero counts as absent, as in transformers.
        beta_fast=section.number("beta_fast", 0.0) or 32.0,
        beta_slow=section.number("beta_slow", 0.0) or 1.0,
        mscale=section.number("mscale", 0.0),
        mscale_all_dim=section.number("mscale_all_dim", 0.0),
        truncate=section.flag("truncate", True),
    )


def rope_frequencies(rope: RopeConfig, rotary_dim: int) -> tuple[np.ndarray, float]:
    """Radians per position of each pair of channels, float64 (rotary_dim/2,), and the factor of cos and sin.

    The kinds and their parameters follow transformers' `modeling_rope_utils`: llama3 is Llama 3.1's rule,
    yarn is by Peng et al. 2023 (arXiv:2309.00071), longrope by Ding et al. 2024 (arXiv:2402.13753).
    """
    frequencies = elementary.power(rope.theta, -np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn_frequencies(rope, frequencies)
    if rope.divisors:
        frequencies = frequencies / np.array(rope.divisors, dtype=np.float64)
    return frequencies, _attention_factor(rope)


def _llama3_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Divides low frequencies by `factor`, keeps high ones, and blends between, by periods per trained context."""
    periods = rope.original_context * frequencies / (2 * math.pi)
    blend = np.clip((periods - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    return frequencies * (blend + (1 - blend) / rope.factor)


def _yarn_frequencies(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """As llama3, but the blend is linear in the pair's number, between the pairs of beta_fast and beta_slow."""
    head_dim = 2 * len(frequencies)

    def pair_of(periods: float) -> float:
        """The (fractional) number of the pair that has so many periods within the trained context."""
        return head_dim * _log(rope.original_context / (periods * 2 * math.pi)) / (2 * _log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    blend = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return frequencies * (1 - blend + blend / rope.factor)


def _log(x: float) -> float:
    return float(elementary.log(x))


def _attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind not in ("yarn", "longrope") or rope.factor <= 1:
        return 1.0
    stretch = _log(rope.factor)
    if rope.kind == "longrope":
        return math.sqrt(1 + stretch / _log(rope.original_context))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * stretch + 1.0) / (0.1 * rope.mscale_all_dim * stretch + 1.0)
    return 0.1 * stretch + 1.0

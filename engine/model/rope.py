"""Angles of RoPE, for each kind of RoPE in a model and each pair of channels (i, i + D/2).

Pairs that are not rotated, because RoPE covers only a part of the channels or the layer has none, have the angle 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.model_loaders import elementary
from polarlm.model_loaders.config import Attention, ModelConfig, RopeConfig
from polarlm.model_loaders.rope import rope_frequencies

Rope = tuple[np.ndarray, ...]  # cos and sin (T, D/2) float32, and if queries grow with positions, factors (T, 1)

_STRETCH = 256  # positions


def pair_frequencies(attention: Attention) -> tuple[np.ndarray, np.ndarray]:
    """Return radians per position, and the factor on cos and sin, of every pair of channels: (D/2,) float64 each."""
    frequencies, factors = np.zeros(attention.head_dim // 2), np.ones(attention.head_dim // 2)
    if attention.rope is not None:
        rotated, factor = rope_frequencies(attention.rope, attention.rotated)
        frequencies[: len(rotated)], factors[: len(rotated)] = rotated, factor
    return frequencies, factors


def pair_axes(rope: RopeConfig | None, pairs: int) -> np.ndarray | None:
    """Return which of a token's three positions turns each pair of channels: 0 in time, 1 in height, 2 in width,
    (D/2,); None if its one position turns all."""
    if rope is None or not rope.sections:
        return None
    time, height, width = rope.sections
    axes = np.zeros(pairs, np.intp)
    if rope.sections_take_turns:
        axes[1 : 3 * height : 3], axes[2 : 3 * width : 3] = 1, 2
    else:
        axes[time : time + height], axes[time + height : time + height + width] = 1, 2
    return axes


class _Turns:
    """cos and sin of position · frequency, times a factor, for one kind of RoPE: by two tables' entries, float64,
    because positions may be large. A position's result does not depend on others.

    A table of all positions would be large, and computing a prompt's cosines and sines takes three times as long.
    """

    def __init__(self, frequencies: np.ndarray, factors: np.ndarray, axes: np.ndarray | None = None):
        """axes: see `pair_axes`."""
        self._frequencies, self._factors, self._axes = frequencies, factors, axes
        self._within = self._turns(np.arange(_STRETCH))
        self._starts = np.empty((2, 0, len(frequencies)))  # a row for each stretch, as many as were needed

    def _turns(self, positions: np.ndarray) -> np.ndarray:
        """Return cos and sin of positions (P,): (2, P, D/2)."""
        return np.stack(elementary.turns(positions[:, None] * self._frequencies))

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if positions.ndim > 1:
            return self._turn_sections(positions)
        stretches, offsets = np.divmod(positions, _STRETCH)
        if (count := int(stretches.max(initial=0)) + 1) > self._starts.shape[1]:
            starts = _STRETCH * np.arange(max(count, 2 * self._starts.shape[1]))
            self._starts = self._turns(starts) * self._factors
        (cos, sin), (more_cos, more_sin) = self._starts[:, stretches], self._within[:, offsets]
        return (
            (cos * more_cos - sin * more_sin).astype(np.float32),
            (cos * more_sin + sin * more_cos).astype(np.float32),
        )

    def _turn_sections(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """positions (3, T): in time, height and width."""
        if self._axes is None:
            return self(positions[0])
        cos, sin = self(positions[0])
        for axis in (1, 2):
            for turns, axis_turns in zip((cos, sin), self(positions[axis]), strict=True):
                turns[:, self._axes == axis] = axis_turns[:, self._axes == axis]
        return cos, sin


class RopeTables:
    """cos and sin of positions, one table for all layers with the same RoPE and head dim, and the growth of queries."""

    def __init__(self, config: ModelConfig):
        kinds = {attention.rope_kind: attention for attention in config.attentions.values()}
        self.kind = {layer: [*kinds].index(one.rope_kind) for layer, one in config.attentions.items()}
        """Layer with attention → index of its table."""
        self._turns = [
            _Turns(*pair_frequencies(attention), pair_axes(attention.rope, attention.head_dim // 2))
            for attention in kinds.values()
        ]
        self._growth = config.attention.query_growth

    def tables(self, positions: np.ndarray) -> tuple[Rope, ...]:
        """Return the table of positions (T,), or (3, T) in time, height and width, for each kind of RoPE."""
        if self._growth is None:
            return tuple(turns(positions) for turns in self._turns)
        growth, unit = self._growth
        factors = (1 + growth * elementary.log(1 + positions // unit))[:, None].astype(np.float32)
        return tuple((*turns(positions), factors) for turns in self._turns)

    def layer_table(self, layer: int, tables: Sequence[Any]) -> Any:
        """Return a layer's table out of the tables of all kinds; None for a layer without attention."""
        kind = self.kind.get(layer)
        return None if kind is None else tables[kind]

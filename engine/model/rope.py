"""Angles of RoPE, for each kind of RoPE in a model and each pair of channels (i, i + D/2).

Pairs that are not rotated, because RoPE covers only a part of the channels or the layer has none, have the angle 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.model_loaders.config import Attention, ModelConfig
from polarlm.model_loaders.rope import rope_frequencies

Rope = tuple[np.ndarray, np.ndarray]  # cos and sin (T, D/2) float32


def pair_frequencies(attention: Attention) -> tuple[np.ndarray, np.ndarray]:
    """Radians per position, and the factor on cos and sin, for every pair of channels: (D/2,) float64 each."""
    frequencies, factors = np.zeros(attention.head_dim // 2), np.ones(attention.head_dim // 2)
    if attention.rope is not None:
        rotated, factor = rope_frequencies(attention.rope, attention.rotated)
        frequencies[: len(rotated)], factors[: len(rotated)] = rotated, factor
    return frequencies, factors


class RopeTables:
    """cos and sin of positions, one table for all layers with the same RoPE and head dim."""

    def __init__(self, config: ModelConfig):
        kinds = {attention.rope_kind: attention for attention in config.attentions.values()}
        self.kind = {layer: [*kinds].index(one.rope_kind) for layer, one in config.attentions.items()}
        """Layer with attention → index of its table."""
        self._frequencies = [pair_frequencies(attention) for attention in kinds.values()]

    def __len__(self) -> int:
        return len(self._frequencies)

    def tables(self, positions: np.ndarray) -> list[Rope]:
        """cos and sin of positions (T,), for each kind. Angles are float64, because positions may be large."""
        tables = []
        for frequencies, factors in self._frequencies:
            angles = positions[:, None] * frequencies
            cos, sin = np.cos(angles) * factors, np.sin(angles) * factors
            tables.append((cos.astype(np.float32), sin.astype(np.float32)))
        return tables

    def of_layer(self, layer: int, tables: Sequence[Any]) -> Any:
        """A layer's table, out of those of all kinds; None without attention."""
        kind = self.kind.get(layer)
        return None if kind is None else tables[kind]

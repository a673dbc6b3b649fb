"""Angles of RoPE, for each kind of RoPE in a model and each pair of channels (i, i + D/2).

Pairs that are not rotated, because RoPE covers only a part of the channels or the layer has none, have the angle 0.
"""

from __future__ import annotations

import numpy as np

from polarlm.model_loaders.config import ModelConfig, RopeConfig
from polarlm.model_loaders.rope import rope_frequencies

Rope = tuple[np.ndarray, np.ndarray]  # cos and sin (T, D/2) float32


def pair_frequencies(config: ModelConfig, rope: RopeConfig | None) -> tuple[np.ndarray, np.ndarray]:
    """Radians per position, and the factor on cos and sin, for every pair of channels: (D/2,) float64 each."""
    frequencies, factors = np.zeros(config.head_dim // 2), np.ones(config.head_dim // 2)
    if rope is not None:
        rotated, factor = rope_frequencies(rope, config.rotary_dim or config.head_dim)
        frequencies[: len(rotated)], factors[: len(rotated)] = rotated, factor
    return frequencies, factors


class RopeTables:
    """cos and sin of positions, one table for all layers with the same RoPE."""

    def __init__(self, config: ModelConfig):
        ropes = [config.layer_rope(layer) for layer in range(config.layers)]
        kinds = list(dict.fromkeys(ropes))
        self.kind = [kinds.index(rope) for rope in ropes]
        """Layer → index of its table."""
        self._frequencies = [pair_frequencies(config, rope) for rope in kinds]

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

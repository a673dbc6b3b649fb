"""Hands out bits of the cache under one budget: a type for the keys and for the values of each layer, where they save
most. The setting `auto:BITS` asks for it; `sensitivity.py` measures what errors cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.state.cache_types import by_layer
from polarlm.model_loaders.config import Attention

NAMES = "trellis3", "trellis3.5", "trellis4", "ring5"  # ascending; trellis has less error than ring of equal bits

_ROUNDING = 1e-6  # bits

Costs = Mapping[int, Sequence[float]]
"""Number of a layer with K/V of its own → what the errors of its keys cost, and those of its values, at equal bits."""


def types(
    budget: float,
    attentions: Mapping[int, Attention],
    layers: int,
    block_size: int,
    costs: Costs | None,
    mean_bits: int = 8,
) -> str:
    """Return a cache_type, KEYS/VALUES by layer, of at most `budget` bits per value on average, norms and means
    included.

    attentions: of each layer with K/V of its own. layers: the number of all layers. costs: None if errors cost the same
    everywhere. mean_bits: of the means of keys. Raises EngineError for a budget that none of `NAMES` have.
    """
    if not attentions:
        return NAMES[0]
    sides = [(layer, side) for layer in attentions for side in (0, 1)]
    values = np.array([attentions[layer].kv_heads * attentions[layer].head_dim for layer, _ in sides], float)
    bits = np.array(
        [side_bits(attentions[layer].head_dim, block_size, 0 if side else mean_bits) for layer, side in sides]
    )
    least, most = (float(np.average(bits[:, step], weights=values)) for step in (0, -1))
    if not least - _ROUNDING <= budget <= most + _ROUNDING:
        raise EngineError(
            f"cache_type=auto:{budget:g}: {NAMES[0]} to {NAMES[-1]} take {least:.3f} to {most:.3f} bits a value in "
            "this model, norms and means included; give a number between these",
            settings=("cache_type",),
        )
    cost = np.ones(len(sides)) if costs is None else np.array([costs[layer][side] for layer, side in sides], float)
    names: list[list[str | None]] = [[None] * layers, [None] * layers]
    for (layer, side), step in zip(sides, allocate(cost, values, bits, budget), strict=True):
        names[side][layer] = NAMES[step]
    return "/".join(map(by_layer, names))


def side_bits(head_dim: int, block_size: int, mean_bits: int) -> list[float]:
    """Return the bits per value of each of `NAMES`, with means of that many bits a channel; 0 for none."""
    fields = mean_fields(mean_bits, head_dim).values() if mean_bits else ()
    mean = 8 * sum(int(np.prod(shape, dtype=int)) * dtype.itemsize for shape, dtype in fields) / (block_size * head_dim)
    return [codecs.bits_per_value(codecs.get(name), block_size, head_dim) + mean for name in NAMES]


def allocate(cost: np.ndarray, values: np.ndarray, bits: np.ndarray, budget: float) -> np.ndarray:
    """Return an index into the types (n,) for each of n sides, whose bits per value are at most `budget` on average.

    cost: of the errors of each side at equal bits. values: of each side, for a token. bits (n, types): ascending. The
    square of an error, and with it its cost, falls by half with each half bit more (with `ring5` after `trellis4` it
    falls a little less: from .0059 to .0020). So each step to more bits saves
    less for its bits than the one before, and the best choice takes the steps in the order of what they save for their
    bits, from the fewest bits on. Of equal steps the first one is taken.
    """
    chosen = np.zeros(len(cost), int)
    left = budget * values.sum() - (bits[:, 0] * values).sum() + _ROUNDING * values.sum()
    more = np.diff(bits, axis=1) * values[:, None]
    saved = cost[:, None] * -np.diff(4.0**-bits, axis=1) / more
    order = sorted(np.ndindex(more.shape), key=lambda step: (-saved[step], step))
    for side, step in order:
        if chosen[side] == step and more[side, step] <= left:
            chosen[side] += 1
            left -= more[side, step]
    return chosen

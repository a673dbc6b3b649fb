"""How large a layer's keys and values are, as its weights tell, and what they are divided by before they are stored.

A code holds a norm in a byte, which has a range, and its finest steps near 1 (`engine.codecs._norms`); full precision
on a GPU has the range of half precision. A model may have keys and values of any size: that of values can be moved into
the output projection, that of keys into queries. So what is stored is taken near 1 first, by a power of two, which
rounds nothing.

No run is needed for that. Inputs x of the projections have a mean square of 1, times a gain g. If their channels have
nothing to do with each other, a row w of a projection makes a number of variance Σ (w·g)² of them. Of the values of
SmolLM2-135M and stories15M, the root of that is 0.8 to 2.5 times the rms of a head, most often 1.7 times; of keys
around the mean of their block, 0.6 to 1.7 times.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.backends.ops import Ops
from engine.model.forward import LayerWeights
from engine.quantization.conditioning import Scale
from model_loaders.config import ModelConfig
from model_loaders.rope import rope_frequencies

_MOST_OCTAVES = 64  # a scale, its inverse, and their products with numbers of any size that counts are float32


class Variances(NamedTuple):
    """Expected squares, (K, D) float64."""

    keys: np.ndarray
    values: np.ndarray


def variances(ops: Ops, config: ModelConfig, layer: LayerWeights, block_size: int | None = None) -> Variances:
    """The variances of one layer's keys and values; with a block size, of keys around the mean of their block.

    Costs a read of the weights of keys and values.
    """
    shape = 2, config.kv_heads, config.head_dim
    rows = slice(config.heads * config.head_dim, None)
    gain = np.square(ops.to_host(layer.attention_norm), dtype=np.float64)
    heads = ops.rows(layer.qkv, rows).reshape(-1, config.head_dim, len(gain))
    # One after the other: squares of all of them together would be new memory each time, which takes longer than they.
    keys, values = np.reshape([np.square(head, dtype=np.float64) @ gain for head in heads], shape)
    if layer.qkv.bias is not None:
        bias = np.square(ops.to_host(layer.qkv.bias[rows]), dtype=np.float64).reshape(shape)
        keys, values = keys + bias[0] * _turned(config, block_size), values + bias[1]
    if layer.k_norm is not None:
        keys = np.broadcast_to(np.square(ops.to_host(layer.k_norm), dtype=np.float64), keys.shape)
    return Variances(keys, values)


def _turned(config: ModelConfig, block_size: int | None) -> np.ndarray:
    """Share of a constant's square that differs from its mean over a block, once RoPE has turned it, (D,)."""
    if block_size is None:
        return np.ones(config.head_dim)
    frequencies, _ = rope_frequencies(config.rope, config.head_dim)
    mean = np.exp(1j * np.outer(np.arange(block_size), frequencies)).mean(axis=0)
    return np.tile(1 - np.abs(mean) ** 2, 2)


def scale(of: Variances, balance: np.ndarray | None = None) -> Scale:
    """What keys, balanced by s (K, D), and values of these variances are divided by, so that their rms is near 1."""
    s = np.ones(of.keys.shape, np.float32) if balance is None else balance
    return Scale(s * _power_of_two(of.keys / np.square(s, dtype=np.float64))[:, None], _power_of_two(of.values))


def _power_of_two(variance: np.ndarray) -> np.ndarray:
    """(K, D) → (K,) float32: the power of two at the rms of each head, or below; 1 for a head that has none.

    Below, because the variances are more often too large than too small.
    """
    rms = np.sqrt(variance.mean(axis=-1))
    exponents = np.frexp(np.where(np.isfinite(rms) & (rms > 0), rms, 1))[1] - 1
    return np.ldexp(np.float32(1), np.clip(exponents, -_MOST_OCTAVES, _MOST_OCTAVES))

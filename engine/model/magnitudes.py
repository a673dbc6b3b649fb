"""How large a layer's keys and values are, as its weights tell, and what they are divided by before they are stored.

A code holds a norm in a byte, which has a range, and its finest steps near 1 (`engine.codecs._norms`); full precision
on a GPU has the range of half precision. A model may have keys and values of any size: that of values can be moved into
the output projection, that of keys into queries. So what is stored is taken near 1 first, by a power of two, which
rounds nothing.

No run is needed for that. Inputs x of the projections have a mean square of 1, times a gain g (in families without
a norm there, they are sums of an embedding and of what norms gave, whose mean squares add up). If their channels have
nothing to do with each other, a row w of a projection makes a number of variance Σ (w·g)² of them. Of the values of
SmolLM2-135M and stories15M, the root of that is 0.8 to 2.5 times the rms of a head, most often 1.7 times; of keys
around the mean of their block, 0.6 to 1.7 times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from engine.backends.ops import Ops
from engine.model.forward import LayerWeights, ModelWeights
from engine.model.rope import pair_frequencies
from engine.quantization.conditioning import Scale
from model_loaders.config import ModelConfig

_MOST_OCTAVES = 64  # a scale, its inverse, and their products with numbers of any size that counts are float32


class Variances(NamedTuple):
    """Expected squares, (K, D) float64."""

    keys: np.ndarray
    values: np.ndarray


def variances(
    ops: Ops, config: ModelConfig, weights: ModelWeights, block_sizes: Sequence[int | None] | None = None
) -> list[Variances]:
    """Variances of every layer's keys and values; with a layer's block size, of keys around the mean of their block.

    Costs a read of the weights of keys and values, and of the embedding where layers have no norm before them.
    """
    inputs = _normed_inputs(ops, weights) if config.pre_norms else _plain_inputs(ops, config, weights)
    sizes = block_sizes or [None] * config.layers
    return [
        _variances(ops, config, number, layer, squares, size)
        for number, (layer, squares, size) in enumerate(zip(weights.layers, inputs, sizes, strict=True))
    ]


def _normed_inputs(ops: Ops, weights: ModelWeights) -> Iterator[np.ndarray]:
    """Per layer, the mean squares of what its projections take, (E,) float64: those of the norm before them."""
    for layer in weights.layers:
        yield np.square(ops.to_host(layer.attention_norm), dtype=np.float64)


def _plain_inputs(ops: Ops, config: ModelConfig, weights: ModelWeights) -> Iterator[np.ndarray]:
    """As `_normed_inputs`, without norms before the projections: of embeddings, and of all norms behind them so far."""
    step = 4096  # rows at a time
    squares = np.zeros(config.hidden_size)
    for first in range(0, config.vocab_size, step):
        rows = ops.rows(weights.embedding, slice(first, min(first + step, config.vocab_size)))
        squares += np.square(rows, dtype=np.float64).sum(axis=0)
    squares *= config.embedding_scale**2 / config.vocab_size
    for layer in weights.layers:
        yield squares
        for norm in (layer.attention_post_norm, layer.ffn_post_norm):
            squares = squares + np.square(ops.to_host(norm), dtype=np.float64)


def _variances(
    ops: Ops, config: ModelConfig, number: int, layer: LayerWeights, inputs: np.ndarray, block_size: int | None
) -> Variances:
    shape = 2, config.kv_heads, config.head_dim
    rows = slice(config.heads * config.head_dim, None)
    heads = ops.rows(layer.qkv, rows).reshape(-1, config.head_dim, len(inputs))
    # One after the other: squares of all of them together would be new memory each time, which takes longer than they.
    keys, values = np.reshape([np.square(head, dtype=np.float64) @ inputs for head in heads], shape)
    if layer.qkv.bias is not None:
        bias = np.square(ops.to_host(layer.qkv.bias[rows]), dtype=np.float64).reshape(shape)
        keys, values = keys + bias[0] * _turned(config, number, block_size), values + bias[1]
    if layer.k_norm is not None:
        norm = np.square(ops.to_host(layer.k_norm), dtype=np.float64)
        share = keys / keys.mean() if config.wide_qk_norm and keys.any() else np.ones_like(keys)
        keys = share * norm.reshape(-1, config.head_dim)
    return Variances(keys, values)


def _turned(config: ModelConfig, layer: int, block_size: int | None) -> np.ndarray:
    """Share of a constant's square that differs from its mean over a block, once RoPE has turned it, (D,)."""
    if block_size is None:
        return np.ones(config.head_dim)
    frequencies, _ = pair_frequencies(config, config.layer_rope(layer))
    mean = np.exp(1j * np.outer(np.arange(block_size), frequencies)).mean(axis=0)
    return np.tile(1 - np.abs(mean) ** 2, 2)


def scale(of: Variances, smoothing: np.ndarray | None = None) -> Scale:
    """What keys, smoothed by s (K, D), and values of these variances are divided by, so that their rms is near 1."""
    s = np.ones(of.keys.shape, np.float32) if smoothing is None else smoothing
    return Scale(s * _power_of_two(of.keys / np.square(s, dtype=np.float64))[:, None], _power_of_two(of.values))


def _power_of_two(variance: np.ndarray) -> np.ndarray:
    """(K, D) → (K,) float32: the power of two at the rms of each head, or below; 1 for a head that has none.

    Below, because the variances are more often too large than too small.
    """
    rms = np.sqrt(variance.mean(axis=-1))
    exponents = np.frexp(np.where(np.isfinite(rms) & (rms > 0), rms, 1))[1] - 1
    return np.ldexp(np.float32(1), np.clip(exponents, -_MOST_OCTAVES, _MOST_OCTAVES))

"""Estimates the magnitude of keys and values from the weights, and the scale that they are divided by when stored.

Norms in codes have a limited range, and their finest steps are near 1 (`engine.codecs.parts.norms`). So stored keys and
values are divided by a power of two, which rounds nothing; queries and attention's results are multiplied by it.

The input of a projection has a mean square of 1 per channel, times the norm's squared weight g² (without a norm there,
the mean squares of an embedding and of normed results add up). If channels are uncorrelated, the output of a row w of
the projection has the variance Σ (w·g)². For SmolLM2-135M and stories15M, its root is 0.8 to 2.5 times the rms of a
head of values, and 0.6 to 1.7 times for keys around the mean of their block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.ops import Ops
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.layers import latent_attention
from polarlm.engine.model.layers.attention import AttentionWeights
from polarlm.engine.model.layers.latent_attention import LatentAttentionWeights
from polarlm.engine.model.rope import pair_frequencies
from polarlm.engine.quantization.conditioning import Scale
from polarlm.model_loaders.config import Attention, ModelConfig

_MOST_OCTAVES = 64  # so that a scale, its inverse, and their products with plausible keys and values fit float32


class Variances(NamedTuple):
    """Expected squares of a layer's keys and values, (K, D) float64. by_channel: whether channels may have scales of
    their own; not if values are keys."""

    keys: np.ndarray
    values: np.ndarray
    by_channel: bool = True


def variances(
    ops: Ops, config: ModelConfig, weights: ModelWeights, block_sizes: Sequence[int | None] | None = None
) -> list[Variances | None]:
    """Return the variances of every layer's keys and values; None for a layer without K/V.

    block_sizes: for each layer; with a size, keys vary around the mean of their block. Reads the projections of keys
    and values, and the embedding if layers have no norm before them.
    """
    inputs = _normed_inputs(ops, weights) if config.layers[0].norms != "after" else _plain_inputs(ops, config, weights)
    if config.eagle3 is not None:
        inputs = chain(islice(inputs, config.depth), _head_inputs(ops, weights))
    sizes = block_sizes or [None] * len(config.layers)
    layers = [config.kv_attentions.get(number) for number in range(len(config.layers))]
    return [
        None if attention is None else _variances(ops.layer_ops(number), attention, w.mixer, squares, size)
        for number, (attention, w, squares, size) in enumerate(zip(layers, weights.layers, inputs, sizes, strict=True))
    ]


def _normed_inputs(ops: Ops, weights: ModelWeights) -> Iterator[np.ndarray]:
    """Yield the mean squares (E,) float64 of each layer's normed input; (0,) for a layer that is not attention."""
    for number, layer in enumerate(weights.layers):
        norm = layer.mixer.norm if isinstance(layer.mixer, AttentionWeights | LatentAttentionWeights) else None
        yield np.empty(0) if norm is None else np.square(ops.layer_ops(number).to_host(norm), dtype=np.float64)


def _head_inputs(ops: Ops, weights: ModelWeights) -> Iterator[np.ndarray]:
    """Yield the mean squares (2E,) float64 of what the layer of an EAGLE-3 head reads."""
    head = weights.layers[-1].mtp
    assert head is not None
    norms = [ops.to_host(norm) for norm in (head.embedding_norm, head.hidden_norm)]
    yield np.square(np.concatenate(norms), dtype=np.float64)


def _plain_inputs(ops: Ops, config: ModelConfig, weights: ModelWeights) -> Iterator[np.ndarray]:
    """Yield the same for layers without that norm: sums over the embeddings and all earlier results' norms."""
    step = 4096  # rows
    squares = np.zeros(config.hidden_size)
    for first in range(0, config.vocab_size, step):
        rows = ops.layer_ops(0).rows(weights.embedding, slice(first, min(first + step, config.vocab_size)))
        squares += np.square(rows, dtype=np.float64).sum(axis=0)
    squares *= config.embedding_scale**2 / config.vocab_size
    for number, layer in enumerate(weights.layers):
        yield squares
        assert layer.ffn is not None  # layers with norms of results have networks
        for norm in (layer.mixer.post_norm, layer.ffn.post_norm):
            squares = squares + np.square(ops.layer_ops(number).to_host(norm), dtype=np.float64)


def _variances(
    ops: Ops,
    attention: Attention,
    w: AttentionWeights | LatentAttentionWeights,
    inputs: np.ndarray,
    block_size: int | None,
) -> Variances:
    if isinstance(w, LatentAttentionWeights):
        keys = latent_attention.variances(ops, w, inputs)
        return Variances(keys, keys, by_channel=False)
    shape = 2, attention.kv_heads, attention.head_dim
    rows = slice(attention.heads * attention.head_dim, None)
    heads = ops.rows(w.qkv, rows).reshape(-1, attention.head_dim, len(inputs))
    # Head by head: for all heads together, allocating the squares would take longer than computing them.
    keys, values = np.reshape([np.square(head, dtype=np.float64) @ inputs for head in heads], shape)
    if w.qkv.bias is not None:
        bias = np.square(ops.to_host(w.qkv.bias[rows]), dtype=np.float64).reshape(shape)
        keys, values = keys + bias[0] * _varying_share(attention, block_size), values + bias[1]
    if attention.qk_norm == "unweighted":
        keys = np.ones_like(keys)
    if w.k_norm is not None:
        norm = np.square(ops.to_host(w.k_norm), dtype=np.float64)
        share = keys / keys.mean() if attention.qk_norm == "all" and keys.any() else np.ones_like(keys)
        keys = share * norm.reshape(-1, attention.head_dim)
    if attention.v_norm:
        values = np.ones_like(values)
    return Variances(keys, values)


def _varying_share(attention: Attention, block_size: int | None) -> np.ndarray:
    """Return the share (D,) of a constant's square that differs from the mean of its block, since RoPE rotates it."""
    if block_size is None:
        return np.ones(attention.head_dim)
    frequencies, _ = pair_frequencies(attention)
    mean = np.exp(1j * np.outer(np.arange(block_size), frequencies)).mean(axis=0)
    return np.tile(1 - np.abs(mean) ** 2, 2)


def scale(variances: Variances, smoothing: np.ndarray | None = None) -> Scale:
    """Return the scale that brings keys, smoothed by `smoothing` (K, D), and values to an rms near 1."""
    keys, values, _ = variances
    s = np.ones(keys.shape, np.float32) if smoothing is None else smoothing
    return Scale(s * _power_of_two(keys / np.square(s, dtype=np.float64))[:, None], _power_of_two(values))


def _power_of_two(variance: np.ndarray) -> np.ndarray:
    """Variances (K, D) → (K,) float32: each head's rms, rounded down to a power of two, because variances are more
    often too large than too small; 1 if it is 0 or not finite."""
    rms = np.sqrt(variance.mean(axis=-1))
    exponents = np.frexp(np.where(np.isfinite(rms) & (rms > 0), rms, 1))[1] - 1
    return np.ldexp(np.float32(1), np.clip(exponents, -_MOST_OCTAVES, _MOST_OCTAVES))

"""A key bias is a constant vector that a rotation would smear over all channels. Centring takes it out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.score import score
from polarlm.model_loaders.config import ModelConfig
from tests.bare import bare_model, feed, log_softmax, prefill_logits, read_model
from tests.conftest import FIXTURES

BLOCK = 16


def with_key_bias(
    config: ModelConfig, weights: ModelWeights, ids: list[int], pairs: int
) -> tuple[ModelConfig, ModelWeights]:
    """Ten times the keys' RMS added on the `pairs` lowest-frequency rotary pairs, where position hardly turns it."""
    model = bare_model(config, weights, block_size=64)
    prefill_logits(model, ids[:63])
    heads, kv_heads, dim = config.attention.heads, config.attention.kv_heads, config.attention.head_dim
    layers = []
    for index, layer in enumerate(weights.layers):
        keys = model.store.cache(index).full_k.astype(np.float32)
        rms = np.sqrt((keys[keys.any(axis=-1)] ** 2).mean())
        shape = (heads + 2 * kv_heads, dim)
        qkv = layer.mixer.qkv
        bias = np.zeros(shape, np.float32) if qkv.bias is None else qkv.bias.reshape(shape).copy()
        for half in (dim // 2, dim):
            bias[heads : heads + kv_heads, half - pairs : half] += 10 * rms
        layers.append(replace(layer, mixer=replace(layer.mixer, qkv=replace(qkv, bias=bias.reshape(-1)))))
    return config.with_attention(lambda mixer: replace(mixer, qkv_bias=True)), replace(weights, layers=layers)


def perplexity(config: ModelConfig, weights: ModelWeights, ids: list[int], type: str, centred: bool = True) -> float:
    model = bare_model(config, weights, (type, type), block_size=BLOCK, centred=centred)
    scored = score(model, model.store.new_sequence(), ids)
    return float(np.exp(-scored.logprobs.astype(np.float64).mean()))


def drawn(config: ModelConfig, weights: ModelWeights, count: int, rng: np.random.Generator) -> list[int]:
    """A text that the model itself finds likely."""
    model = bare_model(config, weights, block_size=BLOCK)
    kv, ids = model.store.new_sequence(), [1]
    while len(ids) < count:
        p = np.exp(log_softmax(feed(model, kv, ids[-1:]))[0])
        ids.append(int(rng.choice(len(p), p=p / p.sum())))
    return ids


@pytest.mark.parametrize("name", ["llama_gqa_llama3_tied", "llama_wide_heads_biases", "qwen2_bias"])
def test_centring_removes_most_of_what_a_key_bias_costs(name: str, rng: np.random.Generator) -> None:
    config, weights = read_model(FIXTURES / name)
    config, weights = with_key_bias(config, weights, drawn(config, weights, 64, rng), pairs=2)
    ids = drawn(config, weights, 256, rng)
    exact, centred, plain = (
        np.log(perplexity(config, weights, ids, *how))
        for how in (("f16",), ("polarquant", True), ("polarquant", False))
    )
    assert plain - exact > 5 * max(centred - exact, 0.01)

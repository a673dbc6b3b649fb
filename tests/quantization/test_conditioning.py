"""Conditioning changes the vectors that a codec encodes, and leaves attention unchanged. Centring takes out a key bias,
which is a constant vector that a rotation would smear over all channels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polarlm.engine.backends.kv import AttentionRule
from polarlm.engine.backends.numpy.rows import rotate
from polarlm.engine.codecs import get
from polarlm.engine.model.forward import ModelWeights
from polarlm.engine.model.score import score
from polarlm.engine.quantization.conditioning import Conditioning, Scale, centre, mean_fields, read_mean
from polarlm.model_loaders.config import ModelConfig
from tests.bare import bare_model, feed, log_softmax, prefill_logits, read_model
from tests.conftest import FIXTURES
from tests.ops.reference import attention, causal_mask
from tests.pairs import pairs

KV_HEADS, HEADS, D, N = 2, 6, 16, 8


@pytest.mark.parametrize(("bits", "smoothed", "rotation"), pairs([8, 16], [False, True], ["none", "hadamard", "dense"]))
def test_attention_in_full_precision_is_unchanged(
    rng: np.random.Generator, rotation: str, smoothed: bool, bits: int
) -> None:
    """Keys k/s·W − μ, queries s∘q·W, q·μ added back, the output rotated back and multiplied by s: plain attention."""
    q = rng.standard_normal((5, HEADS, D)).astype(np.float32)
    k = rng.standard_normal((4 * N, KV_HEADS, D)).astype(np.float32) + 5  # a large mean
    v = rng.standard_normal((4 * N, KV_HEADS, D)).astype(np.float32)
    half = rng.uniform(0.2, 5, (KV_HEADS, D // 2)).astype(np.float32)
    w = get(f"polarquant+{rotation}").rotation(D)
    factors = np.array([0.25, 8], np.float32)
    stored = Conditioning(w, w, Scale(np.concatenate([half, half], 1), factors) if smoothed else None)

    scales = stored.scales(HEADS)
    parts = [None] * 3 if scales is None else np.split(scales, [HEADS, HEADS + KV_HEADS])
    queries, keys, values = (rotate(x, w, part) for x, part in zip((q, k, v), parts, strict=True))
    centred, fields = centre(keys.reshape(4, N, KV_HEADS, D).swapaxes(1, 2), bits)
    back = centred + read_mean(fields)[..., None, :]  # equal in products with q: (k − μ) + μ
    visible, rule = causal_mask(4 * N - 5, 5, 4 * N, None), AttentionRule(0.25)
    mixed = attention(queries, back.swapaxes(1, 2).reshape(k.shape), values, visible, rule)
    mixed = mixed if w is None else mixed @ w.T.astype(np.float64)
    if scales is not None:
        mixed = mixed * stored.scales_back(HEADS)[:, None]
    np.testing.assert_allclose(mixed, attention(q, k, v, visible, rule), atol=1e-5)


@given(hnp.arrays(np.float32, (3, 4, 8), elements=st.floats(-(2.0**100), 2.0**100, width=32)), st.sampled_from([8, 16]))
def test_the_mean_is_subtracted_as_it_reads_back(keys: np.ndarray, bits: int) -> None:
    centred, fields = centre(keys, bits)
    expected = mean_fields(bits, 8)
    assert {name: (array.shape[1:], array.dtype) for name, array in fields.items()} == expected
    mean = read_mean(fields)
    assert np.isfinite(mean).all()
    np.testing.assert_array_equal(centred, keys - mean[:, None])


@given(hnp.arrays(np.float32, (2, 16, 8), elements=st.floats(-100, 100, width=32)), st.sampled_from([8, 16]))
def test_the_mean_of_centred_keys_is_small(keys: np.ndarray, bits: int) -> None:
    """A step of the 8-bit mean is its largest channel over 127; of half precision, 2^−10 of the channel."""
    centred, _ = centre(keys, bits)
    largest = np.abs(keys.mean(axis=1)).max(axis=1, keepdims=True)
    step = largest / 127 if bits == 8 else largest / 1024
    assert (np.abs(centred.mean(axis=1)) <= 0.51 * step + 2e-3 * largest / 127 + 1e-4).all()


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
    scored = score(model, ids)
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

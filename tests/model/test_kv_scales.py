"""The magnitude of keys and values, estimated from weights, does not change what is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine
from polarlm.engine.backends.kv import HeadTransform, KVLocation
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.kv_scales import Variances, scale, variances
from polarlm.engine.model.rope import pair_frequencies
from tests.bare import bare_model, kl, prefill_logits, read_model
from tests.conftest import FIXTURES
from tests.pairs import each
from tests.rescaled import rescale
from tests.shared_data import shared
from tests.tiny import make_model

OPS = NumpyOps()
N = 16
TYPES = {
    "default": {"cache_type": "balanced"},
    "polarquant": {"cache_type": "polarquant"},
    "as published": {"cache_type": "turbo3", "key_conditioning": False},
    "rings, as published": {"cache_type": "ring3", "key_conditioning": False},
}


# -- stored blocks do not depend on the magnitude ---------------------------------------------------------------------


def logits(path: Path, ids: list[int], block_size: int = N, **settings) -> list[np.ndarray]:
    """The logits of `score`, as steps read the cache and with every token coded."""
    with Engine.load(path, device="cpu", block_size=block_size, weight_type="f32", **settings) as engine:
        scored = [engine.score(ids, quantized, logits=True).logits for quantized in (False, True)]
    assert len(scored[0]) == len(ids)
    return scored


@pytest.mark.slow  # ten engines for each case
@pytest.mark.parametrize(
    ("fixture", "types"), each(["llama_gqa_llama3_tied", "qwen2_bias", "qwen3_qk_norm_tied"], TYPES)
)
def test_powers_of_two_change_no_bit(tmp_path: Path, fixture: str, types: str) -> None:
    path = make_model(tmp_path, fixture)
    ids = np.random.default_rng(1).integers(5, 96, 100).tolist()
    plain = logits(path, ids, calibration=False, **TYPES[types])
    for side in ("keys", "values"):
        for factor in (2.0**-12, 2.0**12):
            with pytest.MonkeyPatch.context() as patch:
                rescale(patch, side, factor)
                for given, wanted in zip(logits(path, ids, calibration=False, **TYPES[types]), plain, strict=True):
                    np.testing.assert_array_equal(given, wanted)


@pytest.mark.slow
def test_divergence_of_a_real_model_does_not_depend_on_the_magnitude() -> None:
    """Fitted to the model. The scale may be another power of two then, so that other codes are nearest."""
    path = shared("models", "stories15M")
    text = shared("text", "tinystories_dedup.txt").read_text()[:2000]
    with Engine.load(path, device="cpu", cache_type="f16") as engine:
        ids = [1, *engine.tokenize(text)][:128]
        exact = engine.score(ids, logits=True).logits
    plain = [kl(exact, given) for given in logits(path, ids, 32)]
    for side, factor in (("keys", 1e-3), ("keys", 1e3), ("values", 1e-3), ("values", 1e3)):
        with pytest.MonkeyPatch.context() as patch:
            rescale(patch, side, factor)
            scaled = [kl(exact, given) for given in logits(path, ids, 32)]
        np.testing.assert_allclose(scaled, plain, rtol=0.25, err_msg=f"{side} times {factor}")


# -- estimates from the weights ---------------------------------------------------------------------------------------


def test_estimates_for_a_real_model_are_within_a_factor_of_three() -> None:
    path = shared("models", "stories15M")
    config, weights = read_model(path)
    with Engine.load(path, device="cpu", cache_type="f16") as engine:
        ids = [1, *engine.tokenize(shared("text", "tinystories_dedup.txt").read_text()[:800])][:127]
    model = bare_model(config, weights, block_size=128)
    prefill_logits(model, ids)
    for index, estimated in enumerate(variances(OPS, config, weights)):
        k, v = model.store.cache(index).full(KVLocation(None, 0))
        for side, variance in zip((k[:, 16:127], v[:, 16:127]), estimated, strict=True):
            ratio = np.sqrt(variance.mean(axis=1) / np.square(side).mean(axis=(1, 2)))
            assert (ratio < 3).all()
            assert (ratio > 1 / 3).all()


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir())[::11])
def test_estimates_for_uncorrelated_inputs_are_exact(name: str, rng: np.random.Generator) -> None:
    """Keys and values of random inputs at consecutive positions; a bias, if any, outweighs all else."""
    config, weights = read_model(FIXTURES / name)
    number = next(number for number in (1, *config.kv_attentions) if number in config.kv_attentions)
    attention, layer, count = config.layers[number].mixer, weights.layers[number].mixer, 4096
    heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
    if layer.qkv.bias is not None:
        layer = replace(layer, qkv=replace(layer.qkv, bias=20 * layer.qkv.bias))
        layers = [*weights.layers]
        layers[number] = replace(layers[number], mixer=layer)
        weights = replace(weights, layers=layers)
    x = rng.standard_normal((count, config.hidden_size)).astype(np.float32)
    norm = None
    if layer.norm is not None:
        norm = layer.norm, config.norm_eps
    else:  # an embedding, and the normed results of the first layer
        first, embedding = weights.layers[0], OPS.rows(weights.embedding)
        squares = np.square(embedding).mean(axis=0)
        x *= np.sqrt(squares + np.square(first.mixer.post_norm) + np.square(first.ffn.post_norm))
    qkv = OPS.linear(x, layer.qkv, norm=norm)
    norms = None if layer.k_norm is None else (layer.q_norm, layer.k_norm, config.norm_eps)
    if attention.qk_norm == "unweighted":
        norms = np.ones(dim, np.float32), np.ones(dim, np.float32), config.norm_eps
    if attention.qk_norm == "all":
        keys = slice(heads * dim, (heads + kv_heads) * dim)
        OPS.rms_norm(qkv[:, keys], (layer.k_norm, config.norm_eps))
        norms = None
    eps = config.norm_eps if attention.v_norm else None
    angles = np.outer(np.arange(count), pair_frequencies(attention)[0])
    rope = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    _, k, v = OPS.transform_heads(qkv.reshape(count, -1, dim), rope, HeadTransform(kv_heads, value_eps=eps), norms)
    for block_size in (None, 64):
        keys = k
        if block_size is not None:
            blocks = k.reshape(-1, block_size, *k.shape[1:])
            keys = (blocks - blocks.mean(axis=1, keepdims=True)).reshape(k.shape)
        estimated = variances(OPS, config, weights, [block_size] * len(config.layers))[number]
        for side, variance in zip((keys, v), estimated, strict=True):
            np.testing.assert_allclose(
                variance.mean(-1), np.square(side).mean((0, 2)), rtol=0.1, err_msg=str(block_size)
            )


@pytest.mark.parametrize(
    ("rms", "expected"),
    [(1.99, 1), (2, 2), (0.499, 0.25), (1e-12, 2.0**-40), (1e40, 2.0**64), (0, 1)],
)
def test_the_scale_is_the_rms_rounded_down_to_a_power_of_two(rms: float, expected: float) -> None:
    variance = np.full((2, 8), np.square(float(rms)))
    smoothing = np.repeat(np.float32([[2], [0.25]]), 8, axis=1)
    keys, values = scale(Variances(variance * np.square(smoothing), variance), smoothing)
    np.testing.assert_array_equal(keys, expected * smoothing, strict=False)
    np.testing.assert_array_equal(values, [expected] * 2)
    assert keys.dtype == values.dtype == np.float32

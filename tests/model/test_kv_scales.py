"""The magnitude of keys and values, estimated from weights, does not change what is stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine
from polarlm.engine.backends.kv import KVLocation
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.model.kv_scales import Variances, scale, variances
from tests.bare import bare_model, prefill_logits, read_model
from tests.rescaled import rescale
from tests.shared_data import shared
from tests.tiny import make_model

OPS = NumpyOps()
N = 16
TYPES = {
    "default": {"cache_type": "balanced"},
    "polarquant": {"cache_type": "polarquant"},
    "as published": {"cache_type": "turbo3", "key_conditioning": False},
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
    ("fixture", "types"),
    [("llama_gqa_llama3_tied", "default"), ("qwen2_bias", "as published"), ("qwen3_qk_norm_tied", "polarquant")],
)
def test_powers_of_two_change_no_bit(tmp_path: Path, fixture: str, types: str) -> None:
    """Each case loads and scores five engines."""
    path = make_model(tmp_path, fixture)
    ids = np.random.default_rng(1).integers(5, 96, 100).tolist()
    plain = logits(path, ids, calibration=False, **TYPES[types])
    for side in ("keys", "values"):
        for factor in (2.0**-12, 2.0**12):
            with pytest.MonkeyPatch.context() as patch:
                rescale(patch, side, factor)
                for scaled, wanted in zip(logits(path, ids, calibration=False, **TYPES[types]), plain, strict=True):
                    np.testing.assert_array_equal(scaled, wanted)


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
        for side, variance in zip((k[:, 16:127], v[:, 16:127]), estimated[:2], strict=True):
            ratio = np.sqrt(variance.mean(axis=1) / np.square(side).mean(axis=(1, 2)))
            assert (ratio < 3).all()
            assert (ratio > 1 / 3).all()


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

"""The magnitude of keys and values, estimated from weights, does not change what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine
from polarlm.engine.backends.kv import KVLocation
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading import assembly
from polarlm.engine.model.kv_scales import Variances, scale, variances
from tests.bare import bare_model, prefill_logits, read_model
from tests.shared_data import shared
from tests.tiny import make_model
from tests.weights import pack

OPS = NumpyOps()
N = 16
TYPES = {
    "default": {"cache_type": "balanced"},
    "polarquant": {"cache_type": "polarquant"},
    "as published": {"cache_type": "turbo3", "key_conditioning": False},
}


# -- stored blocks do not depend on the magnitude ---------------------------------------------------------------------


class _Rescaled:
    """A weight source that multiplies some weights: name of a projection or norm → factor."""

    def __init__(self, source: Any, factors: dict[str, float]):
        self._source, self._factors = source, factors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def stored_dtype(self, name: str) -> str:
        """float32, because half precision could overflow."""
        return "BF16" if self._source.stored_dtype(name) == "BF16" else "F32"

    def read_into(self, name: str, out: np.ndarray, rows: slice = slice(None)) -> None:
        self._source.read_into(name, out, rows)
        for part, factor in self._factors.items():
            if f".{part}." in name:
                out *= np.float32(factor)

    def read_raw(self, name: str, rows: slice) -> np.ndarray:
        values = np.empty((rows.stop - rows.start, self._source.shape(name)[1]), np.float32)
        self.read_into(name, values, rows)
        return pack(values, self.stored_dtype(name).lower())


def rescale(patch: pytest.MonkeyPatch, side: str, factor: float) -> None:
    """Engines that are loaded from now on have `factor` times their "keys" or "values", and answer as before.

    Queries take it out again, or the output projection. Where heads are normalised, their norms make the size of keys.
    """
    load = assembly.load_weights

    def load_rescaled(ops, config, source, *rest, **more):
        into = ("k_norm", "q_norm") if config.attention.qk_norm else ("k_proj", "q_proj")
        by, inverse = into if side == "keys" else ("v_proj", "o_proj")
        return load(ops, config, _Rescaled(source, {by: factor, inverse: 1 / factor}), *rest, **more)

    patch.setattr(assembly, "load_weights", load_rescaled)


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

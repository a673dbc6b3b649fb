"""Engines with models of every family: settings that change a model's arithmetic, and caches fitted to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polarlm.engine import Engine, SamplingParams
from tests.bare import bare_model, prefill_logits, read_model
from tests.conftest import FIXTURES
from tests.requests.drafters import Known, Unpaced, drafting
from tests.tiny import VOCABULARY, make_model

IDS = list(range(5, 85))


def test_the_context_chooses_the_factors_of_longrope(tmp_path: Path) -> None:
    """The short factors for contexts up to the original one, here 32 tokens, else the long ones for every prompt."""
    path, found = make_model(tmp_path, "phi3_longrope_partial"), {}
    for tokens in (32, 33, 0):
        with Engine.load(path, device="cpu", ctx_size=tokens, cache_type="f16", calibration=False) as engine:
            found[tokens] = engine.score(IDS[:24], logits=True).logits
    config, weights = read_model(FIXTURES / "phi3_longrope_partial")
    for tokens, logits in found.items():
        expected = prefill_logits(bare_model(config.for_context(tokens), weights), IDS[:24])
        np.testing.assert_allclose(logits, expected, atol=2**-10 * np.ptp(expected))  # the cache holds halves
    np.testing.assert_array_equal(found[33], found[0])
    assert np.abs(found[32] - found[0]).max() > 0.1


@pytest.mark.parametrize(
    "name",
    [
        *("gemma2_capped_tied", "lfm2_tied", "lfm3_gated_tied", "gpt_oss_mxfp4", "glm4_moe_qk_norm"),
        *("cohere2_windows_tied", "hunyuan_v1_dense_alpha_tied", "glm4_moe_lite"),
    ],
)
def test_models_with_other_layers_find_prefixes_and_sessions_and_drafts(name: str, tmp_path: Path) -> None:
    """An answer after a stored prefix equals the answer of another engine after a session, with drafts."""
    path = make_model(tmp_path, name)
    params = SamplingParams(max_tokens=40, temperature=4, seed=1, ignore_eos=True)
    settings = {"device": "cpu", "block_size": 16, "ctx_size": 256, "cache_type": "balanced"}
    prompt = np.random.default_rng(0).integers(5, VOCABULARY, 103).tolist()
    with Engine.load(path, **settings) as engine:
        engine.generate(prompt[:100], replace(params, max_tokens=1))
        engine.save_session(tmp_path / "session", prompt=prompt[:100])
        plain = engine.generate(prompt, params)
    with Engine.load(path, **settings) as engine:
        engine.load_session(tmp_path / "session")
        drafts = Unpaced(Known([*prompt, *plain.token_ids], 0.7, VOCABULARY), lambda: 4)
        drafting(engine, lambda ids: drafts)
        drafted = engine.generate(prompt, params)
    assert plain.usage.cached_tokens == drafted.usage.cached_tokens == 100
    assert drafts.drafted > drafts.accepted > 8
    assert len(set(plain.token_ids)) > 4, "the answer repeats itself"
    assert plain.token_ids == drafted.token_ids

"""A small hybrid that was trained: it has the logits of transformers, tells a story, and goes on from a snapshot."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from polarlm.engine import Engine, PromptOptions, SamplingParams
from tests.bare import bare_model, prefill_logits, read_model
from tests.conftest import TRAINED_HYBRID


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(TRAINED_HYBRID, device="cpu", cache_type="f16") as engine:
        yield engine


def test_logits_are_those_of_transformers() -> None:
    reference = np.load(TRAINED_HYBRID / "reference.npz")
    config, weights = read_model(TRAINED_HYBRID)
    logits = prefill_logits(bare_model(config, weights), reference["ids"].tolist())
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-4 * np.abs(reference["logits"]).max())


def test_the_next_turn_goes_on_from_a_snapshot(engine: Engine) -> None:
    """With a prefix of the store a token is as likely as without, within what 8 bits cost."""
    text = (TRAINED_HYBRID / "held_out.txt").read_text(encoding="utf-8")
    ids = engine.tokenize(text[:2000])[:300]
    greedy = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    fresh = engine.generate(ids, greedy, PromptOptions(cache_salt="another"))
    assert fresh.usage.cached_tokens == 0
    engine.generate([*ids[:256], 5, 6], greedy)
    again = engine.generate(ids, greedy)
    assert again.usage.cached_tokens == 256
    assert again.token_ids == fresh.token_ids
    assert again.logprobs[0].logprob == pytest.approx(fresh.logprobs[0].logprob, abs=0.05)

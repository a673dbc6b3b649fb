"""Scores from hidden states, beside the same figures computed directly from all logits in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.command import CacheType
from polarlm.bench.quality.divergence import perplexity
from polarlm.bench.quality.states import exact_logprobs, exact_states, scored, served_states
from polarlm.engine import Engine
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import Parts, assemble, with_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from tests.bare import bare_model, prefill_logits, read_model

IDS = np.random.default_rng(3).integers(5, 90, 150).tolist()
SETTINGS = {"block_size": 16, "kept_sequences": 0, "calibration": False}


@pytest.fixture(scope="module")
def parts(tiny_path: Path) -> Iterator[Parts]:
    """The tiny model in half precision."""
    parts = assemble(settle(tiny_path, None, {"cache_type": "f16", **SETTINGS}), None, ops=NumpyOps())
    yield parts
    parts.close()


def other(parts: Parts, label: str) -> Transformer:
    settings = {**SETTINGS, **CacheType.read(label).settings()}
    return with_cache(parts, settle(None, None, settings)).model


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("label", "coded"), [("balanced", True), ("balanced", False), ("turbo4:plain", True)])
def test_figures_are_those_of_all_logits(tiny_path: Path, parts: Parts, label: str, coded: bool) -> None:
    model = other(parts, label)
    exact = exact_states(parts.model, IDS)
    found = scored(parts.model, exact, model, served_states(model, IDS, every_token_coded=coded), IDS)

    config, weights = read_model(tiny_path)
    p = softmax(prefill_logits(bare_model(config, weights, block_size=len(IDS) + 2), IDS))[:-1]
    # An engine that loads everything by itself.
    with Engine(
        assemble(settle(tiny_path, None, {**SETTINGS, **CacheType.read(label).settings()}), None, ops=NumpyOps())
    ) as engine:
        logits = engine.score(IDS, every_token_coded=coded, logits=True).logits[:-1]
    q, following = softmax(logits), np.array(IDS[1:])
    kl = (p * np.log(p / q)).sum(axis=1)
    assert kl.mean() > 1e-6
    np.testing.assert_allclose(found.divergence.kl, kl, rtol=1e-3, atol=1e-9)
    assert found.divergence.same_top1.mean() == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=1 / 149)
    assert perplexity(found.logprobs) == pytest.approx(np.exp(-np.log(q[np.arange(149), following]).mean()), rel=1e-5)
    expected = np.log(p[np.arange(149), following])
    np.testing.assert_allclose(exact_logprobs(parts.model, exact, IDS), expected, atol=1e-4)


def test_few_rows_of_logits_are_in_memory_at_a_time(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    logits = Transformer.logits
    monkeypatch.setattr(Transformer, "logits", lambda model, x: rows.append(len(x)) or logits(model, x))
    exact = exact_states(parts.model, IDS)
    scored(parts.model, exact, parts.model, served_states(parts.model, IDS), IDS)
    assert sum(rows) == 2 * (len(IDS) - 1)
    assert max(rows) <= 64

"""Texts that types write, judged by full precision: beside figures from all logits in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.command import cache_types
from polarlm.bench.quality.survey import Survey
from polarlm.engine import Engine
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from tests.bare import bare_model, prefill_logits, read_model
from tests.bench.test_states import softmax

PROMPT = np.random.default_rng(3).integers(5, 90, 20).tolist()
TOKENS = 140  # more than two blocks of 64, so that codes are read


@pytest.fixture(scope="module")
def written(tiny_path: Path):
    survey = Survey(str(tiny_path), cache_types("f16,compact"), 256, NumpyOps(1), lambda sentence: None)
    texts = survey.answers(PROMPT)
    assert len(list(texts.write(TOKENS))) == TOKENS
    answers = texts.judged()
    ids = [writer.ids for writer in texts._writers]
    assert all(group.full.free == group.full.size for model in survey._others for group in model.model.store.groups)
    survey.close()
    return ids, answers


def test_a_text_is_judged_by_full_precision(tiny_path: Path, written) -> None:
    config, weights = read_model(tiny_path)
    for label, ids, answer in zip(("f16", "compact"), *written, strict=True):
        assert ids[: len(PROMPT)] == PROMPT
        assert answer.tokens == TOKENS == len(ids) - len(PROMPT)
        p = softmax(prefill_logits(bare_model(config, weights, block_size=len(ids) + 4), ids))[len(PROMPT) - 1 : -1]
        chosen = p[np.arange(TOKENS), ids[len(PROMPT) :]]
        assert answer.perplexity == pytest.approx(np.exp(-np.log(chosen).mean()), rel=1e-4)
        settings = {"cache_type": label, "ctx_size": 256, "kept_sequences": 0}
        with Engine(assemble(settle(tiny_path, None, settings), None, ops=NumpyOps(1))) as engine:
            q = softmax(engine.score(ids, logits=True).logits)[len(PROMPT) - 1 : -1]
        # A prompt is in full precision until its codes are read, and these need a complete block: it has none.
        assert answer.kl_mean == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=0.01, abs=3e-7)
        assert answer.errors is not None
    f16, compact = written[1]
    assert f16.kl_mean < 1e-5 < compact.kl_mean


def test_tokens_are_drawn_from_the_types_own_distribution(tiny_path: Path, written) -> None:
    """With the random numbers that all types get, by decreasing probability, of a prefill in full precision; f16 rounds
    it by too little to matter but at the edges."""
    config, weights = read_model(tiny_path)
    ids = written[0][0]
    p = softmax(prefill_logits(bare_model(config, weights, block_size=len(ids) + 4), ids))[len(PROMPT) - 1 : -1]
    uniforms, rng = [], np.random.default_rng(0)
    for _ in range(TOKENS):
        uniforms.append(rng.random())
    order = np.argsort(-p, axis=1, kind="stable")
    steps = (np.cumsum(np.take_along_axis(p, order, axis=1), axis=1) <= np.array(uniforms)[:, None]).sum(axis=1)
    expected = np.take_along_axis(order, steps[:, None], axis=1)[:, 0]
    assert (expected == ids[len(PROMPT) :]).mean() > 0.95

"""Scores of cache types: divergences and their figures, scores from hidden states, and windows that all types read;
beside the same figures from all logits in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.command import CacheType, cache_types
from polarlm.bench.quality.divergence import TAIL, Divergence, add_figures, compare, perplexity
from polarlm.bench.quality.scores import windows
from polarlm.bench.quality.states import exact_logprobs, exact_states, score_of, served_states
from polarlm.bench.quality.survey import Survey, arithmetic
from polarlm.bench.result import Figures, Result
from polarlm.engine import Engine, EngineError
from polarlm.engine.backends.numpy import host_memory
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.engine.cli.flags import FlagError
from polarlm.engine.loading.assembly import Parts, assemble, replace_cache
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.model_loaders import load_weights
from tests.bare import bare_model, prefill_logits, read_model

IDS = np.random.default_rng(3).integers(5, 90, 150).tolist()

# -- arithmetic ----------------------------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def test_divergence_matches_its_definition_in_every_row(rng: np.random.Generator) -> None:
    """Σ p·ln(p/q) and Σ min(p, q), over more rows than are computed at once."""
    exact, other = rng.normal(0, 3, (2, 150, 11)).astype(np.float32)
    p, q = softmax(exact), softmax(other)
    actual = compare(exact, other)
    np.testing.assert_allclose(actual.kl, (p * np.log(p / q)).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(actual.accepted, np.minimum(p, q).sum(axis=1), rtol=1e-12)
    assert actual.same_top1.tolist() == [p[t].argmax() == q[t].argmax() for t in range(150)]
    assert 0 < actual.same_top1.mean() < 1


# -- windows and cache types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 12, 13, 40])
def test_every_id_of_a_text_is_in_one_window(count: int) -> None:
    """With a BOS every id is predicted; without one the first id of a window is only read, and a single last id has
    nothing to predict it from."""
    ids = list(range(5, 5 + count))
    cut = windows(ids, 12, bos_id=1)
    assert all(window[0] == 1 and len(window) <= 12 for window in cut)
    assert [i for window in cut for i in window[1:]] == ids
    cut = windows(ids, 12, bos_id=None)
    assert all(2 <= len(window) <= 12 for window in cut)
    assert [i for window in cut for i in window] == (ids[:-1] if count % 12 == 1 else ids)


def test_cache_types_of_a_command_line() -> None:
    assert cache_types("f16, polarquant/f16,f16") == [
        CacheType("f16", "f16", "f16", True),
        CacheType("polarquant/f16", "polarquant", "f16", True),
    ]
    assert cache_types("ring3/ring3.5, ring5@1-2, f16@3,ring3,ring5@1/ring3.5:plain") == [
        CacheType("ring3/ring3.5,ring5@1-2,f16@3", "ring3", "ring3.5,ring5@1-2,f16@3", True),
        CacheType("ring3,ring5@1/ring3.5:plain", "ring3,ring5@1", "ring3.5", False),
    ]
    with pytest.raises(FlagError, match="--types ring3,int9@1: There is no cache type 'int9'"):
        cache_types("ring3,int9@1")


# -- figures of many divergences -----------------------------------------------------------------------------------


def windows_of_kl(kl: np.ndarray) -> list[Divergence]:
    """A window for each row of kl (W, T)."""
    return [Divergence(row, row < 1, np.exp(-row)) for row in kl]


def figures(windows: list[Divergence]) -> Figures:
    result = Result({})
    add_figures(result, "text", "type", windows)
    return result.figures("text", "type")


def quality(survey: Survey) -> Result:
    result = Result({})
    survey.add_to(result)
    return result


@pytest.mark.parametrize(("count", "length"), [(2, 400), (4, 300)])
def test_figures_are_those_of_all_positions(count: int, length: int, rng: np.random.Generator) -> None:
    kl = rng.exponential(1, (count, length))
    actual = figures(windows_of_kl(kl))
    assert actual["kl_mean"].value == pytest.approx(kl.mean())
    assert actual["kl_mean"].runs == pytest.approx(kl.mean(axis=1))
    assert (actual["kl_median"].value, actual["kl_max"].value) == pytest.approx((np.median(kl), kl.max()))
    assert actual["same_top1"].value == pytest.approx((kl < 1).mean())
    assert (TAIL not in actual) == (kl.size < 1000)
    assert all(row.error is not None for row in actual.values())


def test_the_error_of_a_mean_is_that_of_its_windows(rng: np.random.Generator) -> None:
    """σ/√W of the means of W windows, however alike the positions of a window are; 200 draws know it to 5 %, and 40
    windows σ to 11 %."""
    means = rng.normal(5, 1, 40)
    kl = means[:, None] + rng.normal(0, 0.01, (40, 500))
    actual = figures(windows_of_kl(kl))
    assert actual["kl_mean"].error == pytest.approx(means.std() / 40**0.5, rel=0.15)
    assert actual["kl_mean"].error == pytest.approx(1 / 40**0.5, rel=0.4)


# -- scores from hidden states -------------------------------------------------------------------------------------

SETTINGS = {"block_size": 16, "kept_sequences": 0, "calibration": False}


@pytest.fixture(scope="module")
def parts(tiny_path: Path) -> Iterator[Parts]:
    """The tiny model in half precision."""
    parts = assemble(settle(tiny_path, None, {"cache_type": "f16", **SETTINGS}), None, ops=NumpyOps())
    yield parts
    parts.close()


def other(parts: Parts, label: str) -> Transformer:
    settings = {**SETTINGS, **CacheType.read(label).settings()}
    return replace_cache(parts, settle(None, None, settings)).model


@pytest.mark.parametrize(("label", "coded"), [("balanced", True), ("balanced", False), ("turbo4:plain", True)])
def test_figures_are_those_of_all_logits(tiny_path: Path, parts: Parts, label: str, coded: bool) -> None:
    model = other(parts, label)
    exact = exact_states(parts.model, IDS)
    actual = score_of(parts.model, exact, model, served_states(model, IDS, every_token_coded=coded), IDS)

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
    np.testing.assert_allclose(actual.divergence.kl, kl, rtol=1e-3, atol=1e-9)
    assert actual.divergence.same_top1.mean() == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=1 / 149)
    assert perplexity(actual.logprobs) == pytest.approx(np.exp(-np.log(q[np.arange(149), following]).mean()), rel=1e-5)
    expected = np.log(p[np.arange(149), following])
    np.testing.assert_allclose(exact_logprobs(parts.model, exact, IDS), expected, atol=1e-4)


# -- windows that all types read -----------------------------------------------------------------------------------


def surveyed(path: Path, ops: Ops, *types: str) -> Survey:
    survey = Survey(str(path), cache_types(",".join(types)), 256, ops, lambda sentence: None)
    for _ in survey.score(IDS):
        pass
    return survey


def test_compiled_kernels_find_what_numpy_finds(tiny_path: Path) -> None:
    """For models whose weights as float32 do not fit. Their full precision is a prefill by the same kernels."""
    native = select("cpu", 1)[0]
    assert native.backend == "native"
    types = "f16", "balanced", "compact"
    actual = []
    for ops in (NumpyOps(1), native):
        survey = surveyed(tiny_path, ops, *types)
        actual.append(quality(survey))
        survey.close()
    plain, ours = actual
    assert ours["exact_perplexity"] == pytest.approx(plain["exact_perplexity"], rel=1e-2)
    for name in types:
        expected, row = plain.figures("text", name), ours.figures("text", name)
        assert row["kl_mean"].value == pytest.approx(expected["kl_mean"].value, rel=0.3, abs=2e-5)
        assert row["bits_per_value"] == expected["bits_per_value"]


def test_float32_is_left_out_only_where_it_does_not_fit(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source, _ = load_weights(tiny_path)
    try:
        assert arithmetic(source, 1).backend == "numpy"
        monkeypatch.setattr(host_memory, "available", lambda: 1000)
        assert arithmetic(source, 1).backend == "native"
    finally:
        source.close()


def test_a_window_is_as_long_as_memory_allows(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "most", lambda: 1 << 30)
    monkeypatch.setattr(host_memory, "available", lambda: 250_000)
    survey = Survey(str(tiny_path), cache_types("f16,compact"), 256, NumpyOps(1), lambda sentence: None)
    assert 64 < survey.context < 256
    for _ in survey.score(IDS[: survey.context]):
        pass
    survey.close()
    monkeypatch.setattr(host_memory, "available", lambda: 150_000)
    with pytest.raises(EngineError, match="too little") as caught:
        Survey(str(tiny_path), cache_types("f16,compact"), 256, NumpyOps(1), lambda sentence: None)
    assert caught.value.code == "out_of_memory"


def test_no_type_is_compared_on_other_windows_than_the_rest(tiny_path: Path) -> None:
    survey = surveyed(tiny_path, NumpyOps(1), "f16", "balanced")
    whole = quality(survey)
    assert (survey.windows, whole["scored_tokens"]) == (1, 149)
    passes = survey.score(IDS[:100])
    next(passes)
    next(passes)  # full precision and the first type
    assert survey.windows == 1
    assert quality(survey).as_json() == whole.as_json()
    next(passes)
    assert (survey.windows, quality(survey)["scored_tokens"]) == (2, 149 + 99)
    survey.close()

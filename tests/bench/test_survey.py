"""Windows of a text scored with several cache types at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polarlm.bench.command import cache_types
from polarlm.bench.quality.survey import Survey, arithmetic
from polarlm.engine import EngineError
from polarlm.engine.backends.numpy import host_memory
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.backends.select import select
from polarlm.model_loaders import load_weights

IDS = np.random.default_rng(3).integers(5, 90, 200).tolist()


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
    found = []
    for ops in (NumpyOps(1), native):
        survey = surveyed(tiny_path, ops, *types)
        found.append(survey.quality())
        survey.close()
    plain, ours = found
    assert ours.exact_perplexity == pytest.approx(plain.exact_perplexity, rel=1e-2)
    for expected, row in zip(plain.rows, ours.rows, strict=True):
        assert row.kl_mean == pytest.approx(expected.kl_mean, rel=0.3, abs=2e-5)
        assert row.bits_per_value == expected.bits_per_value


def test_float32_is_left_out_only_where_it_does_not_fit(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source, _ = load_weights(tiny_path)
    try:
        assert isinstance(arithmetic(source, 1), NumpyOps)
        monkeypatch.setattr(host_memory, "available", lambda: 1000)
        assert not isinstance(arithmetic(source, 1), NumpyOps)
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
    whole = survey.quality()
    assert (survey.windows, whole.scored_tokens) == (1, 199)
    passes = survey.score(IDS[:100])
    next(passes)
    next(passes)  # full precision and the first type
    assert survey.windows == 1
    assert survey.quality() == whole
    next(passes)
    assert (survey.windows, survey.quality().scored_tokens) == (2, 199 + 99)
    survey.close()

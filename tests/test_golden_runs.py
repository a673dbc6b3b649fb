"""Small models give the answers and scores that they gave before, with every kind of cache; needs no network.

`scripts.make_golden` wrote the file, on one machine. With another BLAS the last bit of a float32 may be rounded the
other way, and then a value in the cache, too: a half by 2⁻¹¹ of itself, or one code out of thousands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.loading import kept_arrays
from polarlm.engine.state.cache_types import PRESETS
from polarlm.model_loaders import LoadError
from scripts.make_golden import FILE, TYPES, answer, open_engine, scores

GOLDEN: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
# Nats. Another order of float32 sums moves these log-probabilities by 10⁻⁵, and by 0.0072 at most where values in the
# cache round the other way: so much was it with OPENBLAS_CORETYPE Prescott, Nehalem, Sandybridge, Haswell and SkylakeX.
TOLERANCE = 1e-2
RUNS = [(model, cache_type) for model in TYPES for cache_type in TYPES[model]]


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("statistics")


@pytest.fixture(autouse=True)
def _statistics_in_float32(statistics: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that other tests have kept may come from compiled kernels, which round otherwise."""
    monkeypatch.setattr(kept_arrays, "cache_folder", lambda: statistics)


def test_every_run_is_in_the_file_and_every_family_of_codecs_in_a_run() -> None:
    assert [(model, cache_type) for model, runs in GOLDEN.items() for cache_type in runs["types"]] == RUNS
    mixed = [preset[:2] for _, name in RUNS if (preset := PRESETS.get(name))]
    names = {name for _, cache_type in RUNS if cache_type not in PRESETS for name in cache_type.split("/")}.union(
        *mixed
    )
    assert {codecs.file_of(codecs.get(name)) for name in names} == {
        codecs.file_of(codecs.get(name)) for name in codecs.available()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cache_type"), RUNS)
def test_answers_and_scores_have_not_changed(model: str, cache_type: str) -> None:
    golden, prompt = GOLDEN[model]["types"][cache_type], GOLDEN[model]["prompt"]
    try:
        with open_engine(model, cache_type) as engine:
            ids, logprobs, _ = answer(engine, prompt, len(golden["answer"]))
            figures = {"logprobs": logprobs, **scores(engine, model, [*prompt, *golden["answer"]])}
    except LoadError as error:
        pytest.skip(f"the demonstration model cannot be had: {error}")
    assert ids == golden["answer"]
    for name, numbers in figures.items():
        np.testing.assert_allclose(numbers, golden[name], rtol=0, atol=TOLERANCE, err_msg=name)

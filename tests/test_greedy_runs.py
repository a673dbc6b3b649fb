"""Greedy answers of 200 tokens, each by a step of its own, equal the answers of transformers.

`scripts/make_fixtures.py` wrote `greedy.json`, and chose prompts whose answers vary. Where the most likely token is the
same for ever, as in Gemma's tied models, the answer is of tokens that are not among the last ones (`apart`). A store in
full precision holds halves, so an answer may only differ from the reference's where a token's margin over the next one
is as small as what rounding changes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from tests.conftest import FIXTURES
from tests.tiny import load_tiny, make_model

RUNS: dict[str, dict[str, Any]] = json.loads((FIXTURES.parent / "greedy.json").read_text(encoding="utf-8"))
STEPS = 200
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, repeat_penalty=1, dry_multiplier=0)


@pytest.mark.parametrize("name", ["gemma4_shared_kv", "gpt_oss_mxfp4"])
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Also with compiled kernels, where there are any."""
    path, run = make_model(tmp_path, name), RUNS[name]
    params = replace(GREEDY, presence_penalty=1000, repeat_last_n=run["apart"])
    for ops in (NumpyOps(), None):
        with load_tiny(path, ops=ops, device="cpu", ctx_size=256, cache_type="f16") as engine:
            assert [*engine.generate(run["prompt"], params).token_ids] == run["answer"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_answers_of_every_model_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Slow: 20 models, 200 steps each."""
    test_answers_are_those_of_transformers(name, tmp_path)

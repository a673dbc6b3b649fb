"""Tokens that a model's files ban from its answers, however these are computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Completion, Engine, EngineError, SamplingParams
from polarlm.engine.outputs import fold
from tests.requests.drafters import ANEW, Known, Unpaced, drafting
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, forget, load_tiny, make_model

PROMPT = [9, 20, 33, 47, 5, 61, 72, 8, 90, 11, 12, 13]
LENGTH = 24
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 1.2, "seed": 5},
    "min_tokens": {"temperature": 0, "min_tokens": LENGTH},
}


def banning(folder: Path, **bans: object) -> Engine:
    folder.mkdir(exist_ok=True)
    (make_model(folder) / "generation_config.json").write_text(json.dumps(bans))
    return load_tiny(folder, device="cpu", block_size=16, cache_type="f16", calibration=False)


def answer(engine: Engine, drafts: Sequence[int] = (), **more: Any) -> tuple[int, ...]:
    guesses = Unpaced(Known([*PROMPT, *drafts], 1.0, VOCABULARY), lambda: 4) if drafts else None
    drafting(engine, lambda ids: guesses)
    forget(engine)
    return engine.generate(PROMPT, SamplingParams(max_tokens=LENGTH, ignore_eos=True, **more), ANEW).token_ids


@pytest.mark.parametrize(("way", "are_drafted"), [("sampled", False), ("greedy", True), ("min_tokens", True)])
def test_banned_tokens_are_never_written(way: str, are_drafted: bool, tmp_path: Path) -> None:
    with banning(tmp_path / "free") as engine:
        free = answer(engine, **WAYS[way])
    first, (before, last) = free[0], next(pair for pair in pairwise(free) if pair[0] != pair[1])
    drafts = free if are_drafted else ()
    for name, ids in (("suppress_tokens", [last]), ("bad_words_ids", [[last]])):
        with banning(tmp_path / name, **{name: ids}) as engine:
            assert last not in answer(engine, drafts, **WAYS[way])
    with banning(tmp_path / "first", begin_suppress_tokens=[first]) as engine:
        assert answer(engine, drafts, **WAYS[way])[0] != first
        after = {first: 100.0}
        assert answer(engine, drafts, temperature=0, logit_bias=after)[1:] == (first,) * (LENGTH - 1)
    with banning(tmp_path / "words", bad_words_ids=[[before, last], [PROMPT[-2], PROMPT[-1], first]]) as engine:
        tokens = answer(engine, drafts, **WAYS[way])
        assert tokens[0] != first  # the words begin in the prompt
        assert (before, last) not in pairwise(tokens)
        only = answer(engine, drafts, temperature=0, logit_bias={before: 50.0, last: 100.0})
        assert only == (last,) * LENGTH  # it is not banned elsewhere


def test_a_constraint_chooses_among_the_others(tmp_path: Path) -> None:
    def constrained(allowed: set[int]) -> Completion:
        params = SamplingParams(temperature=0, max_tokens=9)
        return fold(engine.stream(PROMPT, params, constraint=InTurn([allowed], VOCABULARY, count=2)))

    with banning(tmp_path, suppress_tokens=[22]) as engine:
        assert constrained({22, 23}).token_ids == (23, 23)
        with pytest.raises(EngineError, match="the tokens that the model's files ban, bans every token"):
            constrained({22})

"""The place of the needle, correct answers, and scoring through the cache."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from polarlm.bench.quality.needle import Cell, Prompt
from polarlm.bench.quality.reference import Reference

from polarlm.bench.command import CacheType
from polarlm.bench.quality.__main__ import needle
from tests.shared_data import shared

DEPTHS = (0, 25, 50, 75, 100)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(str(shared("models", "stories260K")), 128)


@pytest.fixture(scope="module")
def haystack(reference: Reference) -> list[int]:
    return reference.tokenize(shared("text", "tinystories_dedup.txt").read_text(encoding="utf-8")[:4000])


@pytest.fixture(params=[False, True], ids=["base", "chat"])
def prompts(request: pytest.FixtureRequest, reference: Reference, haystack: list[int]) -> list[Prompt]:
    reference.model.template.is_default = not request.param
    return [needle.hide(reference, haystack, 256, depth) for depth in DEPTHS]


def test_a_prompt_has_the_requested_length(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        assert 256 - 8 <= len(prompt.ids) + len(prompt.answer) <= 256


def test_the_needle_is_at_its_depth_and_contains_the_answer(reference: Reference, prompts: list[Prompt]) -> None:
    places = []
    for prompt in prompts:
        text = reference.detokenize([*prompt.ids, *prompt.answer])
        begin = text.rindex("The secret number of the ")
        answer = text[begin:]
        places.append(text.index(f"{answer}.") / begin)
        assert text.count(answer) == 2
        assert reference.detokenize(prompt.ids).endswith(" is")
    assert places[0] < 0.15
    # Sentences are long in a text so short.
    assert all(abs(place - depth / 100) < 0.25 for place, depth in zip(places, DEPTHS, strict=True))
    assert places == sorted(places)


def test_each_cell_has_its_own_reproducible_needle(reference: Reference, haystack: list[int]) -> None:
    answers = [needle.hide(reference, haystack, length, 50).answer for length in (128, 129, 130, 128)]
    assert answers[0] == answers[3]
    assert len({tuple(answer) for answer in answers}) == 3


def engine_that_expects(tokens: list[int]) -> SimpleNamespace:
    """Its most likely tokens after any prompt end in `tokens`; each token of a text scores −0.5."""

    def score(ids: list[int], every_token_coded: bool, logits: bool) -> SimpleNamespace:
        logits = np.zeros((len(ids), 10), np.float32)
        for place, token in enumerate(tokens, len(ids) - len(tokens) - 1):
            logits[place, token] = 1
        return SimpleNamespace(logprobs=np.full(len(ids) - 1, -0.5, np.float32), logits=logits)

    return SimpleNamespace(score=score)


@pytest.mark.parametrize(("expected", "correct"), [([7, 8, 9], True), ([7, 8, 8], False), ([6, 8, 9], False)])
def test_an_answer_is_correct_if_each_token_is_the_most_likely(expected: list[int], correct: bool) -> None:
    cell = needle._answered(engine_that_expects(expected), "f16", "as served", Prompt(8, 50, [1, 2, 3], [7, 8, 9]))  # type: ignore[arg-type]
    assert cell == Cell("f16", "as served", 8, 50, tokens=3, logprob=-1.5, correct=correct)


def test_answers_are_scored_by_the_cache_type(reference: Reference, haystack: list[int]) -> None:
    reference.model.template.is_default = True
    prompts = [needle.hide(reference, haystack, length, 50) for length in (120, 200)]
    cells = needle.find(reference, [CacheType.read("f16"), CacheType.read("polarquant")], prompts)
    assert [(c.type, c.scored_as, c.length) for c in cells] == [
        (label, scoring, length)
        for label in ("f16", "polarquant")
        for scoring in ("as served", "every token coded")
        for length in (120, 200)
    ]
    whole = [*prompts[0].ids, *prompts[0].answer]
    answer = float(reference.score(whole).logprobs[-len(prompts[0].answer) :].sum())
    *same, coded = (c.logprob for c in cells if c.length == 120)
    # Half precision, and as served all but the first block is the current one; only codes tell.
    assert same == pytest.approx([answer] * 3, abs=0.02)
    assert abs(coded - answer) > 0.02


def test_retrieved_counts_needles_by_length() -> None:
    cells = [
        Cell(label, scoring, length, depth, 5, -1.0, correct=depth >= length)
        for label in ("f16", "polarquant")
        for scoring in ("as served", "every token coded")
        for length in (40, 60)
        for depth in (0, 50, 100)
    ]
    assert needle.retrieved(cells, "f16") == "40 (2 of 3), 60 (1 of 3)"
    header, _, first, *_ = needle.format_grid(cells).splitlines()
    assert [cell.strip() for cell in header.split("|")[4:-1]] == ["0 % deep", "50 % deep", "100 % deep"]
    assert first.count("found") == 2

"""Drafted tokens: answers are the same as with steps of one token, whatever is drafted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Completion, Engine, EngineError, SamplingParams
from polarlm.engine.loading import warm_up
from polarlm.engine.model.warm_up import warm_up_drafts
from polarlm.engine.outputs import fold
from polarlm.engine.requests.drafters.prompt_lookup import PromptLookup
from polarlm.engine.requests.drafts import Drafts, StepPlan, StepSeconds
from polarlm.engine.sampling.sample import Fetch
from tests.requests.drafters import (
    ANEW,
    PARAMS,
    SETTINGS,
    Known,
    Unpaced,
    draft_alone,
    drafting,
    first_difference,
    margin,
    plain,
    prompts,
    summary,
)
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, assert_idle, forget, load_tiny, make_model

PROMPT = [9, 20, 33, 47, 5, 61, 72, 8, 90, 11, *range(30, 40)]  # more than a step has rows for


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with load_tiny(tiny_path, cache_type="polarquant", **SETTINGS) as engine:
        yield engine
        assert_idle(engine)


def drafted(
    engine: Engine, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams = PARAMS, right: float = 0.8
) -> tuple[Completion, Unpaced]:
    """An answer with drafts of random lengths, with some wrong tokens."""
    rng = np.random.default_rng(len(prompt))
    ids = [*prompt, *answer, *[7] * 20]
    drafts = Unpaced(Known(ids, right, VOCABULARY, seed=len(prompt)), lambda: int(rng.integers(0, 16)))
    drafting(engine, lambda ids: drafts)
    forget(engine)
    return engine.generate(prompt, params, ANEW), drafts


@pytest.mark.parametrize(("right", "temperature"), [(0.0, 0), (0.5, 1.5), (1.0, 0)])
def test_answers_are_those_of_steps_of_one_token(engine: Engine, right: float, temperature: float) -> None:
    """A draw has the random number that it has there, so sampled answers are the same too."""
    for number, prompt in enumerate(prompts(4)):
        params = replace(PARAMS, temperature=temperature, seed=number)
        wanted = plain(engine, prompt, params)
        answer, drafts = drafted(engine, prompt, wanted.token_ids, params, right)
        place = first_difference(answer.token_ids, wanted.token_ids)
        assert place is None or (temperature == 0 and margin(engine, prompt, params, place) < 0.02)
        assert summary(answer) == summary(wanted) or place is not None
        assert drafts.drafted > 0
        if right in (0.0, 1.0) and place is None:
            assert drafts.accepted == right * drafts.drafted


ENDS: dict[str, dict[str, Any]] = {
    "max_tokens": {"max_tokens": 5},
    "stop string": {"stop": ("e", "th")},
    "end of sequence": {"ignore_eos": False, "logit_bias": {2: 4.0}},
    "min_tokens": {"stop_token_ids": tuple(range(20, 60, 3)), "min_tokens": 11},
    "samplers": {"xtc_probability": 0.5, "xtc_threshold": 0.02, "top_n_sigma": 3.0},
    "penalties": {"repeat_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repeat_last_n": 9},
}


@pytest.mark.parametrize("more", ENDS.values(), ids=ENDS)
def test_answers_end_and_are_penalised_as_in_steps_of_one_token(engine: Engine, more: dict[str, Any]) -> None:
    """An end in the midst of right drafts leaves what a plain answer leaves: the next turn finds as much."""
    reasons = set()
    for number, prompt in enumerate(prompts(4, seed=1)):
        params = replace(PARAMS, temperature=1.2, seed=number, **more)
        wanted = plain(engine, prompt, params)
        stored = engine._runner.newest
        whole = plain(engine, prompt, replace(params, stop=(), stop_token_ids=(), ignore_eos=True))
        found, _ = drafted(engine, prompt, whole.token_ids, params, right=0.95)
        assert summary(found) == summary(wanted)
        assert engine._runner.newest == stored
        reasons.add(found.finish_reason)
    assert reasons <= {"stop", "length"}


def test_log_probabilities_are_those_of_plain_steps(engine: Engine) -> None:
    """Up to sums in another order, which round a few stored numbers otherwise: less than rounding all of them does."""
    params = replace(PARAMS, logprobs=3)
    wanted = plain(engine, PROMPT, params)
    whole = plain(engine, [*PROMPT, *wanted.token_ids], replace(params, max_tokens=1, prompt_logprobs=0))
    unrounded = whole.prompt_logprobs[-len(wanted.logprobs) :]
    rounding = max(abs(one.logprob - other.logprob) for one, other in zip(unrounded, wanted.logprobs, strict=True))
    found, _ = drafted(engine, PROMPT, wanted.token_ids, params)
    assert found.token_ids == wanted.token_ids
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert (one.id, len(one.top)) == (other.id, len(other.top))
        assert abs(one.logprob - other.logprob) < rounding


def test_an_error_in_a_draft_fails_its_own_request_alone(engine: Engine) -> None:
    class Broken(Known):
        def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
            if len(ids) > len(PROMPT) + 5:
                raise MemoryError
            return super().draft(ids, most)

    wanted, trays = plain(engine, PROMPT), [list[Any](), list[Any]()]
    made = iter([Unpaced(Broken(PROMPT, 1.0, VOCABULARY)), None])
    drafting(engine, lambda ids: next(made))
    for tray in trays:
        engine.submit(PROMPT, PARAMS, ANEW, into=tray)
    while engine.work():
        pass
    assert isinstance(trays[0][-1], EngineError)
    assert "not enough memory" in str(trays[0][-1])
    assert summary(fold(trays[1])) == summary(wanted)


def test_requests_with_a_constraint_or_dry_are_not_drafted(engine: Engine) -> None:
    """Which tokens may come, and which would repeat, is known of the next token alone."""
    made: list[Any] = []
    drafting(engine, lambda ids: made.append(ids))
    fold(engine.stream(PROMPT, PARAMS, constraint=InTurn([range(5, 60)], VOCABULARY)))
    engine.generate(PROMPT, replace(PARAMS, dry_multiplier=1.0))
    assert not made
    engine.generate(PROMPT, PARAMS)
    assert made == [PROMPT]


def test_an_error_behind_right_drafts_comes_where_it_came(engine: Engine) -> None:
    """A row behind a wrong token may have any error: it does not count."""
    rng = np.random.default_rng(0)
    bans = dict.fromkeys(range(VOCABULARY), -np.inf)
    allowed = plain(engine, PROMPT).token_ids
    params = replace(PARAMS, logit_bias={token: bias for token, bias in bans.items() if token not in allowed[:3]})
    wanted = plain(engine, PROMPT, params)
    found, _ = drafted(engine, PROMPT, wanted.token_ids, params, right=0.5)
    assert summary(found) == summary(wanted)
    step = engine._model.step

    def failing(*given: Any) -> Any:
        rows = step(*given).wait()
        if len(rows) > 3:
            rows[-1] = EngineError("broken row")
        return Fetch(None, lambda: rows)

    engine._model.step = failing  # type: ignore[method-assign]
    found, drafts = drafted(engine, PROMPT, [*rng.integers(5, 60, 40)], right=1)  # all wrong
    assert max(drafts.lengths) > 3
    assert summary(found) == summary(plain(engine, PROMPT))
    with pytest.raises(EngineError, match="broken row"):
        drafted(engine, PROMPT, found.token_ids, right=1)


# -- drafters ---------------------------------------------------------------------------------------------------------


def looked_up(ids: Sequence[int], size: int, most: int) -> list[int]:
    """What a search of all ids finds."""
    for end in range(len(ids) - 1, size - 1, -1):
        if ids[end - size : end] == ids[-size:] and len(ids) >= size:
            given = ids[end:]
            return [given[at % len(given)] for at in range(most)]
    return []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_prompt_lookup_finds_what_a_search_finds(size: int) -> None:
    rng = np.random.default_rng(size)
    for vocabulary in (2, 3, 9):
        ids = rng.integers(0, vocabulary, 60).tolist()
        begin = int(rng.integers(1, 30))
        lookup = PromptLookup(size, vocabulary, ids[:begin])
        for end in range(begin, len(ids)):
            if rng.random() < 0.7:  # tokens may come several at a time
                wanted = looked_up(ids[:end], size, 7)
                assert list(lookup.draft(ids[:end], 7)) == wanted
                assert lookup.is_ready(ids[:end]) == bool(wanted)


@pytest.mark.usefixtures("warmed_up_at_once")
@pytest.mark.parametrize(
    ("model", "more", "wanted"),
    [
        ("llama_gqa_linear", {}, [2, 3, 4, 5, 6, 7, 8, 16]),
        ("qwen3_5_tied", {}, []),
        ("qwen3_5_tied", {"spec_type": "ngram-simple"}, [2, 3, 4, 5, 6, 7, 8, 16]),
        ("qwen3_5_tied", {"spec_type": "ngram-simple", "draft_max": 5}, [2, 3, 4, 5, 6]),
    ],
)
def test_steps_of_several_rows_are_warmed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, more: dict[str, Any], wanted: list[int]
) -> None:
    """Otherwise the first short prompts and the first drafts would wait for kernels. With recurrent layers, prompts are
    no steps."""
    seen: list[int] = []
    monkeypatch.setattr(warm_up, "warm_up_drafts", lambda model, rows: seen.append(rows) or warm_up_drafts(model, rows))
    with Engine.load(make_model(tmp_path, model), device="cpu", **{**SETTINGS, **more}) as engine:
        assert seen == (wanted if engine._parts.model.ops.warm_up() is not None else [])


# -- whether drafts pay -----------------------------------------------------------------------------------------------

COSTS = {1: 1.0, 2: 1.25, 4: 1.7, 8: 2.8, 16: 6.0}  # costs of steps by their rows, as on a CPU


def measured(costs: dict[int, float]) -> StepSeconds:
    seconds = StepSeconds()
    for rows, cost in costs.items():
        for _ in range(5):
            seconds.record(rows, cost)
    return seconds


def paced(
    right: float, tokens: int, costs: dict[int, float], seed: int = 0, seconds: StepSeconds | None = None
) -> tuple[float, Drafts]:
    """How many times as fast as plain steps `tokens` tokens are, if drafts know a share of them; no blocks end.

    seconds: what is known of the costs before.
    """
    rng = np.random.default_rng(seed)
    answer = rng.integers(5, VOCABULARY, tokens).tolist()
    seconds = seconds or StepSeconds()
    drafts = Drafts(Known(answer, right, VOCABULARY, seed), 15, seconds)
    done, spent = 1, 0.0
    while done < tokens:
        batch = StepPlan(1)
        guesses = draft_alone(drafts, answer[:done], tokens - done - 1, batch)
        assert batch.rows == 1 + len(guesses)
        good = 0
        while good < len(guesses) and guesses[good] == answer[done + good]:
            good += 1
        done += good + 1
        if guesses:
            drafts.record(answer[:done], len(guesses), good)
        cost = costs[batch.rows]
        seconds.record(batch.rows, cost)
        spent += cost
    return (tokens - 1) * costs[1] / spent, drafts


@pytest.mark.parametrize("seed", range(2))
def test_drafts_that_are_wrong_cost_next_to_nothing(seed: int) -> None:
    speed, drafts = paced(0.0, 128, COSTS, seed)
    assert speed > 0.98
    assert 0 < drafts.drafted < 10
    assert paced(0.15, 256, COSTS, seed)[0] > 0.98


def test_drafts_that_are_right_are_as_long_as_pays() -> None:
    speed, drafts = paced(1.0, 256, COSTS)
    assert speed > 2.5
    assert drafts.accepted == drafts.drafted
    assert paced(1.0, 256, {**COSTS, 8: 1.5, 16: 2.0})[0] > 6


def test_drafts_stop_where_more_rows_only_cost_and_come_back_where_they_pay() -> None:
    """A batch for which the machine has no time left; text after which a repetition begins."""
    dear = {rows: float(rows) for rows in COSTS}
    assert paced(0.7, 512, dear)[0] > 0.9  # each number of rows is tried
    assert paced(0.7, 512, dear, seconds=measured(dear))[0] > 0.98
    rng = np.random.default_rng(0)
    answer = rng.integers(5, VOCABULARY, 600).tolist()
    known = Known(answer, 1, VOCABULARY)
    known._ids[:200] = [4] * 200
    drafts, done, steps = Drafts(known, 15, measured(COSTS)), 1, 0
    while done < 500:
        guesses = draft_alone(drafts, answer[:done], 15, StepPlan(1))
        good = len(guesses) if done >= 200 else 0
        done += good + 1
        steps += done >= 280
        if guesses:
            drafts.record(answer[:done], len(guesses), good)
    assert steps < 220 / 3


def test_seconds_of_steps_are_medians_of_the_last_ones() -> None:
    seconds = StepSeconds()
    assert seconds(8) > seconds(1)
    for value in (9.0, 9.0, 1.0, 1.1, 1.0, 5.0, 1.0):  # the first two are compiled and recorded
        seconds.record(1, value)
    assert seconds(1) == 1.0
    assert 1 < seconds(2) < seconds(4) < 2
    for value in (9.0, 9.0, 2.5, 2.5):
        seconds.record(8, value)
    assert seconds(8) == 2.5
    for _ in range(600):
        seconds.record(1, 4.0)
    assert seconds(8) > 4.0  # it was too long ago


@pytest.mark.parametrize(("most", "lengths"), [(15, {1, 3, 7, 15}), (8, {1, 3, 7, 8}), (1, {1})])
def test_lengths_of_drafts_are_few(most: int, lengths: set[int]) -> None:
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        drafts = Drafts(Known([*range(200)], 1, 500), most, lambda rows: float(rng.random()))
        seen.add(len(draft_alone(drafts, [0], int(rng.integers(0, 16)), StepPlan(1))))
    assert seen == {0, *lengths}

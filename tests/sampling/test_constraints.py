"""Constrained decoding: masks over the vocabulary, and how a request calls its constraint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import Engine, PromptOptions, SamplingParams
from polarlm.engine.outputs import Chunk, Completion, fold
from polarlm.engine.sampling.constraints import allowed_bits, checked_mask
from tests.requests.drafters import ANEW
from tests.sampling.constrained import InTurn, mask_of
from tests.tiny import EOS, VOCABULARY, assert_idle, blocks_left, by_count, forget, preemptions

BLOCK = 16
PROMPT = [9, 20, 33, 47, 5, 61, 72, 8, 90, 11]
PARAMS = SamplingParams(temperature=1.5, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture
def engine(tiny_path: Path) -> Iterator[Engine]:
    with Engine.load(tiny_path, device="cpu", cache_type="f16", block_size=BLOCK, parallel=4) as engine:
        yield engine
        assert_idle(engine)


def constrained(engine: Engine, constraint: InTurn, params: SamplingParams = PARAMS) -> Completion:
    return fold(engine.stream(PROMPT, params, constraint=constraint))


# -- masks -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.data())
def test_a_mask_has_a_bit_for_each_token(vocabulary: int, data: st.DataObject) -> None:
    tokens = data.draw(st.sets(st.integers(0, vocabulary - 1)))
    mask = mask_of(tokens, vocabulary)
    assert np.flatnonzero(allowed_bits(mask, vocabulary)).tolist() == sorted(tokens)
    # As libraries have them: signed, of a tokenizer with more tokens, with anything behind the vocabulary.
    longer = np.concatenate([mask.view(np.int32), np.full(3, -1, np.int32)])
    assert (checked_mask(longer, vocabulary) == mask).all()


# -- requests --------------------------------------------------------------------------------------------------------


def test_answers_follow_their_constraint(engine: Engine) -> None:
    """Alternating sets; an answer that its constraint ends, and one that an end token ends."""
    vowels, others = set(range(5, 12)), set(range(40, 60))
    alternating = InTurn([vowels, others, None], VOCABULARY)
    answer = constrained(engine, alternating)
    assert answer.token_ids == tuple(alternating.accepted)
    assert len(answer.token_ids) == PARAMS.max_tokens
    assert set(answer.token_ids[0::3]) <= vowels
    assert set(answer.token_ids[1::3]) <= others
    assert not set(answer.token_ids[2::3]) <= vowels | others  # where all may come, others do

    ended = constrained(engine, InTurn([vowels], VOCABULARY, count=4))
    assert (len(ended.token_ids), ended.finish_reason) == (4, "stop")

    digits_then_stop = InTurn([*[range(20, 30)] * 3, EOS], VOCABULARY)
    stopped = constrained(engine, digits_then_stop, replace(PARAMS, ignore_eos=False))
    assert (len(stopped.token_ids), stopped.finish_reason) == (3, "stop")
    assert tuple(digits_then_stop.accepted) == stopped.token_ids  # the token that ends an answer is not part of it


def test_log_probabilities_are_the_model_s_own(engine: Engine) -> None:
    params, anew = replace(PARAMS, max_tokens=1, logprobs=20), PromptOptions(cache_prompt=False)
    free = fold(engine.stream(PROMPT, params, anew))
    told = fold(engine.stream(PROMPT, params, anew, constraint=InTurn([{7}], VOCABULARY)))
    assert told.token_ids == (7,)
    assert told.logprobs[0].top == free.logprobs[0].top
    assert told.logprobs[0].logprob < -0.1


class Broken(InTurn):
    """Raises in call number `at` of one of its methods."""

    def __init__(self, method: str, at: int):
        super().__init__([None], VOCABULARY)
        self._calls = {method: at}

    def _call(self, method: str) -> None:
        left = self._calls.get(method)
        if left == 0:
            raise RuntimeError("the grammar is broken")
        if left is not None:
            self._calls[method] = left - 1

    def allowed(self) -> np.ndarray | None:
        self._call("allowed")
        return super().allowed()

    def accept(self, token: int) -> None:
        self._call("accept")
        super().accept(token)


def with_others(engine: Engine, constraint: InTurn) -> tuple[list[Chunk | Exception], list[Completion]]:
    """The result of a request with a constraint beside two without."""
    trays: list[list[Chunk | Exception]] = [[], [], []]
    for number, tray in enumerate(trays):
        given = constraint if number == 1 else None
        engine.submit(PROMPT, replace(PARAMS, seed=number), ANEW, into=tray, constraint=given)
    while engine.work():
        pass
    return trays[1], [fold(tray) for tray in (trays[0], trays[2])]


@pytest.mark.parametrize(
    ("constraint", "tokens", "error"),
    [
        (InTurn([{5, 6}, {7}, ()], VOCABULARY), 2, "constraint bans every token that could come next"),
        (InTurn([None, {7}], 31), 1, "a mask of uint32"),
        (Broken("allowed", 3), 3, "the grammar is broken"),
        (Broken("accept", 0), 0, "the grammar is broken"),
    ],
)
def test_an_error_ends_only_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, constraint: InTurn, tokens: int, error: str
) -> None:
    by_count(engine, monkeypatch)
    alone = [fold(engine.stream(PROMPT, replace(PARAMS, seed=number), ANEW)) for number in (0, 2)]
    given, others = with_others(engine, constraint)
    assert [answer.token_ids for answer in others] == [answer.token_ids for answer in alone]
    *chunks, last = given
    assert len(chunks) == tokens
    assert isinstance(last, Exception)
    assert error in str(last)


def test_a_request_that_is_preempted_accepts_each_token_once(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"device": "cpu", "block_size": BLOCK, "cache_type": "f16", "parallel": 4, "kept_sequences": 1}
    params = replace(PARAMS, max_tokens=40)
    sets = [range(5, 20), range(20, 40), None, range(50, 90)]
    with Engine.load(tiny_path, **settings) as engine:
        by_count(engine, monkeypatch)
        alone = [
            fold(engine.stream(PROMPT, replace(params, seed=n), constraint=InTurn(sets, VOCABULARY))) for n in range(4)
        ]
        forget(engine)
        preempted = preemptions(engine, monkeypatch)
        constraints = [InTurn(sets, VOCABULARY) for _ in alone]
        trays: list[list[Chunk | Exception]] = [[] for _ in alone]
        with blocks_left(engine, (len(PROMPT) + 40) // BLOCK + 2):
            for number, (tray, constraint) in enumerate(zip(trays, constraints, strict=True)):
                engine.submit(PROMPT, replace(params, seed=number), into=tray, constraint=constraint)
            while engine.work():
                pass
        assert any(preempted)
        for tray, constraint, expected in zip(trays, constraints, alone, strict=True):
            answer = fold(tray)
            assert answer.token_ids == expected.token_ids == tuple(constraint.accepted)
        assert_idle(engine)


def test_ctrl_c_inside_a_constraint_loses_no_block(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the spans that a step has opened and the step itself; the engine goes on."""

    class Interrupted(InTurn):
        def allowed(self) -> np.ndarray | None:
            if len(self.accepted) == 6:  # in a step that begins a block
                raise KeyboardInterrupt
            return super().allowed()

    by_count(engine, monkeypatch)
    other = engine.stream(PROMPT, replace(PARAMS, max_tokens=40))
    next(other)
    with pytest.raises(KeyboardInterrupt):
        constrained(engine, Interrupted([None], VOCABULARY))
    assert fold(other).finish_reason == "cancelled"
    assert_idle(engine)
    assert len(engine.generate(PROMPT, PARAMS).token_ids) == 12

"""Steps that begin before the tokens of the last one are known: the same answers, and no trace of rows in vain.

NumPy computes a step at once, so what these tests watch is what the engine does with tokens that it gets late.
`tests/cuda/test_schedules.py` runs the same on a GPU, or on the stand-in for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.outputs import Chunk, Completion, fold
from polarlm.engine.requests.request import Ticket
from polarlm.engine.requests.scheduler import Scheduler, TokenSequence
from polarlm.engine.sampling.sample import NEWEST, NOT_FINITE, Fetch, Sampled, SamplerInput
from tests.sampling.constrained import InTurn
from tests.tiny import VOCABULARY, assert_idle, blocks_left, forget, held, load_tiny, make_model, preemptions

BLOCK, PARALLEL, CONTEXT = 8, 4, 160
ANEW = PromptOptions(cache_prompt=False)
SETTINGS = {"block_size": BLOCK, "cache_type": "f16", "parallel": PARALLEL, "ctx_size": CONTEXT, "calibration": False}


class Ahead(NumpyOps):
    """Fetches tokens late. events: what has happened, "begins" and "tokens" in turn where nothing is late.

    Where a step begins without its draws, "rows" comes first.
    """

    batch_rows = 0

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.spoil: dict[int, EngineError] = {}  # number of a step → the error of its first row
        self._last = np.zeros(0)  # logits of the last step

    def run_graph(self, key: Any, work: Any, inputs: Sequence[Any]) -> Any:
        self._last.fill(np.nan)  # as another step may overwrite them on a GPU
        result = super().run_graph(key, work, inputs)
        if key == "rows":
            self.events.append("rows")
        self._last = result[0 if key == "rows" else 1]
        return result

    def sample(
        self, logits: np.ndarray, sampler_inputs: Sequence[SamplerInput], newest: np.ndarray | None = None
    ) -> list[Sampled]:
        if newest is not None:
            known = [
                [i if i != NEWEST else int(new) for i in d.recent]
                for d, new in zip(sampler_inputs, newest, strict=True)
            ]
            sampler_inputs = [
                replace(sampler_input, recent=recent)
                for sampler_input, recent in zip(sampler_inputs, known, strict=True)
            ]
        return super().sample(logits, sampler_inputs)

    def fetch_later(self, chosen: list[Sampled], sampler_inputs: Sequence[SamplerInput]) -> Fetch:
        assert all(sampler_input.logprobs is None for sampler_input in sampler_inputs)
        number = self.events.count("begins")
        self.events.append("begins")
        given = [self.spoil[number], *chosen[1:]] if number in self.spoil else [*chosen]

        def wait() -> list[Sampled]:
            self.events.append("tokens")
            return given

        return Fetch(np.array([token if isinstance(token, int) else -1 for token in given], np.int32), wait)


@pytest.fixture
def ops() -> Ahead:
    return Ahead()


@pytest.fixture
def engine(tiny_path: Path, ops: Ahead) -> Iterator[Engine]:
    with load_tiny(tiny_path, ops=ops, **SETTINGS) as engine:
        yield engine
        assert_idle(engine)
        assert engine._runner._batches.next_step is None


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose steps wait for the last one's tokens."""
    with load_tiny(make_model(tmp_path_factory.mktemp("plain")), ops=NumpyOps(), **SETTINGS) as engine:
        yield engine


def drawn(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.5, "seed": 3, "max_tokens": 24, "ignore_eos": True, **more})


@pytest.mark.parametrize(
    ("more", "events"),
    [
        ({}, ["begins", *["begins", "tokens"] * 10, "tokens"]),
        (
            {"dry_multiplier": 2.0},
            ["begins", *["rows", "tokens", "begins"] * 10, "tokens"],
        ),  # a draw knows the last
        ({"logprobs": 0}, []),  # the last logits are needed
    ],
)
def test_steps_begin_before_the_last_ones_tokens_are_waited_for_where_they_can(
    engine: Engine, plain: Engine, ops: Ahead, more: dict[str, Any], events: list[str]
) -> None:
    """Of 12 tokens the first comes from the prompt; no step begins behind the last."""
    prompt, params = [*range(5, 25)], drawn(max_tokens=12, **more)
    assert engine.generate(prompt, params).token_ids == plain.generate(prompt, params).token_ids
    assert ops.events == events


@pytest.mark.parametrize("number", [3, BLOCK, BLOCK + 1])
def test_the_row_behind_a_stop_token_leaves_nothing(engine: Engine, plain: Engine, ops: Ahead, number: int) -> None:
    """In the middle of a block and at its end. What the store keeps answers the next turn as if it had not been."""
    prompt = [*range(5, 5 + BLOCK)]
    whole = plain.generate(prompt, drawn()).token_ids
    end = next(i for i in range(number, len(whole)) if whole[i] not in whole[:i])
    forget(plain)
    for one in (plain, engine):
        answer = one.generate(prompt, drawn(stop_token_ids=(whole[end],)))
        assert (answer.token_ids, answer.finish_reason) == (whole[:end], "stop")
    assert ops.events.count("begins") == ops.events.count("tokens") + 1  # in vain
    assert not any(map(any, held(engine)))
    turn = [*prompt, *answer.token_ids, 30, 31]
    again, wanted = (one.generate(turn, drawn(seed=4)) for one in (engine, plain))
    assert again.token_ids == wanted.token_ids
    assert again.usage.cached_tokens >= len(prompt) + end - 1


@pytest.mark.parametrize(("window", "length"), [(0, 20), (1, 1), (2, 20), (64, 20)])
def test_penalties_count_the_token_that_is_not_known_yet(
    engine: Engine, plain: Engine, ops: Ahead, window: int, length: int
) -> None:
    params = drawn(repeat_penalty=3.0, frequency_penalty=2.0, presence_penalty=1.0, repeat_last_n=window, temperature=0)
    prompt = [*range(5, 5 + length)]
    assert engine.generate(prompt, params, ANEW).token_ids == plain.generate(prompt, params, ANEW).token_ids
    assert ops.events.count("begins") > 20


def test_masks_are_computed_while_the_next_rows_are(engine: Engine, plain: Engine, ops: Ahead) -> None:
    """A constraint sees every token before the next one is drawn, and the device does not wait for it to begin."""

    class Watched(InTurn):
        def allowed(self) -> np.ndarray | None:
            ops.events.append("mask")
            return super().allowed()

    sets = [range(5, 12), range(40, 60), range(5, 12)]
    prompt, params = [9, 20, 33], drawn(max_tokens=12)
    answer = fold(engine.stream(prompt, params, constraint=Watched(sets, VOCABULARY)))
    assert answer.token_ids == fold(plain.stream(prompt, params, constraint=InTurn(sets, VOCABULARY))).token_ids
    assert all(token in sets[number % 3] for number, token in enumerate(answer.token_ids))
    assert ops.events == ["mask", "mask", "begins", *["rows", "tokens", "mask", "begins"] * 10, "tokens"]


def test_an_error_in_the_next_step_takes_no_token_of_this_one(engine: Engine, plain: Engine, monkeypatch) -> None:
    prompt, step, calls = [*range(5, 25)], engine._model.step, []

    def failing(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise ZeroDivisionError("broken")
        return step(*arguments)

    monkeypatch.setattr(engine._model, "step", failing)
    outbox: list[Chunk | Exception] = []
    engine.submit(prompt, drawn(), into=outbox)
    while engine.work():
        pass
    assert isinstance(outbox.pop(), ZeroDivisionError)
    tokens = tuple(token for chunk in outbox for token in chunk.token_ids)
    assert tokens == plain.generate(prompt, drawn()).token_ids[:4]
    assert not any(map(any, held(engine)))


def test_a_row_without_a_token_fails_alone(engine: Engine, plain: Engine, ops: Ahead) -> None:
    """Though its next row has begun."""
    ops.spoil[5] = EngineError(NOT_FINITE, "model_damaged")
    outboxes: list[list[Any]] = [[], []]
    for number, outbox in enumerate(outboxes):
        engine.submit([*range(5 + number, 25)], drawn(seed=number), into=outbox)
    while engine.work():
        pass
    assert isinstance(outboxes[0][-1], EngineError)
    assert fold(outboxes[1]).token_ids == plain.generate([*range(6, 25)], drawn(seed=1)).token_ids


def test_the_next_prompt_waits_for_no_more_than_the_step_that_has_begun(
    engine: Engine, ops: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Scheduler.record_time  # all units take equally long, also on a busy machine
    monkeypatch.setattr(Scheduler, "record_time", lambda self, unit, seconds: record(self, unit, 1e-3))
    first, second = [], []
    engine.submit([*range(5, 25)], drawn(max_tokens=60), into=first)
    for _ in range(6):
        engine.work()
    assert engine._runner._batches.next_step is not None
    engine.submit([*range(40, 60)], drawn(max_tokens=5), into=second)
    before = len(ops.events)
    engine.work()
    assert ops.events[before:] == ["tokens"]  # and no step begins
    engine.work()
    assert second  # its prompt is computed and has a token
    while engine.work():
        pass


def test_steps_begin_ahead_while_a_prompt_waits_for_its_share(
    engine: Engine, ops: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit of the prompt takes as long as ten steps: only every tenth step waits for its tokens."""
    record = Scheduler.record_time
    monkeypatch.setattr(Scheduler, "record_time", lambda self, unit, _: record(self, unit, 1 + 9 * unit.is_prefill))
    monkeypatch.setattr(Ahead, "prefill_rows", 8)
    engine.submit([*range(5, 25)], drawn(max_tokens=60), into=[])
    for _ in range(10):
        engine.work()
    engine.submit([*range(40, 80)], drawn(max_tokens=1), into=[])
    before, ahead = ops.events.count("tokens"), 0
    while engine.status().waiting:
        engine.work()
        ahead += engine._runner._batches.next_step is not None
    steps = ops.events.count("tokens") - before
    assert steps > 30
    assert 0.8 * steps < ahead < steps


SETS: list[Any] = [
    None,
    range(5, 50),
    [60],
    [61],
    [62],
    range(20, 80),
    None,
    range(30, 90),
]  # sets of tokens that a constraint allows in turn
Asked = tuple[list[int], SamplingParams, Sequence[Any] | None]


def constraint_of(sets: Sequence[Any] | None) -> InTurn | None:
    return None if sets is None else InTurn(sets, VOCABULARY)


def request(rng: np.random.Generator) -> Asked:
    """Most can step ahead, and they end for every reason that there is."""
    more: list[dict[str, Any]] = [
        {},
        {"stop_token_ids": tuple(rng.integers(5, VOCABULARY, 6).tolist())},
        {"stop": ("e",)},
        {"ignore_eos": False, "min_tokens": int(rng.integers(6))},
        {"temperature": 0},
        {"logit_bias": {int(rng.integers(5, VOCABULARY)): 3.0}},
        {"repeat_penalty": 1.2},
        {"logprobs": 1},
    ]
    chosen = more[rng.choice(len(more), p=[0.1, 0.4, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])]
    prompt = rng.integers(5, VOCABULARY, rng.integers(1, 60)).tolist()
    params = drawn(seed=int(rng.integers(1000)), max_tokens=int(rng.integers(1, 40)), **chosen)
    begin = int(rng.integers(len(SETS)))
    return prompt, params, [*SETS[begin:], *SETS[:begin]] if rng.random() < 0.3 else None


def run(engine: Engine, rng: np.random.Generator, asked: Sequence[Asked]) -> list[list[Any]]:
    """The chunks of requests that come while others run; some are cancelled, and most give way to others."""
    outboxes: list[list[Any]] = [[] for _ in asked]
    tickets: list[Ticket] = []
    with ExitStack() as stack:
        if rng.random() < 0.7:  # then not all requests find room at once
            stack.enter_context(blocks_left(engine, 12 + int(rng.integers(3))))
        for number, ((prompt, params, sets), outbox) in enumerate(zip(asked, outboxes, strict=True)):
            how: dict[str, Any] = {"constraint": constraint_of(sets), "in_background": number % 3 != 2}
            tickets.append(engine.submit(prompt, params, ANEW, into=outbox, **how))
            for _ in range(rng.integers(12)):
                engine.work()
            if rng.random() < 0.15:
                tickets[rng.integers(len(tickets))].cancel()
        while engine.work():
            pass
    assert engine._runner._batches.next_step is None
    return outboxes


def interruptions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[TokenSequence]:
    """A list that gets each sequence that waits again, preempted or in the background."""
    suspended, suspend = list[TokenSequence](), engine._scheduler.suspend
    monkeypatch.setattr(engine._scheduler, "suspend", lambda one: suspended.append(one) or suspend(one))
    return suspended


def summary(answer: Completion) -> tuple[Any, ...]:
    return answer.text, answer.token_ids, answer.finish_reason


@pytest.mark.slow
def test_random_schedules_have_the_answers_of_steps_that_wait(
    tiny_path: Path, plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrivals, ends of all kinds, cancellations, and little room, so that some are preempted. No prefix is looked for:
    it would be read as codes, and drawn tokens may hang on their rounding. Twelve schedules take half a minute."""
    seen: Counter[str] = Counter()
    for number in range(12):
        rng, ops = np.random.default_rng(number), Ahead()
        asked = [request(rng) for _ in range(8)]
        with load_tiny(tiny_path, ops=ops, **SETTINGS) as engine:
            preempted, gave_way = preemptions(engine, monkeypatch), interruptions(engine, monkeypatch)
            outboxes = run(engine, rng, asked)
            assert_idle(engine)
        seen["preempted"] += len(preempted)
        seen["gave way"] += len(gave_way) - len(preempted)
        for (prompt, params, sets), outbox in zip(asked, outboxes, strict=True):
            wanted = fold(plain.stream(prompt, params, ANEW, constraint=constraint_of(sets)))
            if outbox and outbox[-1].finish_reason is not None:
                assert summary(fold(outbox)) == summary(wanted)
                seen[str(wanted.finish_reason)] += 1
            else:
                tokens = tuple(token for chunk in outbox for token in chunk.token_ids)
                assert tokens == wanted.token_ids[: len(tokens)]
                seen["cancelled"] += 1
        seen["begun"] += ops.events.count("begins")
        seen["in vain"] += ops.events.count("begins") - ops.events.count("tokens")
        seen["rows"] += ops.events.count("rows")
    assert seen["begun"] > 300
    assert all(
        seen[what] > 1 for what in ("stop", "length", "cancelled", "preempted", "gave way", "in vain", "rows")
    ), seen

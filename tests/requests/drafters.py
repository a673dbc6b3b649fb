"""Drafters for tests, and drafts of any length at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Completion, Engine, PromptOptions, SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.limits import MOST_DRAFTED
from polarlm.engine.model.batch import StepBatch
from polarlm.engine.requests.drafters.drafter import Drafter, DraftTask
from polarlm.engine.requests.drafters.mtp import MtpDrafter
from polarlm.engine.requests.drafts import Drafts, StepPlan, StepSeconds
from polarlm.engine.sampling.sample import greedy
from tests.bare import forward
from tests.tiny import VOCABULARY, forget

ANEW = PromptOptions(cache_prompt=False)
SETTINGS: dict[str, Any] = {"block_size": 16, "ctx_size": 200, "parallel": 4, "calibration": False}
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPS: dict[str, Callable[[], Any]] = {"numpy": NumpyOps, "default": lambda: None}
BACKENDS = pytest.mark.parametrize("backend", OPS.values(), ids=OPS)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCABULARY, rng.integers(1, 40)).tolist() for _ in range(count)]


class Known:
    """Knows the ids of a whole sequence, and is wrong at random places of it."""

    def __init__(self, ids: Sequence[int], right: float, vocabulary: int, seed: int = 0) -> None:
        """right: the share of places where it is right."""
        wrong = np.random.default_rng(seed).random(len(ids)) >= right
        self._ids = [i if not at else 5 + (i + 1) % (vocabulary - 5) for i, at in zip(ids, wrong, strict=True)]

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return self._ids[len(ids) : len(ids) + most]

    def is_ready(self, ids: Sequence[int]) -> bool:
        return True

    def release(self) -> None:
        pass


class Unpaced(Drafts):
    """Drafts at every step, whether it pays or not, `length()` tokens where there is room. `lengths`: of all drafts."""

    def __init__(self, drafter: Drafter, length: Callable[[], int] = lambda: MOST_DRAFTED) -> None:
        super().__init__(drafter, MOST_DRAFTED, StepSeconds())
        self._given, self._length, self.lengths = drafter, length, list[int]()

    def is_ready(self, ids: Sequence[int]) -> bool:
        return True

    def task(self, ids: Sequence[int], room: int, plan: StepPlan) -> DraftTask | None:
        return DraftTask(self._given, ids, min(room, self._length())) if room > 0 else None

    def cut(self, drafted: Sequence[int]) -> Sequence[int]:
        self.lengths.append(len(drafted))
        return drafted


def draft_alone(drafts: Drafts, ids: Sequence[int], room: int, plan: StepPlan) -> Sequence[int]:
    """What a request drafts alone."""
    task = drafts.task(ids, room, plan)
    return () if task is None else drafts.cut(task.drafter.draft(task.ids, task.most))


def drafting(engine: Engine, make: Callable[[Sequence[int]], Drafts | None]) -> None:
    """Let an engine's later requests have the drafts that `make` makes for their prompts."""
    engine._drafting.drafts = lambda ids, params, kv: make(ids)  # type: ignore[method-assign]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two answers differ; None if they are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    place = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
    return None if place == len(one) == len(other) else place


def margin(engine: Engine, prompt: Sequence[int], params: SamplingParams, place: int) -> float:
    """How much more likely, in nats, the best token was than the second at a place of the plain answer."""
    drafting(engine, lambda ids: None)
    plain = engine.generate(prompt, replace(params, logprobs=2, max_tokens=place + 1), ANEW)
    (_, best), (_, second) = plain.logprobs[place].top[:2]
    return best - second


def summary(answer: Completion) -> tuple[object, ...]:
    """What two equal answers have in common."""
    return answer.text, answer.token_ids, answer.finish_reason


def plain(engine: Engine, prompt: Sequence[int], params: SamplingParams = PARAMS) -> Completion:
    drafting(engine, lambda ids: None)
    forget(engine)
    return engine.generate(prompt, params, ANEW)


def guesses(engine: Engine, ids: list[int], begun: int, most: int, vocabulary: int | None = None) -> list[int]:
    """What is drafted after `ids`, with a prompt of the first `begun`, and a step for each but the newest one."""
    model, store = engine._model, engine._store
    kv = store.new_sequence()
    span = store.open(kv, begun)
    forward(model, [span], ids[:begun], outputs=1)
    store.commit(span)
    for at in range(begun, len(ids) - 1):
        span = store.open_step(kv)
        model.step(StepBatch([span], [ids[at]], [greedy(model.config.vocab_size)])).wait()
        store.commit(span)
    drafted = MtpDrafter(model.mtp, vocabulary or model.config.vocab_size, lambda: kv).draft(
        ids, min(most, store.rows_of_block(kv))
    )
    store.release(kv)
    return [*drafted]

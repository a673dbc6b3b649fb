"""Drafters for tests, and drafts of any length at every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from polarlm.engine import Completion, Engine, PromptOptions, SamplingParams
from polarlm.engine.limits import MOST_DRAFTED
from polarlm.engine.requests.drafters.drafter import Drafter, DraftTask
from polarlm.engine.requests.drafts import Drafts, StepPlan, StepSeconds

ANEW = PromptOptions(cache_prompt=False)


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

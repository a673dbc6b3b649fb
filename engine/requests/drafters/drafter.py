"""What a drafter is, and how the drafters of several requests compute in the same steps of a model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

Key = TypeVar("Key")


class Drafter(Protocol):
    """Guesses the next tokens of one request. Each call gets all of the request's ids so far."""

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        """Return up to `most` tokens that may follow `ids`."""

    def is_ready(self, ids: Sequence[int]) -> bool:
        """Whether a draft may follow the token that follows `ids`. If so, the next step waits for that token."""
        return True

    def release(self) -> None:
        """Free blocks of shared stores, if it holds any: the request ends, or waits."""
        return


class StepDrafter(Drafter):
    """A drafter whose tokens a model computes, in steps that requests share."""

    def steps(self, ids: Sequence[int], most: int) -> Generator[Any, Any, Sequence[int]]:
        """Yield the rows of one step after another, each time for what `compute` gives for them, and return up to
        `most` tokens that may follow `ids`. Closed early, it leaves no open span."""
        raise NotImplementedError

    def compute(self, rows: Sequence[Any]) -> Sequence[Any]:
        """Compute one step of what the `steps` of several requests have yielded, and return what each gets."""
        raise NotImplementedError

    def draft(self, ids: Sequence[int], most: int) -> Sequence[int]:
        return _draft_alike({None: DraftTask(self, ids, most)})[None]


class DraftTask(NamedTuple):
    """A draft of at most `most` tokens, to be made after `ids`."""

    drafter: Drafter
    ids: Sequence[int]
    most: int


def draft_together(tasks: Mapping[Key, DraftTask]) -> dict[Key, Sequence[int] | Exception]:
    """Return the draft of each task, or what its drafter raises. Drafters of one kind compute in the same steps; if
    these fail, each in its own."""
    drafts, kinds = dict[Key, Sequence[int] | Exception](), dict[type, dict[Key, DraftTask]]()
    for key, task in tasks.items():
        kinds.setdefault(type(task.drafter), {})[key] = task
    for alike in kinds.values():
        try:
            drafts |= _draft_alike(alike)
        except Exception as error:
            single = [{key: task} for key, task in alike.items()]
            for one in single if len(single) > 1 else ():
                drafts |= draft_together(one)
            if len(single) == 1:
                drafts |= dict.fromkeys(alike, error)
    return drafts


def _draft_alike(tasks: Mapping[Key, DraftTask]) -> dict[Key, Sequence[int]]:
    """`draft_together` of drafters of one kind. Raises what they raise."""
    drafts, running = dict[Key, Sequence[int]](), dict[Key, Generator[Any, Any, Sequence[int]]]()
    compute: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    for key, (drafter, ids, most) in tasks.items():
        if isinstance(drafter, StepDrafter):
            running[key], compute = drafter.steps(ids, most), drafter.compute
        else:
            drafts[key] = drafter.draft(ids, most)
    results: dict[Key, Any] = dict.fromkeys(running)
    try:
        while results and compute is not None:
            rows = dict[Key, Any]()
            for key, result in results.items():
                try:
                    rows[key] = running[key].send(result)
                except StopIteration as end:
                    drafts[key] = end.value
            results = dict(zip(rows, compute([*rows.values()]), strict=True)) if rows else {}
    finally:
        for steps in running.values():
            steps.close()
    return drafts

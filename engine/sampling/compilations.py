"""The order in which constraints are compiled: by arrival, a short turn each; slow ones move to a second queue.

Most constraints compile in a few milliseconds; a hostile one takes as long as it is allowed. So a new constraint waits
only for short turns, one for each constraint that arrived earlier. The thread of the first request in a queue compiles.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import CompilationCounts
from polarlm.model_loaders.forks import renew_in_children

TURNS = (0.06, 1.5)  # seconds of processor time: of the first turn, and of the second one if that is too short
MOST_WAITING = 32  # constraints that wait for their first turn
MOST_LONG = 8  # constraints that wait for their second turn
_LOOK_SECONDS = 0.05  # between two checks whether anybody still waits for a request

T = TypeVar("T")
Key = tuple[str, str, str]  # a field of SamplingParams, its text, and the tag after which the constraint begins


class NeedsLonger(Exception):
    """The constraint did not compile within its turn."""


@dataclass(eq=False)
class _Place:
    """The place of a request in a line."""

    key: Key


class Compilations(Generic[T]):
    """Compiles the constraints that requests ask for. Threads may share it."""

    def __init__(self, find_known: Callable[[Key], T | None], compile: Callable[[Key, float, Callable[[], bool]], T]):
        """find_known: returns a constraint that was compiled before; raises EngineError if it was refused.

        compile: called with a key, the seconds of its turn, and a function that says whether it may stop early. It
        raises NeedsLonger if the turn was too short and not the last one, or EngineError.
        """
        self._find_known, self._compile = find_known, compile
        self._counts = CompilationCounts()
        self._is_closed = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Empty the queues: a forked child does not have its parent's threads."""
        self._condition = threading.Condition()
        self._lines: list[list[_Place]] = [[] for _ in TURNS]

    def counts(self) -> CompilationCounts:
        """A copy of the counts. Requests for the same constraint count as one."""
        with self._condition:
            return self._counts.copy(waiting=len({place.key for line in self._lines for place in line}))

    def close(self) -> None:
        """Fail waiting and later requests with an EngineError ("closed")."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def result(self, key: Key, gone: Callable[[], bool]) -> T:
        """The constraint of `key`. Raises EngineError if it does not compile, or once `gone` returns True."""
        start = time.monotonic()
        with self._condition:  # if a short turn was too short for another request, it is for this one
            first = int(any(place.key == key for place in self._lines[1]))
        for turn in range(first, len(TURNS)):
            with self._turn(turn, key, gone):
                if (constraint := self._find_known(key)) is not None:  # from another request, meanwhile
                    return constraint
                result: T | EngineError
                try:
                    result = self._compile(key, TURNS[turn], lambda: self._is_closed or gone())
                except NeedsLonger:
                    continue
                except EngineError as error:
                    result = error
                except Exception as error:
                    result = EngineError(f"The constraint could not be compiled ({type(error).__name__}: {error})")
                self._check(gone)
                with self._condition:
                    self._counts.outcomes["refused" if isinstance(result, EngineError) else "compiled"] += 1
                    self._counts.took.add(time.monotonic() - start)
                if isinstance(result, EngineError):
                    raise result
                return result
        raise AssertionError("the last turn ends in a constraint or an error")

    @contextmanager
    def _turn(self, turn: int, key: Key, gone: Callable[[], bool]) -> Iterator[None]:
        """Hold the first place of a line."""
        line, place = self._lines[turn], _Place(key)
        with self._condition:
            self._check(gone)
            if len({key, *(other.key for other in line)}) > 1 + (MOST_LONG if turn else MOST_WAITING):
                self._counts.outcomes["too_many"] += 1
                raise EngineError("Too many new constraints wait to be compiled", "busy")
            line.append(place)
        try:
            with self._condition:
                while line[0] is not place:
                    self._condition.wait(_LOOK_SECONDS)
                    self._check(gone)
            yield
        except EngineError as error:
            with self._condition:
                is_last = sum(other.key == key for other in (*self._lines[0], *self._lines[1])) == 1
                if error.code == "cancelled" and is_last:
                    self._counts.outcomes["abandoned"] += 1
            raise
        finally:
            with self._condition:
                line.remove(place)
                self._condition.notify_all()

    def _check(self, gone: Callable[[], bool]) -> None:
        """Raises EngineError if nothing is compiled any more, or not for this request."""
        if self._is_closed:
            raise EngineError("The engine is closed", "closed")
        if gone():
            raise EngineError("The request was cancelled before its constraint was compiled", "cancelled")

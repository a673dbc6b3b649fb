"""The order in which constraints are compiled: by arrival, a short turn each; slow ones move to a second queue.

Most constraints compile in a few milliseconds; a hostile one takes as long as it is allowed. So a new constraint waits
only for short turns, one for each constraint that arrived earlier. Each queue has a thread, which ends when the queue
is empty.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import CompilationCounts
from polarlm.model_loaders.forks import renew_in_children

TURNS = (0.06, 1.5)  # seconds of processor time: of the first turn, and of the second one if that is too short
MOST_WAITING = 32  # constraints that wait for their first turn
MOST_LONG = 8  # constraints that wait for their second turn
_LOOK_SECONDS = 0.05  # between two checks of a request whether it is still wanted

T = TypeVar("T")
Key = tuple[str, str, str]  # a field of SamplingParams, its text, and the tag behind which the constraint begins


class NeedsLonger(Exception):
    """The constraint did not compile within its turn."""


@dataclass(eq=False)
class _Compilation(Generic[T]):
    """A constraint and, once `done` is set, its result. Requests for the same constraint share it."""

    key: Key
    asked: float  # time.monotonic() of the first request
    wanted_by: int = 0  # number of requests
    found: T | EngineError | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Compilations(Generic[T]):
    """Compiles the constraints that requests ask for. Threads may share it."""

    def __init__(self, compile: Callable[[Key, float, Callable[[], bool]], T]) -> None:
        """compile: called with a key, the seconds of its turn, and a function that says whether it may stop early.

        It returns the constraint. It raises NeedsLonger if the turn was too short and not the last one, or EngineError.
        """
        self._compile = compile
        self._counts = CompilationCounts()
        self._closed = False
        self.renew()
        renew_in_children(self)

    def renew(self) -> None:
        """Empty the queues: a forked child does not have its parent's threads."""
        self._lock = threading.Lock()
        self._under_way: dict[Key, _Compilation[T]] = {}
        self._lines: list[deque[_Compilation[T]]] = [deque() for _ in TURNS]
        self._busy = [False for _ in TURNS]  # whether a thread takes the turns of this queue

    def counts(self) -> CompilationCounts:
        """A copy of the counts."""
        with self._lock:
            return self._counts.copy(waiting=len(self._under_way))

    def close(self) -> None:
        """Fail waiting and later requests with an EngineError ("closed")."""
        with self._lock:
            self._closed = True
            for compilation in list(self._under_way.values()):
                self._end(compilation, _closed())

    def result(self, key: Key, gone: Callable[[], bool]) -> T:
        """The constraint of `key`. Raises EngineError if it does not compile, or once `gone` returns True."""
        if gone():
            raise _cancelled()
        with self._lock:
            compilation = self._asked(key)
            compilation.wanted_by += 1
        try:
            while not compilation.done.wait(_LOOK_SECONDS):
                if gone():
                    raise _cancelled()
        finally:
            with self._lock:
                compilation.wanted_by -= 1
                if not compilation.wanted_by and not compilation.done.is_set():
                    self._end(compilation, _cancelled(), "abandoned")
        found = compilation.found
        if isinstance(found, EngineError):  # a copy, since several threads may raise it
            raise type(found)(str(found), found.code) from None
        assert found is not None
        return found

    # -- while the lock is held --------------------------------------------------------------------------------

    def _asked(self, key: Key) -> _Compilation[T]:
        if self._closed:
            raise _closed()
        compilation = self._under_way.get(key)
        if compilation is None:
            compilation = _Compilation(key, time.monotonic())
            if len(self._lines[0]) >= MOST_WAITING:
                self._counts.outcomes["too_many"] += 1
                raise _too_many()
            self._under_way[key] = compilation
            self._wait(0, compilation)
        return compilation

    def _wait(self, turn: int, compilation: _Compilation[T]) -> None:
        self._lines[turn].append(compilation)
        if not self._busy[turn]:
            self._busy[turn] = True
            threading.Thread(target=self._take_turns, args=[turn], name="constraints", daemon=True).start()

    def _end(self, compilation: _Compilation[T], found: T | EngineError, outcome: str = "") -> None:
        if compilation.done.is_set():
            return
        del self._under_way[compilation.key]
        for line in self._lines:
            if compilation in line:
                line.remove(compilation)
        if outcome:
            self._counts.outcomes[outcome] += 1
        compilation.found = found
        compilation.done.set()

    # -- in the thread of each queue ---------------------------------------------------------------------------

    def _take_turns(self, turn: int) -> None:
        while (compilation := self._next(turn)) is not None:
            found: T | EngineError
            try:
                found, outcome = self._compile(compilation.key, TURNS[turn], compilation.done.is_set), "compiled"
            except NeedsLonger:
                self._wait_longer(compilation)
                continue
            except EngineError as error:
                found, outcome = error, "refused"
            except Exception as error:
                found, outcome = EngineError(f"The constraint could not be compiled: {error!r}"), "refused"
            with self._lock:
                if not compilation.done.is_set():
                    self._counts.took.add(time.monotonic() - compilation.asked)
                self._end(compilation, found, outcome)

    def _next(self, turn: int) -> _Compilation[T] | None:
        with self._lock:
            if self._lines[turn]:
                return self._lines[turn].popleft()
            self._busy[turn] = False
            return None

    def _wait_longer(self, compilation: _Compilation[T]) -> None:
        with self._lock:
            if compilation.done.is_set():
                return
            if len(self._lines[1]) < MOST_LONG:
                self._wait(1, compilation)
            else:
                self._end(compilation, _too_many(), "too_many")


def _closed() -> EngineError:
    return EngineError("The engine is closed", "closed")


def _cancelled() -> EngineError:
    return EngineError("The request was cancelled before its constraint was compiled", "cancelled")


def _too_many() -> EngineError:
    return EngineError("Too many new constraints wait to be compiled", "busy")

"""Which constraint is compiled when: those that need long do not hold up others, and none is compiled for nobody."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from polarlm.engine import EngineError
from polarlm.engine.sampling.compilations import MOST_LONG, MOST_WAITING, TURNS, Compilations, NeedsLonger

SHORT, LONG = TURNS


class Pretended:
    """Compilations whose seconds are made up: a key has its own, and the clock of a turn adds up what it computes."""

    def __init__(self) -> None:
        self.clocks = dict.fromkeys(TURNS, 0.0)
        self.ended: dict[str, float] = {}  # by key: the time of its turn's clock
        self.tried: dict[str, list[float]] = defaultdict(list)  # by key: its turns
        self.may_go_on, self.long_may_go_on = threading.Event(), threading.Event()
        self.long_may_go_on.set()
        self.known: dict[tuple[str, str], str] = {}
        self.compilations = Compilations(self.known.get, self._compile)

    def _compile(self, key: tuple[str, str], seconds: float, gone: Callable[[], bool]) -> str:
        kind, name = key
        self.tried[name].append(seconds)
        assert (self.may_go_on if seconds == SHORT else self.long_may_go_on).wait(60)
        needs = {"quick": 0.001, "legal": LONG / 2, "hostile": LONG * 9}[kind]
        self.clocks[seconds] += min(needs, seconds)
        if gone():
            raise EngineError("nobody is there")
        if needs > LONG and seconds == LONG:
            raise EngineError("it needs too much time")
        if needs > seconds:
            raise NeedsLonger
        self.ended[name] = self.clocks[seconds]
        self.known[key] = name.upper()
        return self.known[key]

    def ask(self, kind: str, name: str, gone: Callable[[], bool] = lambda: False) -> str:
        return self.compilations.result((kind, name), gone)


@contextmanager
def requested(
    made: Pretended, *keys: tuple[str, str], gone: Callable[[], bool] = lambda: False
) -> Iterator[list[Future]]:
    """A thread that waits for each key, all in order of the keys."""
    with ThreadPoolExecutor(len(keys)) as threads:
        futures: list[Future[str]] = []
        before = made.compilations.counts().waiting
        for number, (kind, name) in enumerate(keys):
            futures.append(threads.submit(made.ask, kind, name, gone))
            until(lambda count=before + number + 1: made.compilations.counts().waiting >= count)
        yield futures


def until(holds: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never came to be")


def hostile(count: int) -> list[tuple[str, str]]:
    return [("hostile", f"h{number}") for number in range(count)]


def test_a_constraint_waits_one_short_turn_for_each_hostile_one_before_it() -> None:
    """Three seconds are the bound beside 24 of them, whatever these would need."""
    made = Pretended()
    with requested(made, *hostile(24), ("quick", "mine")) as futures:
        made.may_go_on.set()
        assert futures[-1].result(60) == "MINE"
    assert made.ended["mine"] < 24 * SHORT + 0.01 < 3
    assert all(isinstance(future.exception(), EngineError) for future in futures[:-1])


def test_hostile_clients_that_ask_again_at_once_stand_behind_those_who_wait() -> None:
    made = Pretended()
    over = threading.Event()

    def attack(client: int) -> None:
        number = 0
        while not over.is_set():
            number += 1
            with pytest.raises(EngineError):
                made.ask("hostile", f"client {client}, {number}")

    with ThreadPoolExecutor(10) as clients:
        made.may_go_on.set()
        attacks = [clients.submit(attack, client) for client in range(9)]
        try:
            for number in range(5):
                until(lambda: made.compilations.counts().waiting >= 5)
                made.may_go_on.clear()  # the clock stands still until mine has arrived
                began = made.clocks[SHORT]
                mine = clients.submit(made.ask, "quick", f"mine {number}")
                key = "quick", f"mine {number}"
                until(lambda key=key: any(place.key == key for place in made.compilations._lines[0]))
                made.may_go_on.set()
                mine.result(60)
                assert made.ended[f"mine {number}"] - began < 10.5 * SHORT  # one turn may have begun already
        finally:
            over.set()
            made.may_go_on.set()
        for each in attacks:
            each.result(60)


def test_what_needs_long_has_a_second_turn_which_is_the_last() -> None:
    made = Pretended()
    made.may_go_on.set()
    assert made.ask("legal", "large") == "LARGE"
    with pytest.raises(EngineError, match="too much time"):
        made.ask("hostile", "endless")
    assert made.tried == {"large": [SHORT, LONG], "endless": [SHORT, LONG]}


def test_only_so_many_wait_and_the_next_one_is_told_to_come_again() -> None:
    made = Pretended()
    with requested(made, *(("quick", str(number)) for number in range(1 + MOST_WAITING))) as futures:
        with pytest.raises(EngineError, match="Too many") as caught:
            made.ask("quick", "one more")
        made.may_go_on.set()
        assert all(future.result(60) for future in futures)
    assert caught.value.code == "busy"
    assert made.compilations.counts().outcomes == {"compiled": 1 + MOST_WAITING, "too_many": 1}


def test_only_so_many_wait_for_a_second_turn() -> None:
    made = Pretended()
    made.long_may_go_on.clear()
    made.may_go_on.set()
    with requested(made, ("legal", "first")) as (first,):
        until(lambda: LONG in made.tried["first"])
        made.may_go_on.clear()
        with requested(made, *(("legal", str(number)) for number in range(2 + MOST_LONG))) as futures:
            made.may_go_on.set()
            until(lambda: made.compilations.counts().outcomes["too_many"] == 2)
            assert made.ask("quick", "mine") == "MINE"
            made.long_may_go_on.set()
        assert first.result(60) == "FIRST"
        errors = [error for future in futures if (error := future.exception(60)) is not None]
    assert [isinstance(error, EngineError) and error.code for error in errors] == ["busy"] * 2
    assert made.compilations.counts().outcomes == {"compiled": 2 + MOST_LONG, "too_many": 2}
    assert made.compilations.counts().waiting == 0


def test_nothing_is_compiled_for_a_client_that_is_gone() -> None:
    made = Pretended()
    left = threading.Event()
    with requested(made, ("quick", "first")):
        with requested(made, *(("quick", f"gone {number}") for number in range(5)), gone=left.is_set) as futures:
            left.set()
            assert all(isinstance(future.exception(60), EngineError) for future in futures)
            assert made.compilations.counts().waiting == 1  # although nothing has been compiled yet
        with pytest.raises(EngineError):
            made.ask("quick", "gone before", left.is_set)
        made.may_go_on.set()
    assert list(made.tried) == ["first"]
    assert made.compilations.counts().outcomes == {"compiled": 1, "abandoned": 5}


def test_what_is_under_way_learns_that_its_client_has_gone() -> None:
    made, left = Pretended(), threading.Event()
    with requested(made, ("legal", "mine"), gone=left.is_set) as futures:
        until(lambda: made.compilations.counts().waiting == 1)
        left.set()
        made.may_go_on.set()
        assert isinstance(futures[0].exception(60), EngineError)
    assert made.compilations.counts().outcomes == {"abandoned": 1}
    assert LONG not in made.tried["mine"]


def test_requests_for_the_same_constraint_share_its_compilation() -> None:
    """Also when one of them goes: the others still wait."""
    made, left = Pretended(), threading.Event()
    with ThreadPoolExecutor(6) as threads:
        stay = [threads.submit(made.ask, "quick", "same") for _ in range(5)]
        until(lambda: made.compilations.counts().waiting == 1)
        goes = threads.submit(made.ask, "quick", "same", left.is_set)
        left.set()
        assert isinstance(goes.exception(60), EngineError)
        made.may_go_on.set()
        assert [future.result(60) for future in stay] == ["SAME"] * 5
    assert made.tried == {"same": [SHORT]}
    assert made.compilations.counts().outcomes == {"compiled": 1}


def test_closing_ends_those_who_wait() -> None:
    made = Pretended()
    with requested(made, ("quick", "first"), ("quick", "second")) as futures:
        made.compilations.close()
        made.may_go_on.set()
        errors: list[Any] = [future.exception(60) for future in futures]
    assert [error.code for error in errors] == ["closed", "closed"]
    with pytest.raises(EngineError) as caught:
        made.ask("quick", "later")
    assert caught.value.code == "closed"

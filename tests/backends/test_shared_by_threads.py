"""What all engines of a process share exists once, also if threads ask for it first at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("llvmlite")

from polarlm.engine.jit.compile import library as libraries
from polarlm.engine.jit.compile.target import best
from polarlm.engine.jit.run import workers as working

ASKERS = 4


@pytest.mark.parametrize(
    ("module", "kind", "ask"),
    [
        (libraries, "Library", lambda: libraries.library(best())),
        (working, "Workers", working.workers),
    ],
    ids=["library", "workers"],
)
def test_threads_that_ask_at_the_same_time_get_the_same(
    monkeypatch: pytest.MonkeyPatch, module: Any, kind: str, ask: Callable[[], object]
) -> None:
    meeting, original = threading.Barrier(ASKERS), getattr(module, kind)

    def slow(*args: Any) -> object:
        """One that is complete when all threads have begun to make theirs."""
        made = original(*args)
        with suppress(threading.BrokenBarrierError):  # if only one is made
            meeting.wait(0.5)
        return made

    monkeypatch.setattr(module, kind, slow)
    monkeypatch.setattr(module, "_instances", type(module._instances)())
    with ThreadPoolExecutor(ASKERS) as pool:
        actual = [future.result(60) for future in [pool.submit(ask) for _ in range(ASKERS)]]
    assert isinstance(actual[0], original)
    assert all(one is actual[0] for one in [*actual, ask()])

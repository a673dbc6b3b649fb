"""Whoever waits for a worker gets a turn in order, and leaves it once nobody waits for the answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from polarlm.model_loaders.limited_process import LimitedProcess, NobodyWaits, wanted_until
from tests.server.lines import PATIENCE, eventually

SLEEPER = """
import time
from polarlm.children import answer_lines
answer_lines(lambda first: lambda seconds: time.sleep(seconds) or seconds, 1 << 30)
"""


class Reply:
    """A request in a thread of its own: to sleep, then to answer."""

    def __init__(self, worker: LimitedProcess, threads: ThreadPoolExecutor, seconds: float, order: list[float]) -> None:
        self.gone = threading.Event()
        before = len(worker._line)

        def ask() -> None:
            with wanted_until(self.gone.is_set):
                order.append(worker.ask(seconds))

        self.future: Future[None] = threads.submit(ask)
        eventually(lambda: len(worker._line) == before + 1)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[LimitedProcess]:
    file = tmp_path / "sleeper.py"
    file.write_text(SLEEPER)
    made = LimitedProcess(file, None)
    assert made.ask(0) == 0
    yield made
    made.close()


def test_who_is_gone_leaves_the_line_and_the_worker(worker: LimitedProcess) -> None:
    order: list[float] = []
    with ThreadPoolExecutor(4) as threads:
        first, second, third, fourth = (Reply(worker, threads, seconds, order) for seconds in (1000, 999, 0.02, 0.01))
        second.gone.set()
        with pytest.raises(NobodyWaits):
            second.future.result(PATIENCE)
        assert not first.future.done()
        first.gone.set()
        with pytest.raises(NobodyWaits):
            first.future.result(PATIENCE)
        for one in (third, fourth):
            one.future.result(PATIENCE)
    assert order == [0.02, 0.01]


def test_an_engine_that_closes_waits_for_one_answer_alone(worker: LimitedProcess) -> None:
    order: list[float] = []
    with ThreadPoolExecutor(3) as threads:
        first, second = (Reply(worker, threads, seconds, order) for seconds in (0.3, 1000))
        threads.submit(worker.close).result(PATIENCE)
        assert order == [0.3]
        first.future.result(PATIENCE)
        second.gone.set()

"""Texts are compiled by threads before they are needed; what a launch needs waits for nothing else."""

from __future__ import annotations

import threading
import time

import pytest

from polarlm.engine.backends.cuda.device.modules import Modules, compiler_threads

LONG = 120  # seconds, never waited for in full


class Compiler:
    """Compiles "a" to "A". Texts of `held` wait for `let_go`."""

    def __init__(self, *held: str) -> None:
        self.held, self.let_go = held, threading.Event()
        self.begun: list[tuple[str, str]] = []  # with the thread's name

    def __call__(self, text: str) -> str:
        self.begun.append((text, threading.current_thread().name))
        if text in self.held:
            assert self.let_go.wait(LONG)
        if text == "wrong":
            raise RuntimeError("kernel.cu(1): error")
        return text.upper()


def test_an_expected_text_is_compiled_once_by_a_thread_of_its_own() -> None:
    compiler = Compiler()
    modules = Modules(compiler, 1)
    modules.expect("a")
    modules.expect("a")
    modules.wait("a")
    assert modules.get("a") == modules.get("a") == "A"
    assert compiler.begun == [("a", "compiler")]


def test_a_text_that_is_not_expected_is_compiled_when_it_is_needed() -> None:
    compiler = Compiler()
    modules = Modules(compiler, 1)
    modules.wait("a")  # nobody compiles it: there is nothing to wait for
    assert modules.get("a") == "A"
    assert compiler.begun == [("a", threading.current_thread().name)]


def test_what_is_needed_waits_for_no_text_before_it() -> None:
    compiler = Compiler("long")
    modules = Modules(compiler, 1)
    for text in ("long", "b", "c"):
        modules.expect(text)
    assert modules.get("c") == "C"
    compiler.let_go.set()
    modules.wait("b")
    assert modules.get("long") == "LONG"
    assert sorted(text for text, _ in compiler.begun) == ["b", "c", "long"]


def test_texts_are_compiled_in_order_by_at_most_so_many_threads() -> None:
    compiler = Compiler("a", "b", "c", "d")
    modules = Modules(compiler, 2)
    for text in "abcd":
        modules.expect(text)
    deadline = time.monotonic() + LONG
    while len(compiler.begun) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(text for text, _ in compiler.begun) == ["a", "b"]
    compiler.let_go.set()
    for text in "abcd":
        modules.wait(text)
    assert sorted(text for text, _ in compiler.begun) == ["a", "b", "c", "d"]
    modules.expect("e")  # the threads have ended, or are about to: another one begins
    modules.wait("e")
    assert modules.get("e") == "E"


def test_an_error_is_that_of_every_launch_and_not_of_the_wait() -> None:
    compiler = Compiler()
    modules = Modules(compiler, 1)
    modules.expect("wrong")
    modules.wait("wrong")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="error"):
            modules.get("wrong")
    assert len(compiler.begun) == 2  # as without the thread, a launch compiles again after an error


def test_a_core_is_left_to_what_loads_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for cores in (None, 1, 2, 6, 64):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        counts.append(compiler_threads())
    assert counts == [1, 1, 1, 5, 8]

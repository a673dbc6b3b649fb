"""Forked children: parent and child both go on, each with its own requests."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polarlm.engine import Engine, EngineError, SamplingParams
from polarlm.engine.backends.numpy import blas
from polarlm.model_loaders.chat.templates import ChatTemplate
from polarlm.model_loaders.forks import cached_property
from tests.cpu import CpuOps
from tests.rendering import rendered

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
PATIENCE = 60  # seconds until a child that hangs is ended and the test fails


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process."""
    return begun_in_child(work)()


def begun_in_child(work: Callable[[], Any]) -> Callable[[], Any]:
    """Fork now; returns a function that waits for the result of `work`."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe()

    def send(end: Connection) -> None:
        try:
            end.send(work())
        except BaseException as error:
            end.send(repr(error))

    child = context.Process(target=send, args=(its,), daemon=True)
    child.start()

    def result() -> Any:
        try:
            assert mine.poll(PATIENCE), "the child hangs"
            return mine.recv()
        finally:
            child.kill()
            child.join(PATIENCE)

    return result


def template() -> ChatTemplate:
    return ChatTemplate("{{ messages[0].content }}")


def answers(template: ChatTemplate, content: str, count: int = 100) -> set[str]:
    return {rendered(template, [{"role": "user", "content": content}]) for _ in range(count)}


def test_a_child_can_render_a_template_that_a_thread_of_the_parent_renders() -> None:
    shared = template()
    rendering = threading.Event()
    ask = shared._process._ask

    def watched(*arguments: Any) -> Any:
        rendering.set()
        assert forked.wait(PATIENCE)
        return ask(*arguments)

    answers(shared, "before", 1)
    forked = threading.Event()
    shared._process._ask = watched  # type: ignore[method-assign]
    thread = threading.Thread(target=answers, args=(shared, "thread", 1))
    thread.start()
    assert rendering.wait(PATIENCE)
    shared._process._ask = ask  # type: ignore[method-assign]
    child = begun_in_child(lambda: answers(shared, "child", 1))
    forked.set()
    thread.join(PATIENCE)
    assert child() == {"child"}


class Slow:
    """An object whose value is computed while `forked` is awaited."""

    def __init__(self, computing: threading.Event, forked: threading.Event) -> None:
        self._computing, self._forked = computing, forked

    @cached_property
    def value(self) -> int:
        self._computing.set()
        assert self._forked.wait(PATIENCE)
        return 1


def test_a_child_has_cached_properties_of_a_class_that_a_thread_of_the_parent_computes() -> None:
    computing, forked, done = threading.Event(), threading.Event(), threading.Event()
    done.set()
    shared = Slow(computing, forked)
    thread = threading.Thread(target=lambda: shared.value)
    thread.start()
    assert computing.wait(PATIENCE)
    child = begun_in_child(lambda: Slow(threading.Event(), done).value)
    forked.set()
    thread.join(PATIENCE)
    assert child() == 1


# -- engines -------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = np.random.default_rng(0).integers(5, 96, 120).tolist()


@pytest.fixture
def two_cores() -> Iterator[None]:
    before = blas.threads()
    yield
    blas.use_threads(before)


def load(path: Path) -> Engine:
    return Engine.load(path, device="cpu", threads=2, block_size=16, kept_sequences=0)


def test_an_engine_answers_in_parent_and_child(tiny_path: Path, two_cores: None) -> None:
    with load(tiny_path) as engine:
        alone = engine.generate(PROMPT, GREEDY).token_ids
        assert blas.threads() == 2
        child = begun_in_child(lambda: [engine.generate(PROMPT, GREEDY).token_ids for _ in range(3)])
        assert [engine.generate(PROMPT, GREEDY).token_ids for _ in range(3)] == [alone] * 3
        assert child() == [alone] * 3
        assert in_child(lambda: (engine.close(), os.getpid())[1]) != os.getpid()
        assert engine.generate(PROMPT, GREEDY).token_ids == alone


def test_a_stream_goes_on_in_a_child_forked_by_its_reader(tiny_path: Path, two_cores: None) -> None:
    with load(tiny_path) as engine:
        alone = list(engine.generate(PROMPT, GREEDY).token_ids)
        stream = engine.stream(PROMPT, GREEDY)
        begun = list(next(stream).token_ids)
        assert in_child(lambda: begun + [i for chunk in stream for i in chunk.token_ids]) == alone
        assert begun + [i for chunk in stream for i in chunk.token_ids] == alone


def test_a_child_forked_during_a_unit_of_work_refuses_the_engine(
    tiny_path: Path, two_cores: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    working, forked = threading.Event(), threading.Event()

    def watched(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "worker":
            working.set()
            assert forked.wait(PATIENCE)
        return linear(*arguments, **options)

    def complaint() -> tuple[str, str]:
        with pytest.raises(EngineError) as raised:
            engine.generate(PROMPT, GREEDY)
        engine.close()
        return raised.value.code, str(raised.value)

    with load(tiny_path) as engine:
        linear = engine._model.ops.linear
        monkeypatch.setattr(engine._model.ops, "linear", watched)
        answers: list[object] = []
        thread = threading.Thread(
            target=lambda: answers.append(engine.generate(PROMPT, GREEDY).token_ids), name="worker"
        )
        thread.start()
        assert working.wait(PATIENCE)
        child = begun_in_child(complaint)
        forked.set()
        thread.join(PATIENCE)
        code, sentence = child()
        assert code == "forked"
        assert "no request is under way" in sentence
        assert answers == [engine.generate(PROMPT, GREEDY).token_ids]


def test_a_child_refuses_an_engine_on_a_gpu(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def complaint() -> str:
        with pytest.raises(EngineError) as raised:
            engine.generate(PROMPT, GREEDY)
        engine.close()
        return str(raised.value)

    monkeypatch.setattr(CpuOps, "forkable", False)  # as the ops of a GPU have it
    with load(tiny_path) as engine:
        assert "GPU" in in_child(complaint)
        assert engine.generate(PROMPT, GREEDY).token_ids
        inside, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with engine._exclusive():
                inside.set()
                assert forked.wait(PATIENCE)

        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(PATIENCE)
        child = begun_in_child(complaint)
        forked.set()
        thread.join(PATIENCE)
        assert "GPU" in child()

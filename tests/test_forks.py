"""A process and the child that it forks: both go on, and neither sees what the other asks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest

from model_loaders.templates import ChatTemplate

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
PATIENCE = 60  # seconds until a child that hangs is ended and the test fails


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked process."""
    return begun_in_child(work)()


def begun_in_child(work: Callable[[], Any]) -> Callable[[], Any]:
    """Fork now; the result comes when it is asked for."""
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
    return ChatTemplate("{{ messages[0].content }}", origin="model")


def answers(of: ChatTemplate, who: str, count: int = 100) -> set[str]:
    return {of.render([{"role": "user", "content": who}]) for _ in range(count)}


def test_templates_answer_the_process_that_asks() -> None:
    shared = template()
    answers(shared, "before", 1)
    child = begun_in_child(lambda: answers(shared, "child"))
    assert answers(shared, "parent") == {"parent"}
    assert child() == {"child"}
    assert answers(shared, "parent") == {"parent"}


def test_a_template_that_a_thread_is_rendering_is_free_in_the_child() -> None:
    shared = template()
    rendering = threading.Event()
    ask = shared._process._ask

    def watched(request: object, seconds: float) -> str:
        rendering.set()
        assert forked.wait(PATIENCE)
        return ask(request, seconds)

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

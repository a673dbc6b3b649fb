"""The log's two forms: a line for people on a terminal, JSON elsewhere."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from polarlm.engine import Chunk
from polarlm.engine.outputs import Usage
from polarlm.server.running import journal


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], Stream]]:
    """Sets the log up on a standard error that is a terminal, or none."""
    root, requests = logging.getLogger(), logging.getLogger("server.requests")
    before = root.handlers[:], root.level, requests.level
    root.handlers = []  # the handlers of pytest are not to be closed

    def to(terminal: bool) -> Stream:
        stream = Stream(terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        journal.set_up()
        return stream

    yield to
    root.handlers = before[0]
    root.setLevel(before[1])
    requests.setLevel(before[2])


def a_request(route: str = "POST /v1/completions", prompt: Any = None, **names: str) -> None:
    with journal.entry("127.0.0.1:4000", route) as entry:
        entry.key, entry.adapter = names.get("key"), names.get("adapter")
        entry.status, entry.outcome, entry.prompt_tokens, entry.prompt = 200, "stop", 76, prompt
        entry.count(Chunk("Hi", (5, 6)))
        entry.count(Chunk("", (), "stop", Usage(76, 59, 2, 1.0, 1.0)))


def test_elsewhere_a_request_is_a_line_of_json(log) -> None:
    stream = log(False)
    a_request()
    line = json.loads(stream.getvalue())
    assert (line["route"], line["outcome"], line["cached_tokens"]) == ("POST /v1/completions", "stop", 59)


def test_on_a_terminal_a_request_is_a_short_line(log) -> None:
    stream = log(True)
    a_request(key="anna", adapter="tone")
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d POST /v1/completions 200 stop: 59 of 76 prompt tokens cached, 2 new, adapter tone, "
        r"\d+\.\d s, for 127\.0\.0\.1:4000 \(anna\)\n",
        stream.getvalue(),
    )


def test_a_line_leaves_out_fields_that_the_request_lacks(log) -> None:
    stream = log(True)
    with journal.entry("127.0.0.1:4000", "GET /nothing") as entry:
        entry.status = 404
    assert re.fullmatch(r"\S+ GET /nothing 404: 0\.0 s, for 127\.0\.0\.1:4000\n", stream.getvalue())


@pytest.mark.parametrize("terminal", [True, False])
def test_of_an_image_in_a_prompt_the_line_has_the_size(log, terminal: bool) -> None:
    stream = log(terminal)
    a_request(prompt=[{"role": "user", "content": [{"type": "image", "image": b"." * 2000}]}])
    assert '"image": "2,000 bytes"' in stream.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_path_neither_moves_the_cursor_nor_forges_a_line(log, terminal: bool) -> None:
    stream = log(terminal)
    a_request("GET /\x1b[2J\n12:00:00 GET /forged\x9b")
    told = stream.getvalue()
    assert told.count("\n") == 1
    assert all(c.isprintable() for c in told.rstrip("\n"))


def test_a_warning_and_an_exception_on_a_terminal(log) -> None:
    stream = log(True)
    try:
        raise ArithmeticError("in a step")
    except ArithmeticError:
        logging.getLogger("server").warning("it went wrong", exc_info=True)
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(" warning: it went wrong")
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ArithmeticError: in a step"

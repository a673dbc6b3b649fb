"""Server-sent events, and clients that stop listening."""

from __future__ import annotations

import json
import socket

import pytest

from polarlm.engine import Engine
from polarlm.server.http import bodies, streams
from tests.server.http_server import Serving, serving
from tests.server.lines import eventually, until_closed
from tests.tiny import held

ENDLESS = {"prompt": "the rain", "temperature": 0, "ignore_eos": True}


# -- framing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("usage", [False, True])
def test_each_event_is_a_line_of_data_and_the_last_says_done(server: Serving, usage: bool) -> None:
    euro = server.engine.tokenize("€")
    banned = {str(i): -1e6 for i in range(96) if i not in euro}
    body = {
        **ENDLESS,
        "max_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": usage},
        "logit_bias": banned,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.content.isascii()  # so that no line separator of Unicode's cuts an event in two
    *events, done, rest = response.text.split("\n\n")
    assert rest == ""
    assert done == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert not "".join(choice["text"] for part in parts for choice in part["choices"]).isascii()
    assert [part["choices"] == [] for part in parts] == [False] * (len(parts) - usage) + [True] * usage
    assert all(("usage" in part) == usage for part in parts)
    assert not any(part.get("usage") for part in parts[:-1])


def test_an_event_is_sent_as_soon_as_there_is_text(server: Serving) -> None:
    """The engine computes no more before the reader has seen what there is."""
    server.gate.close()
    server.gate.let(12)
    with server.http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(5):
            server.gate.let(4)  # for a character of up to four bytes
            assert next(line for line in lines if line).startswith("data: {")
    assert_all_free(server, 1)


# -- clients that go away --------------------------------------------------------------------------------------


def assert_all_free(server: Serving, cancelled: int) -> None:
    """Everything of clients that have gone is given back, though the engine does nothing more."""
    eventually(lambda: server.outcomes() == {"cancelled": cancelled})
    eventually(lambda: not server.busy)
    with server.engine._exclusive():
        assert not any(map(any, held(server.engine)))


@pytest.mark.parametrize(("stream", "units"), [(False, 0), (True, 1), (False, 12)])  # in the queue, prompt, answer
def test_a_client_that_leaves_before_its_answer_does_so_too(server: Serving, stream: bool, units: int) -> None:
    server.gate.close()
    with server.send("/v1/completions", {**ENDLESS, "stream": stream}):
        eventually(lambda: server.busy)
        if units:
            server.gate.let(units)
    assert_all_free(server, 1)


def test_a_connection_that_breaks_is_noticed(server: Serving) -> None:
    server.gate.close()
    connection = server.send("/v1/completions", {**ENDLESS, "stream": True})
    eventually(lambda: server.busy)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends without good-bye
    connection.close()
    assert_all_free(server, 1)


def test_a_request_that_never_becomes_whole_is_given_up(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its client has left or not."""
    monkeypatch.setattr(bodies, "_BODY_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for leaves in (True, False):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head + b'Content-Length: 100\r\n\r\n{"prompt"')
            assert leaves or until_closed(connection).startswith(b"HTTP/1.1 408 ")
    assert server.post("/v1/completions", {**ENDLESS, "max_tokens": 3}).status_code == 200
    assert server.outcomes() == {"length": 1}


def test_a_client_that_does_not_read_is_cut_off(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are more than all buffers on the way take; the engine ends none of them before it is noticed."""
    monkeypatch.setattr(streams, "SLOW_READER_SECONDS", 0.5)
    with serving(tiny, send_buffer=4096) as server:
        server.gate.close()
        server.gate.let(700)
        with server.send("/v1/completions", {**ENDLESS, "stream": True, "n": 8}, receive_buffer=4096):
            eventually(lambda: sum(server.outcomes().values()) == 8)
            assert server.outcomes()["cancelled"] > 0
            eventually(lambda: not server.busy)
            server.gate.open()
            assert server.post("/v1/completions", {**ENDLESS, "max_tokens": 3}).status_code == 200

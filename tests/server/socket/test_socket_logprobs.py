"""Log-probabilities over the socket: with the pieces they belong to."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from polarlm.engine import SamplingParams
from polarlm.server.socket import connection
from tests.server.http_server import Serving
from tests.server.lines import Client, eventually

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(("stream", "count"), [(True, 3), (False, 3), (True, 0)])
def test_log_probabilities_come_with_the_pieces(socket_server: Serving, stream: bool, count: int) -> None:
    with Client(socket_server.address) as client:
        client.send(id=1, prompt="once", max_tokens=20, logprobs=count, stream=stream, **GREEDY)
        pieces = []
        while "delta" in (message := client.receive()):
            pieces.append(message)
    answer = socket_server.engine.generate(
        "once", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=count)
    )
    tokenizer = socket_server.engine.model.tokenizer

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"id": token_id, "token": text, "logprob": pytest.approx(logprob, abs=1e-5)}

    expected_pieces = [
        entry(token.id, token.logprob) | {"top": [entry(*other) for other in token.top]} for token in answer.logprobs
    ]
    assert "".join(piece["delta"] for piece in pieces) == answer.text
    assert [token for piece in pieces for token in piece.get("logprobs", [])] == expected_pieces
    assert len(pieces) == 1 or stream


def test_a_whole_answer_larger_than_what_may_wait_arrives(socket_server: Serving, monkeypatch) -> None:
    def small(peer: Any) -> None:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    monkeypatch.setattr(connection, "MOST_PENDING", 1000)
    monkeypatch.setattr(connection, "notice_lost_peers", small)
    with Client(socket_server.address, receive_buffer=4096) as client:
        client.send(id=1, prompt="once", max_tokens=200, logprobs=20, stream=False, **GREEDY)
        eventually(lambda: socket_server.driver.snapshot().requests == {"length": 1})  # all of it has been written
        message = client.receive()
        assert len(message["logprobs"]) == 200
        assert len(json.dumps(message)) > 200_000
        assert client.receive()["done"]
        assert client.ask(id=2, prompt="a", max_tokens=3, **GREEDY)[1]["done"]

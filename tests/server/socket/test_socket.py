"""The socket server over real sockets: what it answers, and what clients may do to it."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from polarlm.children import Lines
from polarlm.engine import Engine, SamplingParams
from polarlm.server.running.listening import ListenError, unix_socket
from polarlm.server.socket import connection
from tests.server.apis import submitted
from tests.server.http_server import Serving
from tests.server.lines import PATIENCE, Client, eventually
from tests.server.reading.test_http_fuzz import VALID, broken, changed

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "socket-protocol.md"
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "prompt": [7, 8, 9] * 20, "max_tokens": 150}

Start = Callable[..., Serving]


def expected(engine: Engine, prompt: Any, tokens: int) -> str:
    return engine.generate(prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)).text


def answers(client: Client) -> bool:
    """Whether the server still serves this client."""
    return client.ask(id="still there?", prompt="a", max_tokens=3, **GREEDY)[1].get("done") is True


@pytest.fixture
def client(socket_server: Serving) -> Iterator[Client]:
    with Client(socket_server.address) as client:
        yield client


# -- what is answered ------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("prompt", "stream"), [({"prompt": "once"}, {}), (CHAT, {"stream": False}), (CHAT, {"stream": None})]
)
def test_an_answer(socket_server: Serving, prompt: dict[str, Any], stream: dict[str, Any]) -> None:
    with Client(socket_server.address) as client:
        client.send(id=1, max_tokens=20, **prompt, **stream, **GREEDY)
        pieces = []
        while "delta" in (message := client.receive()):
            assert message.keys() == {"id", "delta"}
            pieces.append(message["delta"])
    text = expected(socket_server.engine, *prompt.values(), 20)
    assert "".join(pieces) == text
    assert (len(pieces) == 1) == (stream == {"stream": False})
    assert message.keys() == {"id", "done", "finish_reason", "usage", "timings"}
    assert (message["id"], message["done"], message["finish_reason"]) == (1, True, "length")
    assert message["usage"].keys() == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    assert message["usage"]["completion_tokens"] == 20
    assert all(seconds >= 0 for seconds in message["timings"].values())


@pytest.mark.slow
def test_interleaved_requests_on_one_connection(client: Client, socket_server: Serving) -> None:
    prompts = {f"request {number}": [5 + number] * (4 * number + 1) for number in range(6)}
    texts, last, order = dict.fromkeys(prompts, ""), {}, []
    for request_id, prompt in prompts.items():
        client.send(id=request_id, prompt=prompt, max_tokens=60, **GREEDY)
    while len(last) < len(prompts):
        message = client.receive()
        order.append(message["id"])
        if "delta" in message:
            texts[message["id"]] += message["delta"]
        else:
            last[message["id"]] = message["finish_reason"]
    assert texts == {name: expected(socket_server.engine, prompt, 60) for name, prompt in prompts.items()}
    assert set(last.values()) == {"length"}
    assert len(list(itertools.groupby(order))) > len(prompts)  # not one after the other


@pytest.mark.usefixtures("slow_steps")
def test_cancel(client: Client, socket_server: Serving) -> None:
    client.send(id="long", **LONG)
    assert "delta" in client.receive()
    client.send(id="long", cancel=True)
    client.send(id="nobody", cancel=True)  # as if it had ended meanwhile
    assert client.rest_of("long")[1] == {"id": "long", "done": True, "finish_reason": "cancelled"}
    eventually(socket_server.is_idle)
    assert client.ask(id="long", prompt="a", max_tokens=2, **GREEDY)[1]["finish_reason"] == "length"  # free again
    assert socket_server.driver.snapshot().requests == {"cancelled": 1, "length": 1}


def test_openais_slow_tier_is_the_background(client: Client, socket_server: Serving, monkeypatch) -> None:
    requests = submitted(socket_server.engine, monkeypatch)
    for tier in ("flex", "auto"):
        assert client.ask(id=1, prompt="a", max_tokens=1, service_tier=tier)[1]["done"]
    assert [request["in_background"] for request in requests] == [True, False]


def test_an_id_names_one_request_at_a_time(client: Client) -> None:
    client.send(id=1, **LONG)
    assert "delta" in client.receive()
    client.send(id=1, prompt="a")
    while "delta" in (message := client.receive()):
        pass
    assert message["error"]["field"] == "id"
    client.send(id=1, cancel=True)
    assert client.rest_of(1)[1]["finish_reason"] == "cancelled"


def test_a_client_that_ends_its_side_gets_its_answers(client: Client) -> None:
    for number in range(3):
        client.send(id=number, prompt="once", max_tokens=30, stream=False, **GREEDY)
    client.send_raw(b'{"id": "no line end", "prompt": "once", "max_tokens": 1}')
    client.half_close()
    messages = list(client.rest())
    assert {message["id"] for message in messages if message.get("done")} == {0, 1, 2, "no line end"}


# -- what is refused -------------------------------------------------------------------------------------------


LONG_PROMPT = json.dumps({"id": 1, "prompt": [5] * 1000}).encode()
WRONG: list[tuple[bytes, int | None, str | None]] = [
    (b"garbage", None, None),
    (b"[" * 50_000, None, None),
    (b"{}", None, "id"),
    (b'{"id": true, "prompt": "a"}', None, "id"),
    (b'{"id": NaN, "prompt": "a"}', None, "id"),
    (b'{"id": 1}', 1, "messages"),
    (b'{"id": 1, "cancel": 1}', 1, "cancel"),
    (b'{"id": 1, "prompt": "a", "n": 2}', 1, "n"),
    (json.dumps({"id": 1, **CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}).encode(), 1, "tools"),
    (b'{"id": 1, "prompt": [1000000]}', 1, None),
    (b'{"id": 1, "prompt": ""}', 1, None),
    (LONG_PROMPT, 1, None),
]


def test_wrong_messages_get_errors_and_the_connection_lives(client: Client) -> None:
    client.send(api_key="whatever")  # ignored where none is needed
    assert answers(client)
    for line, request_id, field in WRONG:
        client.send_raw(line + b"\n")
        message = client.receive()
        assert message.keys() == {"id", "error"}, line
        assert message["id"] == request_id, line
        code = "context_length_exceeded" if line is LONG_PROMPT else "invalid_request"
        assert (message["error"]["code"], message["error"].get("field")) == (code, field), line
        assert 0 < len(message["error"]["message"]) < 300, line
    assert answers(client)


def test_over_long_lines(start: Start) -> None:
    server = start(max_body=1000)
    with Client(server.address) as client:
        assert answers(client)
        client.send_raw(b"x" * 1500)  # told at once: there may never be an end of the line
        assert "1000 bytes" in client.receive()["error"]["message"]
        client.send_raw(b"y" * 100_000 + b"\n")
        assert answers(client)
        client.send_raw(b'{"id": 1, "prompt": "' + b"a" * 1000 + b'"}\n')
        assert "1000 bytes" in client.receive()["error"]["message"]
        assert answers(client)


@pytest.mark.parametrize("sizes", [[1], [2, 7], [3, 1, 11], [1000]])
def test_lines_however_they_are_cut(sizes: list[int]) -> None:
    data = b"short\n" + b"12345678\n" + b"123456789\n" + b"\n" + b"x" * 50 + b"\nlast"
    lines, cut, start = Lines(8), [], 0
    for size in itertools.cycle(sizes):
        cut += lines.feed(data[start : start + size])
        start += size
        if start >= len(data):
            break
    assert cut == [b"short", b"12345678", None, b"", None]
    assert lines.rest() == b"last"


def test_too_many_connections(start: Start) -> None:
    server = start(max_connections=2)
    with Client(server.address) as first:
        with Client(server.address) as second:
            assert answers(first)
            assert answers(second)
            with Client(server.address) as third:
                assert third.receive()["error"]["code"] == "busy"
                with pytest.raises(EOFError):
                    third.receive()

        def has_room() -> bool:
            with Client(server.address) as fourth, suppress(EOFError, ConnectionError):
                return "error" not in fourth.ask(id=1, prompt="a", max_tokens=1)[1]

        eventually(has_room)


HTTP = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
TLS = bytes.fromhex("16030102000100")


@pytest.mark.parametrize(
    ("first", "key"),
    [
        (HTTP, None),
        (TLS + b"\n", None),
        (b"\r\n" + TLS + b"\r\n", "secret"),
        (b"x" * 2000, "secret"),
    ],
)
def test_a_web_page_cannot_talk_to_it(start: Start, first: bytes, key: str | None) -> None:
    """A browser sends what a page wants behind lines of its own: in a request's body, in the greeting of TLS."""
    server = start(max_body=1000, api_key=key)
    with Client(server.address) as client:
        client.send_raw(first + b'\n{"id": 1, "prompt": "a", "api_key": "secret"}\n')
        error = client.receive()["error"]
        assert error["code"] == ("invalid_request" if key is None else "unauthorized")
        assert key is not None or "HTTP" in error["message"]
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()
    assert server.driver.snapshot().requests == {}


def test_an_idle_connection_is_closed(socket_server: Serving, monkeypatch) -> None:
    """However much else it says."""
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.3)
    with Client(socket_server.address) as client, suppress(EOFError, ConnectionError):
        assert answers(client)
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline
            client.send(id=1)
            client.receive()


@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_waits_for_an_answer_is_not_idle(socket_server: Serving, monkeypatch) -> None:
    for seconds, tokens in ((0.5, 10), (10, 40)):  # a request may take a while to arrive; its steps take longer
        monkeypatch.setattr(connection, "IDLE_SECONDS", seconds)
        with Client(socket_server.address) as client, suppress(EOFError, ConnectionError):
            assert client.ask(id=1, prompt="a", max_tokens=tokens, **GREEDY)[1]["done"]
            break
    else:
        pytest.fail("a client that waits was hung up on")


def test_a_client_is_idle_when_it_has_its_answers(client: Client, socket_server: Serving, monkeypatch) -> None:
    socket_server.gate.close()
    client.send(id=1, prompt="a", max_tokens=3, **GREEDY)
    eventually(lambda: socket_server.engine.status().waiting)
    monkeypatch.setattr(connection, "IDLE_SECONDS", 0.1)
    socket_server.gate.open()
    assert client.rest_of(1)[1]["done"]
    assert client.receive()["error"]["code"] == "timeout"
    with pytest.raises(EOFError):
        client.receive()


# -- the key ---------------------------------------------------------------------------------------------------


def test_the_key_is_part_of_the_first_message(start: Start) -> None:
    server = start(api_key="secret")
    with Client(server.address) as client:
        client.send(api_key="secret")
        assert answers(client)
    with Client(server.address) as client:
        assert client.ask(id=1, prompt="a", max_tokens=1, api_key="secret")[1]["done"]
        assert answers(client)


@pytest.mark.parametrize("first", [{"id": 1, "prompt": "a"}, {"api_key": "Secret"}, {"api_key": 3}, {"api_key": "é"}])
def test_without_the_key_nothing_is_served(start: Start, first: dict[str, Any]) -> None:
    server = start(api_key="secret")
    with Client(server.address) as client:
        client.send(**first)
        client.send(id=2, prompt="a")
        assert client.receive()["error"]["code"] == "unauthorized"
        with pytest.raises((EOFError, ConnectionResetError)):
            client.receive()
    assert server.driver.snapshot().requests == {}


def test_a_client_without_the_key_is_disconnected(start: Start, monkeypatch) -> None:
    monkeypatch.setattr(connection, "KEY_SECONDS", 0.05)
    with Client(start(api_key="secret").address) as client:
        assert client.receive()["error"]["code"] == "unauthorized"
        with pytest.raises(EOFError):
            client.receive()


# -- clients that go away, or do not read ----------------------------------------------------------------------


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(socket_server: Serving, stream: bool) -> None:
    """As the system closes its connection if it is killed."""
    with Client(socket_server.address) as client:
        client.send(id=1, stream=stream, **LONG)
        if stream:
            client.receive()
        eventually(lambda: socket_server.engine.status().running == 1)
    eventually(socket_server.is_idle)
    assert socket_server.driver.snapshot().requests == {"cancelled": 1}


@pytest.mark.usefixtures("slow_steps")
def test_a_client_that_resets_the_connection_with_requests_in_the_queue(socket_server: Serving) -> None:
    client = Client(socket_server.address)
    for number in range(6):
        client.send(id=number, **LONG)
    client.receive()
    # A reset discards what the server has not read.
    eventually(lambda: socket_server.engine.status().running + socket_server.engine.status().waiting == 6)
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    eventually(socket_server.is_idle)
    assert socket_server.driver.snapshot().requests == {"cancelled": 6}


def test_half_open_connections(socket_server: Serving) -> None:
    """Clients that say nothing, or half of something, keep nobody from being served."""
    silent = [Client(socket_server.address) for _ in range(10)]
    for client in silent[5:]:
        client.send_raw(b'{"id": 1, "prompt": "on')
    with Client(socket_server.address) as client:
        assert answers(client)
    silent[9].send_raw(b'ce", "max_tokens": 1}\n')
    assert silent[9].rest_of(1)[1]["done"]
    for client in silent:
        client.close()


def flood(client: Client, lines: int, stop: threading.Event) -> None:
    """Ask for errors and read none of them; ends early where the server hangs up."""
    try:
        for _ in range(lines):
            if not stop.is_set():
                client.send_raw(b"?\n" * 1000)
    except OSError:
        stop.set()


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize(("seconds", "pending"), [(0.2, 1 << 40), (PATIENCE, 1 << 16)])
def test_a_slow_reader_is_cut_off(socket_server: Serving, monkeypatch, seconds: float, pending: int) -> None:
    """Either its buffers stay full for too long, or more and more waits for it."""
    monkeypatch.setattr(connection, "SLOW_SECONDS", seconds)
    monkeypatch.setattr(connection, "MOST_PENDING", pending)
    stop = threading.Event()
    slow = Client(socket_server.address, receive_buffer=4096)
    slow.send(id="long", **LONG)
    eventually(lambda: socket_server.engine.status().running == 1)
    flooding = threading.Thread(target=flood, args=(slow, 100, stop))
    flooding.start()
    eventually(lambda: socket_server.driver.snapshot().requests == {"cancelled": 1} and socket_server.is_idle())
    stop.set()
    slow.close()
    flooding.join()
    with Client(socket_server.address) as client:
        assert answers(client)


# -- what goes wrong -------------------------------------------------------------------------------------------


def fuzzed(rng: random.Random) -> bytes:
    """A message that is wrong in some way, or several at once."""
    body = {"id": rng.randrange(5), "cancel": False, **VALID["/v1/completions"]}
    return broken(json.dumps(changed(body, rng)).encode(), rng)


def test_after_fuzzed_messages_it_still_answers(start: Start) -> None:
    server, rng = start(max_body=4096, max_queue=1000), random.Random(0)
    for _ in range(5):
        with Client(server.address) as client:
            client.send(id="the first", prompt="a", max_tokens=1)
            for _ in range(100):
                client.send_raw(fuzzed(rng) + b"\n")
            client.send(id="the last", prompt="a", max_tokens=1)
            assert client.rest_of("the last")[1]["done"]
            for _ in range(rng.randrange(3)):  # and leaves while some are under way
                client.send_raw(fuzzed(rng))
    eventually(server.is_idle)


# -- where it listens ------------------------------------------------------------------------------------------


def test_a_unix_socket_is_for_its_owner_alone(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = start(unix=str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Client(str(path)) as client:
        assert answers(client)
    assert server.driver.snapshot().requests == {"length": 1}


def test_only_a_socket_file_without_a_listener_is_replaced(start: Start, tmp_path: Path) -> None:
    stale, alive, file = tmp_path / "stale", tmp_path / "alive", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(stale))
    start(unix=str(stale))
    with Client(str(stale)) as client:
        assert answers(client)
    start(unix=str(alive))
    file.write_text("precious")
    for path, reason in ((alive, "another server"), (file, "not a socket"), (tmp_path / ("x" * 200), "cannot")):
        with pytest.raises(ListenError, match=reason) as caught, unix_socket(str(path)):
            pass
        assert str(path) in str(caught.value)
    assert file.read_text() == "precious"
    with Client(str(alive)) as client:
        assert answers(client)


def test_a_file_that_replaced_the_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with unix_socket(str(path)):
        os.unlink(path)
        path.write_text("precious")
    assert path.read_text() == "precious"


# -- the document ----------------------------------------------------------------------------------------------


def test_the_example_of_the_document(socket_server: Serving) -> None:
    """What the document shows in Python runs as it is, but for the port, and an answer that cannot end at once."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 10
    assert code.count("8081") == 1
    assert code.count('"max_tokens": 64') == 1
    code = code.replace('"max_tokens": 64', '"max_tokens": 64, "temperature": 0, "ignore_eos": True')
    code = code.replace("8081", str(socket_server.address[1]))
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.strip()
    assert sum(socket_server.driver.snapshot().requests.values()) == 1


# -- log-probabilities -----------------------------------------------------------------------------------------


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

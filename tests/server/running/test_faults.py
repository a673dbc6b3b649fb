"""A real server under load, to which bad things are done over real sockets: it lives on, and everything comes back."""

from __future__ import annotations

import json
import random
import re
import select
import signal
import socket
import struct
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.server.lines import PATIENCE, eventually
from tests.server.process import SMALL_BLOCKS, SOME, Process
from tests.server.socket.test_socket import GREEDY, LONG

SLOW, HEAD = 0.4, 0.6  # limits in seconds, shorter than the server's own
MORE_MEMORY = 24 << 20  # bytes, by the end of all tests
ENDLESS = {**LONG, "max_tokens": -1, "stream": True}

# Limits; each is short while there is a file of its name in the folder IMPATIENT, and longer than tests take
# otherwise; buffers that are soon full, and a note of the moment at which one is.
IMPATIENT = """
import os, socket, time
class Limit(float):
    def __new__(cls, seconds, name):
        limit = super().__new__(cls, seconds)
        limit.file = os.path.join(os.environ["IMPATIENT"], name)
        return limit
    def __radd__(self, now):
        return now + (float(self) if os.path.exists(self.file) else 1000.0)
from polarlm.server import __main__ as program
from polarlm.server.socket import connection
from polarlm.server.http import uvicorn_server
from polarlm.server.http import streams
connection.SLOW_SECONDS = streams.SLOW_READER_SECONDS = Limit({slow}, "slow")
uvicorn_server.HEAD_SECONDS = Limit({head}, "head")
bind = program.tcp_socket
def with_small_buffers(host, port, *flag):
    bound = bind(host, port, *flag)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return bound
program.tcp_socket = with_small_buffers
def noting(protocol):
    made, pause = protocol.connection_made, protocol.pause_writing
    def with_less(self, transport):
        transport.set_write_buffer_limits(high=8192)
        made(self, transport)
    def noted(self):
        with open(os.environ["FULL"], "w") as file:
            file.write(str(time.monotonic()))
        pause(self)
    protocol.connection_made, protocol.pause_writing = with_less, noted
noting(connection.Connection)
noting(uvicorn_server.WebConnection)
"""
PRELUDE = IMPATIENT.format(slow=SLOW, head=HEAD) + SMALL_BLOCKS.format(kept=0)


@pytest.fixture(scope="module")
def shared(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("faults")
    surroundings = {"FULL": str(folder / "full"), "IMPATIENT": str(folder), "STEP_SECONDS": "0.01"}
    surroundings[CACHE_VARIABLE] = str(folder / "cache")  # empty, so that LLVM, which takes memory, is loaded early
    flags = ("--socket-port", "0", "--parallel", "3")
    with Process(tiny_path, folder, *flags, troubled=True, prelude=PRELUDE, **surroundings) as process:
        assert answers(process)
        before = process.resident()
        yield process
        assert process.resident() - before < MORE_MEMORY
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.fixture
def server(shared: Process) -> Iterator[Process]:
    """After every test nothing is computed, every block is free, and both ways to ask are answered."""
    yield shared
    eventually(shared.is_idle)
    blocks, free = shared.blocks()
    assert free == blocks
    assert answers(shared)
    with shared.client() as client:
        assert client.ask(id=1, prompt="a", max_tokens=3, **GREEDY)[1]["done"]


def answers(process: Process) -> bool:
    body = json.dumps({"prompt": "a", "max_tokens": 3, **GREEDY}).encode()
    request = urllib.request.Request(process.url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        return json.load(response)["usage"]["completion_tokens"] == 3


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def connect(process: Process, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(PATIENCE)
    connection.connect(("127.0.0.1", int(process.url.rpartition(":")[2])))
    return connection


def stream(process: Process, **more: Any) -> socket.socket:
    connection = connect(process)
    connection.sendall(request({**ENDLESS, **more}))
    return connection


@contextmanager
def impatient(process: Process, limit: str) -> Iterator[None]:
    """While it holds, one of the server's limits is short."""
    file = process.trouble.with_name(limit)
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def ended(process: Process) -> Counter[str]:
    """Requests so far, by how they ended."""
    found = re.findall(r'(?m)^polarlm_requests_total{outcome="(\w+)"} (\S+)', process.get("/metrics"))
    return Counter({outcome: int(float(count)) for outcome, count in found})


def everything(connection: socket.socket) -> bytes:
    """What arrives until the server hangs up."""
    received = b""
    with connection, suppress(ConnectionResetError):
        while data := connection.recv(1 << 16):
            received += data
    return received


# -- clients that go away --------------------------------------------------------------------------------------


def test_connections_that_are_reset_in_mid_stream(server: Process) -> None:
    before = ended(server)
    with server.held() as let:
        let(SOME)
        connections = [stream(server) for _ in range(5)]
        eventually(lambda: server.metric("requests_active") == 5)
        select.select(connections, [], [])
        for connection in connections:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        eventually(lambda: ended(server) - before == {"cancelled": 5})


def silent(server: Process) -> list[socket.socket]:
    """Connections with no request, or the beginning of one."""
    connections = [connect(server) for _ in range(20)]
    for number, connection in enumerate(connections[5:]):
        with suppress(ConnectionError):  # which the server may have closed meanwhile
            connection.sendall(request(ENDLESS)[: 7 * number])
    return connections


def test_connections_without_a_complete_request_are_closed(server: Process) -> None:
    begun = time.monotonic()
    with impatient(server, "head"):
        assert [everything(connection) for connection in silent(server)] == [b""] * 20
    assert time.monotonic() - begun >= HEAD


def test_a_slow_reader_is_cut_off_at_the_limit(server: Process) -> None:
    before, full = ended(server), server.trouble.with_name("full")
    full.unlink(missing_ok=True)
    with impatient(server, "slow"):
        with server.held():
            connection = connect(server, receive_buffer=4096)
            connection.sendall(request({**ENDLESS, "n": 8}))
            eventually(lambda: server.metric("requests_active") == 8)
        eventually(full.exists)
        eventually(server.is_idle)
    blocks, free = server.blocks()
    waited = time.monotonic() - float(full.read_text())
    after = ended(server)
    assert (free, sum(after.values()) - sum(before.values())) == (blocks, 8)
    assert after["cancelled"] > before["cancelled"]
    assert waited >= SLOW
    connection.close()


# -- garbage ---------------------------------------------------------------------------------------------------


def answer_to(connection: socket.socket, data: bytes) -> bytes:
    """What comes back, in case the server does not wait for more, and when it is told that there is no more."""
    connection.sendall(data)
    select.select([connection], [], [], 0.03)
    connection.shutdown(socket.SHUT_WR)
    return everything(connection)


@pytest.mark.slow
def test_garbage_over_http(server: Process) -> None:
    """Requests with wrong bytes, cut and lengthened; each is answered or hung up on, never with a server's error."""
    rng, seen = random.Random(2), set()
    for number in range(500):
        data = bytearray(request({"prompt": "a", "max_tokens": 1, **GREEDY}))
        for _ in range(rng.choice((1, 1, 2, 8))):
            at, kind = rng.randrange(len(data)), rng.randrange(4)
            data[at : at + kind] = rng.randbytes(rng.randrange(4))
        if number % 5 == 0:
            data = data[: rng.randrange(len(data))]
        received = answer_to(connect(server), data)
        assert not received.startswith(b"HTTP/1.1 5"), (data, received)
        seen.update(received.split(b" ")[1:2])
    assert {b"200", b"400"} <= seen
    assert not any("traceback" in line for line in server.log() if "secret detail" not in line.get("traceback", ""))


# -- the server's own troubles -----------------------------------------------------------------------------------


def test_an_error_in_a_step_ends_those_who_took_part(server: Process) -> None:
    """Three run and get an error, as their last event; a fourth waits, and is served."""
    before = ended(server)
    with server.held() as let:
        running = [stream(server) for _ in range(3)]
        eventually(lambda: server.metric("requests_waiting") == 3)
        let(SOME)
        for connection in running:
            connection.recv(1)
        waiting = stream(server, max_tokens=5)
        eventually(lambda: server.metric("requests_waiting") == 1)
        server.trouble.touch()
    for connection in running:
        *_, last, rest = re.split(rb"data: (.*)\n\n", everything(connection))
        assert json.loads(last)["error"]["code"] == "internal"
        assert b"data:" not in rest
    assert not server.trouble.exists()
    assert b"data: [DONE]" in everything(waiting)
    assert ended(server)["internal"] - before["internal"] == 3
    assert any("secret detail" in line.get("traceback", "") for line in server.log())


@pytest.mark.slow
def test_sigterm_under_load_ends_every_stream_properly(tiny_path: Path, tmp_path: Path) -> None:
    """Those that run, and those that wait."""
    with (
        Process(tiny_path, tmp_path, "--parallel", "3", troubled=True, STEP_SECONDS="0.05") as process,
        ExitStack() as ends,
    ):
        with process.held() as let:
            let(SOME)
            connections = [ends.enter_context(stream(process, max_tokens=40)) for _ in range(9)]
            eventually(lambda: process.metric("requests_active") == 9)
            select.select(connections, [], [])
            process.signal(signal.SIGTERM)
        received = [everything(connection) for connection in connections]
        assert [data.count(b"data: [DONE]") for data in received] == [1] * 9
        assert [data.count(b'"finish_reason":"length"') for data in received] == [1] * 9
        assert process.wait() == 0

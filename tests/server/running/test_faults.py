"""A real server under load, to which bad things are done over real sockets: it lives on, and everything comes back."""

from __future__ import annotations

import json
import random
import re
import select
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.server.lines import PATIENCE, eventually, until_closed
from tests.server.process import SMALL_BLOCKS, SOME, Process
from tests.server.socket.test_socket import GREEDY, LONG

MORE_MEMORY = 24 << 20  # bytes, by the end of all tests
ENDLESS = {**LONG, "max_tokens": -1, "stream": True}


@pytest.fixture(scope="module")
def shared(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("faults")
    surroundings = {"STEP_SECONDS": "0.01"}
    surroundings[CACHE_VARIABLE] = str(folder / "cache")  # empty, so that LLVM, which takes memory, is loaded early
    flags, prelude = ("--socket-port", "0", "--parallel", "3"), SMALL_BLOCKS.format(kept=0)
    with Process(tiny_path, folder, *flags, troubled=True, prelude=prelude, **surroundings) as process:
        assert served(process)
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
    assert served(shared)
    with shared.client() as client:
        assert client.ask(id=1, prompt="a", max_tokens=3, **GREEDY)[1]["done"]


def served(process: Process) -> bool:
    answer = process.post("/v1/completions", prompt="a", max_tokens=3, **GREEDY)
    return answer["usage"]["completion_tokens"] == 3


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def connect(process: Process) -> socket.socket:
    return socket.create_connection(process.address, PATIENCE)


def stream(process: Process, **more: Any) -> socket.socket:
    connection = connect(process)
    connection.sendall(request({**ENDLESS, **more}))
    return connection


def ended(process: Process) -> Counter[str]:
    """Requests so far, by how they ended."""
    outcomes = re.findall(r'(?m)^polarlm_requests_total{outcome="(\w+)"} (\S+)', process.get("/metrics"))
    return Counter({outcome: int(float(count)) for outcome, count in outcomes})


def answer_to(connection: socket.socket, data: bytes) -> bytes:
    """What comes back, in case the server does not wait for more, and when it is told that there is no more."""
    connection.sendall(data)
    select.select([connection], [], [], 0.03)
    connection.shutdown(socket.SHUT_WR)
    return until_closed(connection)


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


def fail(process: Process, runs: int, waits: int) -> list[socket.socket]:
    """Has a step fail that `runs` requests take part in, while others wait; the connections of all, in this order."""
    with process.held() as let:
        connections = [stream(process) for _ in range(runs)]
        eventually(lambda: process.metric("requests_waiting") == runs)
        let(SOME)
        for connection in connections:
            connection.recv(1)
        connections += [stream(process, max_tokens=5) for _ in range(waits)]
        eventually(lambda: process.metric("requests_waiting") == waits)
        process.trouble.touch()
    return connections


def last_error(connection: socket.socket) -> str:
    """The code of the error that is the last event."""
    *_, last, rest = re.split(rb"data: (.*)\n\n", until_closed(connection))
    assert b"data:" not in rest
    return json.loads(last)["error"]["code"]


@pytest.mark.slow
def test_an_error_in_a_step_ends_those_who_took_part(server: Process) -> None:
    """Three run and get an error, as their last event; a fourth waits, and is served."""
    before = ended(server)
    *running, waiting = fail(server, 3, 1)
    assert [last_error(connection) for connection in running] == ["internal"] * 3
    assert not server.trouble.exists()
    assert b"data: [DONE]" in until_closed(waiting)
    assert ended(server)["internal"] - before["internal"] == 3
    assert any("secret detail" in line.get("traceback", "") for line in server.log())


LOSES_ITS_DEVICE = """
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.errors import DeviceLost
def check(ops):
    raise DeviceLost("The GPU has stopped with an error: start this program again")
NumpyOps.check = check
"""


@pytest.mark.slow
def test_a_device_that_is_lost_ends_the_server(tiny_path: Path, tmp_path: Path) -> None:
    """Every client is told why, those that wait, too; then there is an exit code for whatever starts servers again."""
    with Process(tiny_path, tmp_path, "--parallel", "2", troubled=True, prelude=LOSES_ITS_DEVICE) as process:
        one, another, *waiting = fail(process, 2, 2)
        assert last_error(one) == last_error(another) == "device_unavailable"
        for connection in waiting:
            told = until_closed(connection)
            assert told.startswith(b"HTTP/1.1 503 ")
            assert b"has stopped with an error: start this program again" in told
        with pytest.raises(httpx.HTTPError):  # a status of 503 is one, too
            process.get("/health")
        assert process.wait() == 1
        assert "error: The GPU has stopped with an error" in process.errors.read_text().splitlines()[-1]

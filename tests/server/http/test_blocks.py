"""/blocks: engines on other machines read and write blocks that this server keeps, and nothing else is let in."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from polarlm.engine.cli.flags import FlagError
from polarlm.engine.storage.objects import Object
from polarlm.engine.storage.payloads import Payloads
from polarlm.server.config import read_command_line
from polarlm.server.http import streams
from polarlm.server.http.plain import blocks
from tests.pairs import in_turn
from tests.server.http_server import Serving, serving
from tests.server.lines import PATIENCE, eventually, until_closed
from tests.tiny import PLAIN, load_tiny

NAME = bytes(range(16))
PATH = f"/blocks/{NAME.hex()}"
OBJECT = b"".join(Object({"kind": "ids", "ids": [5, 6, 7]}).pack(NAME))


@contextmanager
def sharing(model: Path, folder: Path) -> Iterator[Serving]:
    kept = {"cache_disk": "1M", "cache_disk_folder": str(folder)}
    with load_tiny(model, **PLAIN, **kept) as engine, serving(engine, share_blocks=True, api_key="secret") as running:
        yield running


@pytest.fixture
def server(tiny_path: Path, tmp_path: Path) -> Iterator[Serving]:
    with sharing(tiny_path, tmp_path) as running:
        yield running


def ask(
    server: Serving, method: str, path: str, body: bytes | Iterable[bytes] | None = None, **headers: str
) -> httpx.Response:
    return server.http.request(method, path, content=body, headers=headers)


def test_a_block_is_put_once_or_twice_and_read_whole_or_in_part(server: Serving) -> None:
    assert ask(server, "HEAD", PATH).status_code == ask(server, "GET", PATH).status_code == 404
    assert [ask(server, "PUT", PATH, OBJECT).status_code for _ in range(2)] == [204, 204]
    assert ask(server, "HEAD", PATH).status_code == 200
    whole, end, part = (ask(server, "GET", PATH, Range=range) for range in ("", "bytes=10-", "bytes=3-5"))
    assert (whole.status_code, whole.content) == (200, OBJECT)
    assert (end.status_code, end.content) == (206, OBJECT[10:])
    assert end.headers["Content-Range"] == f"bytes 10-{len(OBJECT) - 1}/{len(OBJECT)}"
    assert (part.status_code, part.content) == (206, OBJECT[3:6])
    assert ask(server, "GET", PATH, Range="bytes=9999-").status_code == 416


@in_turn(
    "path body",
    [
        (PATH, OBJECT[:-1]),
        (PATH, OBJECT[:60] + b"!" + OBJECT[61:]),
        (PATH, b""),
        (f"/blocks/{bytes(16).hex()}", OBJECT),  # under another name
        ("/blocks/letter.txt", OBJECT),
        ("/blocks/" + "A" * 32, OBJECT),
        ("/blocks/%2e%2e%2f" + "a" * 23, OBJECT),
    ],
)
def test_only_right_blocks_are_kept(server: Serving, tmp_path: Path, path: str, body: bytes) -> None:
    assert ask(server, "PUT", path, body).status_code in (400, 404)
    assert not list(tmp_path.iterdir())


def test_a_block_that_is_larger_than_any_of_the_model_is_refused(server: Serving) -> None:
    """Before its body comes, if it is announced."""
    most = most_bytes(server)
    assert len(OBJECT) < most < 4 << 20
    with begun(server, most + 1) as connection:
        assert answered(connection).startswith("http/1.1 413 ")
    assert ask(server, "PUT", PATH, bytes(most)).status_code == 400  # it may come, and is no block
    assert ask(server, "PUT", PATH, (bytes(1 << 16) for _ in range(most // (1 << 16) + 2))).status_code == 413


def most_bytes(server: Serving) -> int:
    return Payloads(server.engine.cache_shape).most_object_bytes


@contextmanager
def begun(server: Serving, length: int | None) -> Iterator[socket.socket]:
    """A connection that has sent the head of a PUT, and a byte of its body; None: in pieces of unknown length."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        head = f"PUT {PATH} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n{framing}\r\n\r\n"
        connection.sendall(head.encode() + (b"1\r\nx\r\n" if length is None else b"x"))
        yield connection


def answered(connection: socket.socket) -> str:
    """The answer, in lower case; the server hangs up after it."""
    return until_closed(connection).decode().lower()


@pytest.mark.parametrize("announced", [True, False])
def test_blocks_that_are_being_sent_take_a_bounded_part_of_the_memory(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    """More blocks are refused before they are read, and told when to come again."""
    monkeypatch.setattr(blocks, "_MOST_BYTES", 5 << 20)
    with sharing(tiny_path, tmp_path) as server, ExitStack() as connections:
        most = most_bytes(server)
        count = (5 << 20) // most
        assert 1 < count < 9
        held = [connections.enter_context(begun(server, most if announced else None)) for _ in range(count)]
        eventually(lambda: ask(server, "PUT", "/blocks/" + "0" * 32, iter([OBJECT])).status_code == 503)
        with begun(server, most) as connection:
            told = answered(connection)
        assert told.startswith("http/1.1 503 ")
        assert "retry-after: 1\r\n" in told
        assert ask(server, "GET", PATH).status_code == 404  # reading blocks is not in the way
        held[0].close()
        eventually(lambda: ask(server, "PUT", PATH, iter([OBJECT])).status_code == 204)


def test_blocks_that_are_being_read_take_a_bounded_part_of_the_memory(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that reads nothing takes room until it leaves, or for a limited time."""
    monkeypatch.setattr(blocks, "_MOST_BYTES", 0)  # room for one block
    with sharing(tiny_path, tmp_path) as server:
        assert ask(server, "PUT", PATH, OBJECT).status_code == 204
        (tmp_path / bytes(16).hex()).write_bytes(bytes(64 << 20))  # more than the sockets' buffers
        with unread(server, f"/blocks/{bytes(16).hex()}"):
            refused = ask(server, "GET", PATH)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert ask(server, "PUT", PATH, OBJECT).status_code == 204  # sending blocks is not affected
        eventually(lambda: ask(server, "GET", PATH).status_code == 200)
        monkeypatch.setattr(streams, "SLOW_READER_SECONDS", 0.1)
        with unread(server, f"/blocks/{bytes(16).hex()}"):
            eventually(lambda: ask(server, "GET", PATH).status_code == 200)


@contextmanager
def unread(server: Serving, path: str) -> Iterator[None]:
    """A connection whose response has begun, and is not read."""
    with socket.create_connection(("127.0.0.1", server.port), PATIENCE) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4) == b"HTTP"
        yield


def test_the_key_is_needed(server: Serving) -> None:
    for method in ("GET", "HEAD", "PUT"):
        assert (
            ask(server, method, PATH, OBJECT if method == "PUT" else None, Authorization="Bearer other").status_code
            == 401
        )


def test_nothing_is_shared_unless_a_flag_says_so(tiny_path: Path, tmp_path: Path) -> None:
    kept = {"cache_disk": "1M", "cache_disk_folder": str(tmp_path)}
    with load_tiny(tiny_path, **PLAIN, **kept) as engine, serving(engine) as server:
        assert ask(server, "GET", PATH).status_code == ask(server, "PUT", PATH, OBJECT).status_code == 404
    with pytest.raises(FlagError, match="--cache-disk"):
        read_command_line(["--share-blocks"], {})

"""A tier behind HTTP: what another machine has computed is found, and one that lies, stalls or vanishes is a miss."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from polarlm.engine.storage.tiers import remote as remote_module
from polarlm.engine.storage.tiers.remote import RemoteTier
from tests.tiers.test_engine import PARAMS, PROMPT, N, load, next_turn
from tests.tiny import make_model

NAME = bytes(range(16))
MOST = 1 << 20


class Store(ThreadingHTTPServer):
    """Keeps what is PUT. trouble: is called before each answer with the handler; True if it has answered itself."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.kept: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.trouble: Callable[[_Handler], bool] = lambda handler: False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append(("PUT", self.path, ""))
        if not self.server.trouble(self):
            self.server.kept[self.path] = content
            self.send(201)

    def _answer(self) -> None:
        self.server.asked.append((self.command, self.path, self.headers.get("Range", "")))
        if self.server.trouble(self):
            return
        content = self.server.kept.get(self.path)
        if content is None:
            self.send(404)
        elif self.headers.get("Range"):
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
            self.send(206, content[start:], {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"})
        else:
            self.send(200, content)

    def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, cut: int | None = None):
        """Answer; cut: hang up after so many bytes."""
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
        self.close_connection = self.close_connection or cut is not None


@contextmanager
def running(store: Store) -> Iterator[Store]:
    thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
        thread.join()


@pytest.fixture
def store() -> Iterator[Store]:
    with running(Store()) as store:
        yield store


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_what_is_put_is_found(store: Store) -> None:
    place = RemoteTier(store.url, MOST)
    assert not place.has(NAME)
    assert place.read(NAME) is None
    place.write(NAME, b"head", memoryview(b"payload"))
    assert place.has(NAME)
    assert place.read(NAME) == b"headpayload"
    assert {path for _, path, _ in store.asked} == {f"/blocks/{NAME.hex()}"}


def test_what_was_there_a_moment_ago_is_not_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn asks for all blocks before it. Most have just been read or written."""
    place = RemoteTier(store.url, MOST)
    place.write(NAME, b"head", memoryview(b"payload"))
    other = RemoteTier(store.url, MOST)
    assert other.has(NAME)
    del store.asked[:]
    assert place.has(NAME)
    assert other.has(NAME)
    assert not store.asked
    store.kept.clear()
    assert place.read(NAME) is None
    assert not place.has(NAME)
    monkeypatch.setattr(remote_module, "_PRESENT_SECONDS", 0.0)
    assert not other.has(NAME)


def test_an_answer_that_breaks_off_is_taken_up_again(store: Store) -> None:
    place = RemoteTier(store.url, MOST)
    place.write(NAME, b"", memoryview(bytes(range(200))))
    cuts = [50, 30]

    def cut(handler: _Handler) -> bool:
        if handler.command != "GET" or not cuts:
            return False
        start = int(handler.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        content = store.kept[handler.path]
        more = {"Content-Range": f"bytes {start}-199/200"} if start else {}
        handler.send(206 if start else 200, content[start:], more, cut=cuts.pop(0))
        return True

    store.trouble = cut
    assert place.read(NAME) == bytes(range(200))
    assert [asked for method, _, asked in store.asked if method == "GET"] == ["", "bytes=50-", "bytes=80-"]


def huge(handler: _Handler) -> bool:
    handler.send(200, b"x", {"Content-Length": str(MOST + 1)}, cut=1)
    return True


def endless(handler: _Handler) -> bool:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"1\r\nx\r\n")
    return True


def failing(handler: _Handler) -> bool:
    handler.send(500, b"oh")
    return True


def gibberish(handler: _Handler) -> bool:
    handler.wfile.write(b"what?\r\n\r\n")
    handler.close_connection = True
    return True


@pytest.mark.parametrize("trouble", [huge, endless, failing, gibberish])
def test_answers_that_cannot_be_are_errors_of_the_system(store: Store, trouble) -> None:
    store.trouble = trouble
    with pytest.raises(OSError):
        RemoteTier(store.url, MOST).read(NAME)


def test_a_connection_that_the_store_has_closed_is_opened_again(store: Store) -> None:
    place = RemoteTier(store.url, MOST)
    place.write(NAME, b"", memoryview(b"abc"))

    def close(handler: _Handler) -> bool:
        handler.close_connection = True
        return False

    store.trouble = close
    assert [place.read(NAME) for _ in range(3)] == [b"abc"] * 3


def test_the_key_is_sent(store: Store) -> None:
    keys = []
    store.trouble = lambda handler: keys.append(handler.headers.get("Authorization")) is not None
    RemoteTier(store.url, MOST, "secret").has(NAME)
    assert keys == ["Bearer secret"]


@pytest.mark.parametrize("shared", ["http", "file"])
def test_another_engine_goes_on_bit_for_bit(model: Path, store: Store, tmp_path: Path, shared: str) -> None:
    where = store.url if shared == "http" else f"file://{tmp_path / 'x'}"
    with load(model, None) as engine:
        first = engine.generate(PROMPT, PARAMS)
        expected = next_turn(engine, first)
    with load(model, None, cache_remote=where) as engine:
        engine.generate(PROMPT, PARAMS)
    with load(model, tmp_path / "disk", cache_remote=where) as engine:
        answer = next_turn(engine, first)
        assert answer.usage.cached_from == {"remote": len(PROMPT) + 12}
        assert answer.logprobs == expected.logprobs
    with load(model, tmp_path / "disk") as engine:  # what came from there is on the own disk afterwards
        assert next_turn(engine, first).usage.cached_from["disk"] >= len(PROMPT) + 12 - N


def lying(store: Store) -> Callable[[_Handler], bool]:
    """Gives every block the bytes of another one."""

    def lie(handler: _Handler) -> bool:
        others = [content for path, content in store.kept.items() if path != handler.path]
        if handler.command != "GET" or handler.path not in store.kept:
            return False
        handler.send(200, others[0])
        return True

    return lie


@pytest.mark.parametrize("how", ["lies", "vanishes"])
def test_trouble_there_is_a_miss_here(
    model: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are as without it, and the own disk goes on to work."""
    monkeypatch.setattr(remote_module, "_SECONDS", 0.2)
    with running(Store()) as store:
        with load(model, None, cache_remote=store.url) as engine:
            first = engine.generate(PROMPT, PARAMS)
        if how == "lies":
            store.trouble = lying(store)
        if how != "vanishes":
            _is_a_miss(model, tmp_path, store.url, first)
    if how == "vanishes":
        _is_a_miss(model, tmp_path, store.url, first)
    # Each of the two engines tells one sentence about reading and one about writing at most.
    told = [record.message for record in caplog.records if "remote" in record.message]
    assert len(told) <= 4
    assert all(f"blocks on remote ({store.url})" in sentence for sentence in told if "for now" in sentence)


def _is_a_miss(model: Path, folder: Path, url: str, first) -> None:
    with load(model, folder, cache_remote=url) as engine:
        again = engine.generate(PROMPT, PARAMS)
        assert again.usage.cached_tokens == 0
        assert again.logprobs == first.logprobs
    with load(model, folder, cache_remote=url) as engine:
        assert next_turn(engine, first).usage.cached_from == {"disk": len(PROMPT) + 12}

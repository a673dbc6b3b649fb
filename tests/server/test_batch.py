"""`polarlm batch`, which loads a model, or sends its lines to a server: every line gets one answer, whatever ends."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine import Engine
from polarlm.server import batch
from polarlm.server.http.openai import lines as sending
from polarlm.server.running import journal
from tests.lazily import openai
from tests.server.http_server import KEY, Serving, serving
from tests.server.lines import PATIENCE, eventually
from tests.server.process import ROOT

FLAGS = ("--device", "cpu", "--no-calibration", "--cache-type", "f16")
CHAT, RAW = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "then he ran on"}], "max_tokens": 8, "temperature": 0},
    RAW: {"prompt": "the rain", "max_tokens": 8, "temperature": 0, "ignore_eos": True},
    "/v1/embeddings": {"input": ["the rain", "he ran"]},
    "/v1/responses": {"input": "then he ran on", "max_output_tokens": 8, "temperature": 0},
}


def line(name: str, url: str = RAW, **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": BODIES[url] | more}


def written(lines: list[Any]) -> bytes:
    return b"".join((one if isinstance(one, bytes) else json.dumps(one).encode()) + b"\n" for one in lines)


def run(model: Path, requests: Path, output: Path, *more: str) -> int:
    return batch.main([str(requests), "-m", str(model), "-o", str(output), *FLAGS, *more])


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is loaded here sets no log up, which would write to what a later test has closed."""
    monkeypatch.setattr(journal, "set_up", lambda name: None)


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def send(url: str, requests: Path, output: Path, *more: str) -> int:
    return batch.main([str(requests), "-o", str(output), "--url", url, *more])


@contextmanager
def sent_meanwhile(url: str, requests: Path, output: Path) -> Iterator[list[int]]:
    """A context that ends when all lines have been sent; yields a list that then has the exit code."""
    codes = list[int]()
    thread = threading.Thread(target=lambda: codes.append(send(url, requests, output)), daemon=True)
    thread.start()
    yield codes
    thread.join(PATIENCE)


def answers_in(output: Path) -> dict[str | None, Any]:
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    assert len({one["id"] for one in lines}) == len(lines)
    return {one["custom_id"]: one for one in lines}


def count(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def without_chance(body: Any) -> Any:
    """A response without what differs each time."""
    chance = ("id", "created", "created_at", "completed_at", "usage")
    if isinstance(body, dict):
        return {name: without_chance(value) for name, value in body.items() if name not in chance}
    return [*map(without_chance, body)] if isinstance(body, list) else body


# -- with a model of its own -----------------------------------------------------------------------------------


def test_a_file_is_answered_as_a_server_answers(
    tiny_path: Path, requests: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.write_bytes(written([line("chat", CHAT), b"{", line("raw", RAW), line("wrong", max_tokens="many")]))
    assert run(tiny_path, requests, output) == 0
    assert capsys.readouterr().out == f"{output}: 2 answers, and 2 requests that failed\n"
    lines = answers_in(output)
    assert lines[None]["error"]["message"].startswith("line 2: the request is not JSON")
    assert lines["wrong"]["response"]["status_code"] == 400
    with Engine.load(tiny_path, device="cpu", calibration=False, cache_type="f16") as engine, serving(engine) as server:
        for name, url in (("chat", CHAT), ("raw", RAW)):
            assert lines[name]["response"]["body"]["choices"] == server.post(url, BODIES[url]).json()["choices"]


def test_it_goes_on_after_the_last_line_and_takes_lines_that_were_added(
    tiny_path: Path, requests: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line(str(n)) for n in range(6)]
    requests.write_bytes(written(lines))
    assert run(tiny_path, requests, output, "--parallel", "1") == 0
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:3]) + whole[3][:50])
    requests.write_bytes(written([line("new"), *lines]))
    capsys.readouterr()
    assert run(tiny_path, requests, output) == 0
    assert f"{output}: 3 lines of an earlier call; 4 requests to answer" in capsys.readouterr().err
    assert output.read_bytes().startswith(b"".join(whole[:3]))
    assert sorted(map(str, answers_in(output))) == ["0", "1", "2", "3", "4", "5", "new"]
    before = output.read_bytes()
    assert run(Path("none"), requests, output) == 0  # nothing is left, and no model is loaded
    assert output.read_bytes() == before
    requests.write_bytes(written([line(f"other{n}") for n in range(7)]))
    assert run(tiny_path, requests, output) == 0  # as many lines as it has are not the same lines
    assert len(answers_in(output)) == 14


def test_it_fails_if_every_request_did(
    tiny_path: Path, requests: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.write_bytes(b"{")
    assert run(tiny_path, requests, output) == 1
    assert capsys.readouterr().out == f"{output}: 0 answers, and 1 request that failed\n"


@pytest.mark.parametrize(
    ("requests", "output", "sentence"),
    [
        ("none.jsonl", "out.jsonl", "none.jsonl: there is no such file"),
        ("none.jsonl", None, "none.jsonl: there is no such file"),
        ("in.jsonl", "in.jsonl", "in.jsonl has lines that answer no batch: name another file"),
        ("in.jsonl", "none/out.jsonl", "none/out.jsonl: No such file or directory"),
        ("in.jsonl", "notes.txt", "notes.txt has lines that answer no batch"),
        ("in.jsonl", None, "-o: say where the answers are written"),
    ],
)
def test_a_wrong_file_is_told_before_a_model_is_loaded(
    tmp_path: Path, requests: str, output: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content := written([line("a")]))
    (tmp_path / "notes.txt").write_text("no line ends here")
    words = [str(tmp_path / requests), "-m", "none", *([] if output is None else ["-o", str(tmp_path / output)])]
    assert batch.main(words) == 2
    assert sentence in capsys.readouterr().err
    assert (tmp_path / "in.jsonl").read_bytes() == content
    assert (tmp_path / "notes.txt").read_text() == "no line ends here"


# -- by a server -----------------------------------------------------------------------------------------------


def test_a_server_answers_each_line_as_it_answers_its_request(engine: Engine, requests: Path, output: Path) -> None:
    with serving(engine, api_key=KEY) as server:
        requests.write_bytes(written([line(url, url, colour="red") for url in BODIES]))
        assert send(f"{server.url}/v1/", requests, output, "--api-key", KEY, "--parallel", "3") == 0
        lines = answers_in(output)
        assert set(lines) == set(BODIES)
        for url, body in BODIES.items():
            told = lines[url]["response"]
            assert (told["status_code"], lines[url]["error"]) == (200, None)
            assert told["body"]["warnings"] == ["colour is unknown and ignored"]
            assert without_chance(told["body"]) == without_chance(server.post(url, body | {"colour": "red"}).json())


def test_a_damaged_line_is_an_error_and_ends_nothing(server: Serving, requests: Path, output: Path) -> None:
    wrong = {
        "is not JSON": b'{"custom_id": "cut',
        "must be a JSON object": b"[1]",
        "not UTF-8": b"\xff\xfe",
        "custom_id must be a string": {**line("x"), "custom_id": 5},
        "earlier line": line("good"),
        "method must be POST": {**line("x1"), "method": "GET"},
        "url must be /v1/chat/completions": {**line("x2"), "url": "/v1/images"},
        "body must be an object": {**line("x3"), "body": "text"},
        "leave it out": line("x4", stream=True),
    }
    refused = [line("long", prompt="the " * 2000), line("field", max_tokens="many"), line("nan", temperature=math.nan)]
    deep = json.dumps(line("deep")).replace('"the rain"', "[" * 980 + "]" * 980).encode()
    requests.write_bytes(written([line("good"), *wrong.values(), b"", *refused, deep, line("last")]))
    assert send(server.url, requests, output) == 0
    told = [json.loads(text) for text in output.read_text().splitlines()]
    assert len({one["id"] for one in told}) == len(told) == 15
    completed = [one["custom_id"] for one in told if (one["response"] or {}).get("status_code") == 200]
    assert sorted(completed) == ["good", "last"]
    messages = [one["error"]["message"] for one in told if one["error"] and one["custom_id"] != "deep"]
    assert len(messages) == len(wrong)
    for number, sentence in enumerate(wrong, 2):
        (message,) = (one for one in messages if one.startswith(f"line {number}:"))
        assert sentence in message
    of_server = {one["custom_id"]: one["response"] for one in told if one["response"]}
    assert {of_server[name]["status_code"] for name in ("long", "field", "nan")} == {400}
    assert of_server["field"]["body"]["error"]["param"] == "max_tokens"


def test_a_killed_call_goes_on(server: Serving, requests: Path, output: Path) -> None:
    requests.write_bytes(written([line(str(n), max_tokens=20, seed=n, temperature=1.0) for n in range(30)]))
    words = [str(requests), "-o", str(output), "--url", server.url]
    process = subprocess.Popen([sys.executable, "-m", "polarlm", "batch", *words], cwd=ROOT)
    eventually(lambda: count(output) >= 3)
    server.gate.close()
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    server.gate.open()
    eventually(lambda: not server.driver.snapshot().active)
    before = output.read_bytes().splitlines(keepends=True)
    assert 3 <= len(before) < 30
    kept = b"".join(before[:-1])
    output.write_bytes(kept + before[-1][:-40])  # as if it had been killed while it wrote
    assert send(server.url, requests, output) == 0
    assert output.read_bytes().startswith(kept)
    assert sorted(map(int, answers_in(output))) == [*range(30)]


def test_only_one_process_writes_a_file_of_answers(
    server: Serving, requests: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.write_bytes(written([line("a")]))
    with sending.LineFiles(requests, output):
        assert send(server.url, requests, output) == 2
    assert "another process writes answers to it" in capsys.readouterr().err
    assert send(server.url, requests, output) == 0


class Moody(BaseHTTPRequestHandler):
    """Answers requests by the functions in `moods`, one after the other, and by `fine` after these."""

    moods: list[Any]

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers["Content-Length"]))
        (self.moods.pop(0) if self.moods else fine)(self)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def says(status: int, body: bytes, **headers: str) -> Any:
    def answer(handler: Moody) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def hangs_up(handler: Moody) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


fine = says(200, b"{}")


@contextmanager
def moody(*moods: Any, port: int = 0) -> Iterator[str]:
    """The URL of a server of these moods."""
    handler = type("Handler", (Moody,), {"moods": [*moods]})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_PAUSES", (0.01, 0.02))


@pytest.mark.usefixtures("hasty")
def test_a_server_that_is_away_or_busy_is_waited_for(
    requests: Path, output: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.write_bytes(written([line("a"), line("b")]))
    with moody() as url:
        pass
    closing = json.dumps({"error": {"code": "closing"}}).encode()
    moods = (
        *(says(503, b"{}", Retry_After="0"), says(503, closing), says(503, b'{"error": {"code": 503}}'), hangs_up),
        *(says(429, b"{}", Retry_After="0"), says(502, b"<html>")),
        says(503, b'{"error": {"code": "out_of_memory"}}'),  # which is an answer to its line
    )
    with sent_meanwhile(url, requests, output) as codes:
        eventually(lambda: "waiting for it, 10 minutes at most" in capsys.readouterr().err)
        with moody(*moods, port=int(url.rpartition(":")[2])):
            eventually(lambda: codes)
    assert codes == [0]
    assert sorted(one["response"]["status_code"] for one in answers_in(output).values()) == [200, 503]


@pytest.mark.parametrize(
    ("mood", "sentence"),
    [
        (hangs_up, "has answered no request for 0 minutes"),
        (says(503, b"", Retry_After="0"), "status 503, Service Unavailable"),
        (says(401, b"{}"), "status 401, Unauthorized: give its key by --api-key"),
        (says(404, b"<html>"), "status 404 and no JSON: give the URL of a server of OpenAI's API"),
        (says(200, b"<html>"), "status 200 and no JSON"),
    ],
)
@pytest.mark.usefixtures("hasty")
def test_what_no_line_can_be_answered_by_ends_the_call(
    requests: Path,
    output: Path,
    mood: Any,
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sending, "_PATIENCE", 0.0)
    requests.write_bytes(written([line(str(n)) for n in range(4)]))
    with moody(*[mood] * 20) as url:
        assert send(url, requests, output) == 2
    assert sentence in capsys.readouterr().err
    assert output.read_bytes() == b""


def test_the_key_is_taken_from_the_environment(
    engine: Engine, requests: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests.write_bytes(written([line("a")]))
    monkeypatch.setenv("POLARLM_API_KEY", KEY)
    with serving(engine, api_key=KEY) as server:
        assert send(server.url, requests, output) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--url", "localhost:8080"), "write an address such as http://127.0.0.1:8080"),
        (("--url", "http://localhost:99999"), "write an address such as http://127.0.0.1:8080"),
        (("--url", "http://127.0.0.1:1", "-m", "x", "-c", "99"), "--weights, --ctx-size: a server that --url names"),
        (("--api-key", "secret"), "--api-key is the key of a server: give its --url as well"),
    ],
)
def test_flags_that_say_nothing_are_refused(
    requests: Path, output: Path, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    requests.write_bytes(written([line("a")]))
    assert batch.main([str(requests), "-o", str(output), *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.slow
def test_another_request_waits_for_no_line(tiny_path: Path, requests: Path, output: Path) -> None:
    """Where one request is computed at a time, it interrupts the answer of a line, which has no place in the queue."""
    settings: dict[str, Any] = {"cache_type": "f16", "calibration": False, "block_size": 16, "parallel": 1}
    with (
        Engine.load(tiny_path, device="cpu", **settings) as engine,
        serving(engine, max_queue=0) as server,
    ):
        long = {"max_tokens": 160, "temperature": 1.0, "seed": 5}
        requests.write_bytes(written([line(str(n), **long) for n in range(2)]))
        with sent_meanwhile(server.url, requests, output):
            eventually(lambda: server.engine.status().running)
            units = list[int]()
            work = engine.work
            engine.work = lambda: units.append(1) or work()  # type: ignore[method-assign,func-returns-value]
            assert server.post(RAW, BODIES[RAW]).json()["usage"]["completion_tokens"] == 8
            ours = len(units)
            assert count(output) == 0
            assert ours < 120  # of the 160 steps of the answer that was under way, and as many of the next one
        texts = {one["response"]["body"]["choices"][0]["text"] for one in answers_in(output).values()}
        assert texts == {server.post(RAW, BODIES[RAW] | long).json()["choices"][0]["text"]}


@pytest.mark.slow
def test_a_line_may_wait_longer_than_other_requests(tiny: Engine, requests: Path, output: Path) -> None:
    """Slow: it waits for more than a second to pass."""
    requests.write_bytes(written([line("a")]))
    with serving(tiny, request_seconds=1) as server:
        server.gate.close()
        with sent_meanwhile(server.url, requests, output) as codes:
            eventually(lambda: server.busy)
            threading.Event().wait(1.5)
            server.gate.open()
    assert codes == [0]


def test_openais_endpoints_of_batches_say_what_to_take(server: Serving) -> None:
    client = server.openai
    for call in (
        lambda: client.files.create(file=b"{}", purpose="batch"),
        lambda: client.files.list(),
        lambda: client.batches.create(input_file_id="file-1", endpoint=RAW, completion_window="24h"),
        lambda: client.batches.cancel("batch_1"),
    ):
        with pytest.raises(openai.APIStatusError, match="polarlm batch FILE --url URL") as raised:
            call()
        assert raised.value.status_code == 410

"""`python -m server`: its command line, and what becomes of a real process that things are done to."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import EngineConfig
from polarlm.server.__main__ import main
from polarlm.server.config import KEY_VARIABLE, ServerConfig, read_command_line
from polarlm.server.running.listening import tcp_socket, unix_socket
from tests.server.lines import PATIENCE, Client, eventually
from tests.server.process import SOME, Process
from tests.server.socket.test_socket import GREEDY, LONG, fuzzed

# -- the command line ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--host", "0.0.0.0"], "host", "0.0.0.0"),
        (["--port", "0"], "port", 0),
        (["--socket-port", "8081"], "socket_port", 8081),
        (["--unix", "/tmp/s"], "unix", "/tmp/s"),
        (["--api-key", "sk-1"], "api_key", "sk-1"),
        (["--allowed-host", "a.lan", "--allowed-host", "::1"], "allowed_host", ("a.lan", "::1")),
        (["--cors-origin", "*"], "cors_origin", ("*",)),
        (["--cors-origin", "https://a", "--cors-origin", "http://b:1"], "cors_origin", ("https://a", "http://b:1")),
        (["--max-body", "1000"], "max_body", 1000),
        (["--max-connections", "3"], "max_connections", 3),
        (["--max-queue", "0"], "max_queue", 0),
        (["--max-tokens", "64"], "max_tokens", 64),
        (["--request-seconds", "5"], "request_seconds", 5),
        (["--max-sessions-size", "2G"], "max_sessions_size", "2G"),
        (["--max-conversations-size", "2G"], "max_conversations_size", "2G"),
        (["--log-prompts"], "log_prompts", True),
    ],
)
def test_flags(words: list[str], field: str, value: Any) -> None:
    engine, server = read_command_line([*words, "--ctx-size", "512"], {})
    assert server == ServerConfig(**{field: value})
    assert engine == EngineConfig(ctx_size=512)


def test_the_key_may_come_from_the_environment() -> None:
    assert read_command_line([], {KEY_VARIABLE: "sk-1"})[1].api_key == "sk-1"
    assert read_command_line(["--api-key", "sk-2"], {KEY_VARIABLE: "sk-1"})[1].api_key == "sk-2"
    with pytest.raises(FlagError, match=KEY_VARIABLE):
        read_command_line([], {KEY_VARIABLE: ""})


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "65536"],
        ["--port", "-1"],
        ["--port", "x"],
        ["--socket-port", "65536"],
        ["--unix", ""],
        ["--host", ""],
        ["--api-key", ""],
        ["--api-key", "with space"],
        ["--api-key", "é"],
        ["--allowed-host", "a.lan:8080"],
        ["--allowed-host", "cafe:8080"],  # the letters of an IPv6 address, which it is not
        ["--allowed-host", ""],
        ["--cors-origin", "chat.example.com"],
        ["--cors-origin", "https://chat.example.com/"],
        ["--cors-origin", "https://Chat.example.com"],  # browsers never send it
        ["--max-body", "0"],
        ["--max-queue", "-1"],
        ["--max-connections", "0"],
        ["--max-tokens", "0"],
        ["--request-seconds", "0"],
        ["--kv-memory", "much"],
        ["--max-sessions-size", "much"],
        ["--ctx-size", "-1"],
        ["--no-such-flag"],
        ["--socket-port", "1", "--unix", "/tmp/s"],
        ["--weights", "/no/such/model"],
    ],
)
def test_a_wrong_flag_is_one_sentence(words: list[str], capsys) -> None:
    anywhere = () if "--port" in words else ("--port", "0")
    nothing = () if "--weights" in words else ("--weights", "/no/such/model")  # a flag that is taken serves nothing
    assert main([*words, *anywhere, *nothing]) == 2
    told = capsys.readouterr()
    *notes, sentence = told.err.splitlines()
    assert sentence.startswith("error: ")
    assert words[0] in sentence or words[-1] in sentence
    assert "Traceback" not in "".join(notes)
    assert told.out == ""


def test_help(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--unix", "--socket-port", "--api-key", "--weights", "--parallel"))


def test_version(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("polarlm ")


def test_a_port_in_use_is_told_before_a_model_is_loaded(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--weights", "/no/such/model", "--port", port]) == 1
        assert main(["--weights", "/no/such/model", "--port", "0", "--socket-port", port]) == 1
    lines = capsys.readouterr().err.splitlines()
    sentence = f"error: Port {port} of 127.0.0.1 is in use: choose another, or {{}} 0 for a free one"
    assert lines == [sentence.format("--port"), sentence.format("--socket-port")]


def test_the_addresses_of_a_server_that_still_loads_are_in_use(tmp_path: Path, capsys) -> None:
    """Who has bound a socket has not accepted a connection for a long time: a model is large."""
    path = str(tmp_path / "socket")
    with tcp_socket("127.0.0.1", 0) as bound, unix_socket(path):
        port = str(bound.getsockname()[1])
        assert main(["--weights", "/no/such/model", "--port", port]) == 1
        assert main(["--weights", "/no/such/model", "--port", "0", "--unix", path]) == 1
        for address in (bound.getsockname(), path):
            Client(address).close()  # what connects waits to be served
    first, second = capsys.readouterr().err.splitlines()
    assert f"Port {port} of 127.0.0.1 is in use: choose another, or --port 0 for a free one" in first
    assert f"--unix {path}: another server listens there" in second


def test_packages_that_are_missing(capsys, monkeypatch) -> None:
    for name in ("polarlm.server.serving", "polarlm.server.http.uvicorn_server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["--weights", "/no/such/model"]) == 1
    assert "pip install 'polarlm[serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["--host", "127.0.0.1"], False),
        (["--host", "localhost"], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "sk-1"], False),
    ],
)
def test_a_server_without_a_key_warns_unless_it_is_local(words: list[str], warned: bool, capsys, monkeypatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    main([*words, "--port", "0", "--weights", "/no/such/model"])
    assert ("warning" in capsys.readouterr().err) == warned


# -- open files ------------------------------------------------------------------------------------------------

FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
"""


@pytest.mark.slow
def test_as_many_files_are_opened_as_connections_need(tiny_path: Path, tmp_path: Path) -> None:
    """Where the system's soft limit is lower than the hard one."""
    pytest.importorskip("resource", reason="there are no such limits on this system")
    prelude = FEW_FILES.format(soft=100, hard=2000)
    with Process(tiny_path, tmp_path, prelude=prelude) as process, ExitStack() as ends:
        for _ in range(150):
            ends.enter_context(socket.create_connection(process.address, timeout=PATIENCE))
        assert "ok" in process.get("/health")
        assert process.log()[:-1] == []


@pytest.mark.slow
def test_a_server_out_of_files_says_so_once_a_second(tiny_path: Path, tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="there are no such limits on this system")
    prelude = FEW_FILES.format(soft=100, hard=100)
    with Process(tiny_path, tmp_path, prelude=prelude) as process:
        begun = time.monotonic()
        with ExitStack() as ends:
            for _ in range(150):
                ends.enter_context(socket.create_connection(process.address, timeout=PATIENCE))
            eventually(lambda: len(complaints(process)) >= 2)
            assert len(complaints(process)) <= time.monotonic() - begun + 1
        assert "ok" in process.get("/health")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        told = process.errors.read_text()
    assert "Traceback" not in told
    assert "--max-connections" in told.splitlines()[0]


def complaints(process: Process) -> list[str]:
    """What was logged about connections that could not be accepted."""
    return [line["message"] for line in process.log() if "cannot be accepted" in line.get("message", "")]


# -- a process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def troubled(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with slow steps that several tests do bad things to; after each it is idle, and still answers."""
    with Process(tiny_path, tmp_path_factory.mktemp("server"), "--socket-port", "0", troubled=True) as process:
        yield process
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.fixture
def victim(troubled: Process) -> Iterator[Process]:
    yield troubled
    eventually(troubled.is_idle)
    with troubled.client() as client:
        assert client.ask(id=1, prompt="a", max_tokens=3, **GREEDY)[1]["done"]


@pytest.mark.slow
def test_a_model_without_a_template_says_so_at_the_start(victim: Process) -> None:
    assert re.search(r"^note: \S+ has no chat template: .*", victim.errors.read_text(), re.MULTILINE)


@pytest.mark.slow
def test_clients_that_are_gone(victim: Process) -> None:
    def cancelled() -> float:
        return victim.metric('requests_total{outcome="cancelled"}')

    before = cancelled()
    with victim.held() as let:
        let(SOME)
        clients = [victim.client() for _ in range(12)]
        for client in clients:
            client.send(id=1, **LONG)
        clients[0].receive()
        for client in clients:
            client.close()
        eventually(lambda: cancelled() == before + 12)


def test_garbage(victim: Process) -> None:
    rng = random.Random(0)
    for _ in range(20):
        with victim.client() as client:
            client.send(id="first", prompt="a", max_tokens=1)
            client.send_raw(b"".join(fuzzed(rng) + b"\n" for _ in range(50)))


def test_half_open_connections(victim: Process) -> None:
    clients = [victim.client() for _ in range(20)]
    for client in clients:
        client.send_raw(b'{"id": 1,')
    with victim.client() as client:
        assert client.ask(id=1, prompt="a", max_tokens=3, **GREEDY)[1]["done"]
    for client in clients:
        client.close()


def test_an_exception_in_a_step(victim: Process) -> None:
    with victim.client() as client:
        with victim.held() as let:
            let(SOME)
            client.send(id=1, **LONG)
            client.receive()
            victim.trouble.touch()
        assert client.rest_of(1)[1]["error"]["code"] == "internal"
        assert not victim.trouble.exists()
    assert any("secret detail" in line.get("traceback", "") for line in victim.log())


def loaded(process: Process) -> list[Any]:
    """Clients with requests that run on a held server, each with one more that the server has in its queue."""
    clients = [process.client() for _ in range(4)]
    for client in clients:
        client.send(id="runs", **{**LONG, "max_tokens": 80})
    for client in clients:
        assert client.receive()["id"] == "runs"
        client.send(id="waits", **{**LONG, "max_tokens": 20})
        client.send_raw(b"?\n")  # what it answers to this comes when it has the request
        while client.receive()["id"] is not None:
            pass
    return clients


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load(tiny_path: Path, tmp_path: Path, number: signal.Signals) -> None:
    with Process(tiny_path, tmp_path, "--socket-port", "0", "--parallel", "4", troubled=True) as process:
        with process.held() as let:
            let(SOME)
            clients = loaded(process)
            process.signal(number)
        ends: list[dict[str, str]] = []
        for client in clients:
            messages = list(client.rest())
            ends.append({m["id"]: m["finish_reason"] for m in messages if m.get("done")})
            client.close()
        assert ends == [{"runs": "length", "waits": "length"}] * len(clients)
        assert process.wait() == 0


def running(client: Client, let: Callable[[int], None]) -> None:
    """Send a request that runs, and ends when the server is no longer held."""
    let(SOME)
    client.send(id="runs", **{**LONG, "max_tokens": 80})
    client.receive()


def until_closing(client: Client) -> None:
    """Send requests until one is refused because the server is about to end."""
    for number in itertools.count():
        client.send(id=number, prompt="a", max_tokens=1)
        client.send_raw(b"?\n")  # what it answers to this comes when it has the request
        while (message := client.receive())["id"] is not None:
            if message.get("error", {}).get("code") == "closing":
                return


@pytest.mark.slow
def test_no_new_requests_after_a_signal(tiny_path: Path, tmp_path: Path) -> None:
    with Process(tiny_path, tmp_path, "--socket-port", "0", troubled=True) as process, process.client() as client:
        with process.held() as let:
            running(client, let)
            process.signal(signal.SIGTERM)
            until_closing(client)
            with pytest.raises(OSError):
                process.client()
        assert client.rest_of("runs")[1]["finish_reason"] == "length"
        assert process.wait() == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tiny_path: Path, tmp_path: Path) -> None:
    with (
        Process(tiny_path, tmp_path, "--socket-port", "0", troubled=True) as process,
        process.client() as client,
        process.held() as let,
    ):
        running(client, let)
        process.signal(signal.SIGTERM)
        until_closing(client)
        process.signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_both_ways_to_speak_to_it_and_its_log(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Process(tiny_path, tmp_path, "--unix", str(path)) as process:
        assert process.line.startswith("Listening at http://127.0.0.1:")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with process.client() as client:
            text, last = client.ask(id=1, prompt="a secret", max_tokens=9, **GREEDY)
        body = json.dumps({"model": "any", "prompt": "a secret", "max_tokens": 9, **GREEDY}).encode()
        request = urllib.request.Request(process.url + "/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            answer = json.load(response)
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (text, 9)
        assert last["usage"]["completion_tokens"] == 9
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not path.exists()
        assert "secret" not in process.errors.read_text()
        lines = {line["route"]: line for line in process.log()}
        assert lines.keys() == {"socket", "POST /v1/completions"}
        assert [(line["outcome"], line["completion_tokens"]) for line in lines.values()] == [("length", 9)] * 2
        assert lines["POST /v1/completions"]["status"] == 200
        assert all(line.keys() >= {"time", "client", "seconds", "prompt_tokens"} for line in lines.values())


@pytest.mark.slow
def test_the_key_of_the_environment_is_asked_for(tiny_path: Path, tmp_path: Path) -> None:
    flags = ("--socket-port", "0", "--log-prompts")
    with Process(tiny_path, tmp_path, *flags, **{KEY_VARIABLE: "sk-1"}) as process:
        with process.client() as client:
            client.send(id=1, prompt="a")
            assert client.receive()["error"]["code"] == "unauthorized"
        with process.client() as client:
            assert client.ask(id=1, prompt="a prompt", max_tokens=1, api_key="sk-1")[1]["done"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            process.get("/metrics")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "a prompt" in [line.get("prompt") for line in process.log()]

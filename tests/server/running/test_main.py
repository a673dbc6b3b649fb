"""`python -m server`: its command line, and what becomes of a real process that things are done to."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from polarlm.engine.cli.flags import FlagError
from polarlm.engine.config import EngineConfig
from polarlm.server.__main__ import main
from polarlm.server.config import KEY_VARIABLE, ServerConfig, read_command_line
from polarlm.server.running.listening import tcp_socket, unix_socket
from tests.server.lines import PATIENCE, Client, eventually
from tests.server.process import SOME, Process
from tests.server.socket.test_socket import GREEDY, LONG

# -- the command line ------------------------------------------------------------------------------------------

# Each is wrong by its first word or its last.
WRONG = [
    "--port 65536",
    "--port -1",
    "--socket-port 65536",
    "--unix ",
    "--host ",
    "--api-key ",
    "--api-key é",
    "--allowed-host a.lan:8080",
    "--allowed-host cafe:8080",  # the letters of an IPv6 address, which it is not
    "--allowed-host ",
    "--cors-origin chat.example.com",
    "--cors-origin https://chat.example.com/",
    "--cors-origin https://Chat.example.com",  # browsers never send it
    "--max-body 0",
    "--max-queue -1",
    "--max-connections 0",
    "--max-tokens 0",
    "--request-seconds 0",
    "--max-sessions-size much",
    "--no-such-flag",
    "--socket-port 1 --unix /tmp/s",
    "--weights /no/such/model",
]


def test_flags_become_settings() -> None:
    words = "--host 0.0.0.0 --allowed-host a.lan --allowed-host ::1 --max-queue 0 --max-sessions-size 2G --log-prompts"
    engine, server = read_command_line([*words.split(), "--no-parse-special", "--ctx-size", "512"], {})
    assert engine == EngineConfig(ctx_size=512)
    assert server == ServerConfig(
        host="0.0.0.0",
        allowed_host=("a.lan", "::1"),
        max_queue=0,
        max_sessions_size="2G",
        log_prompts=True,
        parse_special=False,
    )


def test_a_wrong_flag_is_one_sentence(capsys) -> None:
    for line in WRONG:
        words = line.split(" ")
        anywhere = () if "--port" in words else ("--port", "0")
        nothing = () if "--weights" in words else ("--weights", "/no/such/model")  # a flag that is taken serves nothing
        assert main([*words, *anywhere, *nothing]) == 2, line
        told = capsys.readouterr()
        *notes, sentence = told.err.splitlines()
        assert sentence.startswith("error: "), line
        assert words[0] in sentence or words[-1] in sentence, line
        assert "Traceback" not in "".join(notes), line
        assert told.out == "", line


def test_help_and_version(capsys) -> None:
    for flag, shown in (("--help", ("--unix", "--socket-port", "--weights")), ("--version", ("polarlm ",))):
        with pytest.raises(SystemExit) as caught:
            main([flag])
        assert caught.value.code == 0
        told = capsys.readouterr().out
        assert all(words in told for words in shown)


def test_a_server_without_a_key_warns_unless_it_is_local(capsys, monkeypatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    for words, warned in (
        ("--host localhost", False),
        ("--host 0.0.0.0", True),
        ("--host 0.0.0.0 --api-key sk-1", False),
    ):
        main([*words.split(), "--port", "0", "--weights", "/no/such/model"])
        assert ("warning" in capsys.readouterr().err) == warned, words


def test_the_key_may_come_from_the_environment(capsys, monkeypatch) -> None:
    assert read_command_line([], {KEY_VARIABLE: "sk-1"})[1].api_key == "sk-1"
    assert read_command_line(["--api-key", "sk-2"], {KEY_VARIABLE: "sk-1"})[1].api_key == "sk-2"
    monkeypatch.setenv(KEY_VARIABLE, "")
    assert not read_command_line([])[1].keys.are_required
    main(["--port", "0", "--weights", "/no/such/model"])
    assert f"note: {KEY_VARIABLE} is empty, which is no key" in capsys.readouterr().err
    with pytest.raises(FlagError, match="--api-key"):
        read_command_line(["--api-key", ""])


def test_the_addresses_of_a_server_that_still_loads_are_in_use(tmp_path: Path, capsys) -> None:
    """Who has bound a socket has not accepted a connection for a long time: a model is large."""
    path = str(tmp_path / "socket")
    with tcp_socket("127.0.0.1", 0) as bound, unix_socket(path):
        port = str(bound.getsockname()[1])
        for words in (["--port", port], ["--port", "0", "--socket-port", port], ["--port", "0", "--unix", path]):
            assert main(["--weights", "/no/such/model", *words]) == 1
        for address in (bound.getsockname(), path):
            Client(address).close()  # what connects waits to be served
    *ports, unix = capsys.readouterr().err.splitlines()
    sentence = f"error: Port {port} of 127.0.0.1 is in use: choose another, or {{}} 0 for a free one"
    assert ports == [sentence.format("--port"), sentence.format("--socket-port")]
    assert f"--unix {path}: another server listens there" in unix


def test_packages_that_are_missing(capsys, monkeypatch) -> None:
    for name in ("polarlm.server.serving", "polarlm.server.http.uvicorn_server"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["--weights", "/no/such/model"]) == 1
    assert "pip install 'polarlm[serve]'" in capsys.readouterr().err


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


def until_closing(client: Client) -> None:
    """Send requests until one is refused because the server is about to end."""
    for number in itertools.count():
        client.send(id=number, prompt="a", max_tokens=1)
        client.send_raw(b"?\n")  # what it answers to this comes when it has the request
        while (message := client.receive())["id"] is not None:
            if message.get("error", {}).get("code") == "closing":
                return


@contextmanager
def about_to_end(model: Path, folder: Path) -> Iterator[tuple[Process, Client, Callable[[int], None]]]:
    """A server that has got a signal and lets an answer end, its client, and a function that lets so many steps run."""
    with (
        Process(model, folder, "--socket-port", "0", troubled=True) as process,
        process.client() as client,
        process.held() as let,
    ):
        let(SOME)
        client.send(id="runs", **{**LONG, "max_tokens": 80})
        client.receive()
        process.signal(signal.SIGTERM)
        until_closing(client)
        yield process, client, let


@pytest.mark.slow
def test_while_answers_end_monitors_and_clients_learn_that_it_closes(tiny_path: Path, tmp_path: Path) -> None:
    """Over new connections, which a balancer opens to look."""
    with about_to_end(tiny_path, tmp_path) as (process, client, let):
        for path in ("/health", "/ping"):
            assert process.ask(path, "GET") == (503, {"status": "closing"})
        status, answer = process.ask("/v1/completions", prompt="a", max_tokens=1)
        assert (status, answer["error"]["code"]) == (503, "closing")
        with process.client() as another:
            assert another.ask(id=1, prompt="a")[1]["error"]["code"] == "closing"
        let(1000)
        while not (last := client.receive()).get("done"):
            pass
        assert last["finish_reason"] == "length"
        assert process.wait() == 0


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tiny_path: Path, tmp_path: Path) -> None:
    with about_to_end(tiny_path, tmp_path) as (process, *_):
        process.signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM


@pytest.mark.slow
def test_both_ways_to_speak_to_it_and_its_log(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Process(tiny_path, tmp_path, "--unix", str(path), "--alias", "house") as process:
        assert process.line.startswith("Listening at http://127.0.0.1:")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with process.client() as client:
            text, last = client.ask(id=1, prompt="a secret", max_tokens=9, **GREEDY)
        answer = process.post("/v1/completions", model="any", prompt="a secret", max_tokens=9, **GREEDY)
        assert answer["model"] == "house"
        assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (text, 9)
        assert last["usage"]["completion_tokens"] == 9
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not path.exists()
        errors = process.errors.read_text()
        assert "secret" not in errors
        assert re.search(r"^note: \S+ has no chat template: .*", errors, re.MULTILINE)
        lines = {line["route"]: line for line in process.log()}
        assert lines.keys() == {"socket", "POST /v1/completions"}
        assert [(line["outcome"], line["completion_tokens"]) for line in lines.values()] == [("length", 9)] * 2
        assert lines["POST /v1/completions"]["status"] == 200
        assert all(line.keys() >= {"time", "client", "seconds", "prompt_tokens"} for line in lines.values())
        assert not [name for line in lines.values() for name in line if name.startswith("_")]

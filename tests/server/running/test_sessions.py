"""Clients of a real server save and load sessions by name: they outlive it, and nothing that is wrong ends it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarlm.engine import EngineError
from polarlm.server.reading.values import BadRequest
from polarlm.server.running.sessions import SessionFolder, read_name
from tests.server.lines import PATIENCE, eventually
from tests.server.process import SMALL_BLOCKS, Process
from tests.small_disk import small_disk

PRELUDE = SMALL_BLOCKS.format(kept=4)
USER, AGAIN = ({"role": "user", "content": content} for content in ("the end", "and then"))
GREEDY = {"temperature": 0, "max_tokens": 3}

# A session is written once the file named in GO is there.
WAITING = """
import os, time
from polarlm.engine.storage import files
write = files.write
def waiting(*arguments):
    open(os.environ["GO"] + ".asked", "w").close()
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)
    write(*arguments)
files.write = waiting
"""


def start(model: Path, folder: Path, *flags: str, prelude: str = "", **environment: str) -> Process:
    flags = ("--socket-port", "0", "--sessions", str(folder / "sessions"), *flags)
    return Process(model, folder, *flags, prelude=PRELUDE + prelude, **environment)


@pytest.fixture(scope="module")
def shared(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("server")
    with start(tiny_path, folder, "--max-sessions-size", "10000") as process:
        process.sessions = folder / "sessions"
        yield process
        process.signal(signal.SIGTERM)
        assert process.wait() == 0


@pytest.fixture
def server(shared: Process) -> Iterator[Process]:
    """After every test the server answers, nothing is computed, and every block is free."""
    yield shared
    assert shared.post("/v1/completions", prompt="a", **GREEDY)
    eventually(shared.is_idle)
    blocks, free = shared.blocks()
    assert free == blocks
    for file in shared.sessions.iterdir():
        file.unlink()


def turn(process: Process, messages: list[dict[str, str]], **params: Any) -> tuple[str, dict[str, Any]]:
    answer = process.post("/v1/chat/completions", messages=messages, **{**GREEDY, **params})
    return answer["choices"][0]["message"]["content"], answer["usage"]


def saved(process: Process, name: str = "talk") -> Path:
    turn(process, [USER])
    assert process.ask("/sessions/save", name=name, messages=[USER])[0] == 200
    return process.sessions / f"{name}.session"


def save_that_waits(process: Process, go: Path) -> tuple[threading.Thread, list[Any]]:
    """A save under way that does not get to write before there is a file at `go`; its answer will be in the list."""
    told: list[Any] = []

    def save() -> None:
        with suppress(OSError):  # the server may be killed meanwhile
            told.append(process.ask("/sessions/save", name="talk", messages=[USER]))

    asking = threading.Thread(target=save)
    asking.start()
    eventually(lambda: Path(f"{go}.asked").exists())
    return asking, told


def message(status_and_body: tuple[int, dict[str, Any]], status: int, code: str) -> str:
    assert status_and_body[0] == status, status_and_body
    error = status_and_body[1]["error"]
    assert error["code"] == code
    return error["message"]


# -- sessions go on --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_socket_saves_and_loads(server: Process) -> None:
    prompt = "the end and then the end"
    with server.client() as client:
        _, last = client.ask(id=1, prompt=prompt, temperature=0, max_tokens=5)
        count = last["usage"]["prompt_tokens"]
        assert client.ask(id=2, save="talk", prompt=prompt) == ("", {"id": 2, "done": True, "tokens": count})
        assert client.ask(id="x", load="talk") == ("", {"id": "x", "done": True, "tokens": count})
        for asked, field in (
            ({"save": "../x", "prompt": "a"}, "save"),
            ({"load": 7}, "load"),
            ({"save": "talk"}, "messages"),
            ({"save": "talk", "load": "talk", "prompt": "a"}, "load"),
        ):
            assert client.ask(id=3, **asked)[1]["error"]["field"] == field
        assert client.ask(id=4, load="none")[1]["error"]["code"] == "unknown_session"


def test_a_session_of_a_salt_is_loaded_with_it(server: Process) -> None:
    """Over HTTP and the socket."""
    prompt = "hens then ate the tea"
    _, first = server.ask("/v1/completions", prompt=prompt, cache_salt="A", **GREEDY)
    count = first["usage"]["prompt_tokens"]
    assert server.ask("/sessions/save", name="talk", prompt=prompt, cache_salt="A")[1]["tokens"] == count
    with server.client() as client:
        for other in ({}, {"cache_salt": "B"}):
            assert "talk" in message(server.ask("/sessions/load", name="talk", **other), 422, "session")
            assert client.ask(id=1, load="talk", **other)[1]["error"]["code"] == "session"
        assert server.ask("/sessions/load", name="talk", cache_salt="A")[1]["tokens"] == count
        assert client.ask(id=2, load="talk", cache_salt="A")[1]["tokens"] == count
    _, unsalted = server.ask("/v1/completions", prompt=prompt, **GREEDY)
    assert unsalted["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0) == 0
    assert "A" not in server.ask("/sessions", "GET")[1]["sessions"][0].values()


def test_sessions_are_listed_and_removed(server: Process) -> None:
    assert server.ask("/sessions", "GET") == (200, {"sessions": []})
    files = [saved(server, name) for name in ("b", "A.1")]
    (server.sessions / "other.txt").write_text("not a session")
    _, told = server.ask("/sessions", "GET")
    assert [session["name"] for session in told["sessions"]] == ["A.1", "b"]
    for session, file in zip(told["sessions"], files[::-1], strict=True):
        assert session["bytes"] == file.stat().st_size
        assert session["seconds"] == int(file.stat().st_mtime)
        assert file.stat().st_mode & 0o077 == 0
    assert server.ask("/sessions/b", "DELETE") == (204, {})
    assert not files[0].exists()
    removed = removals(server)
    assert "b" in message(server.ask("/sessions/b", "DELETE"), 404, "unknown_session")
    assert removals(server) == removed


def removals(server: Process) -> list[str]:
    """The line of /metrics that counts removed sessions."""
    return re.findall(r'(?m)^polarlm_requests_total\{outcome="removed"\} .*', server.get("/metrics"))


# -- what is wrong with a request ------------------------------------------------------------------------------------


@given(st.text(st.sampled_from("aZ0._-/\\ \0é\n"), max_size=8))
def test_a_name_is_refused_or_a_file_in_the_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "names"
    try:
        file = Path(SessionFolder(str(folder), 1 << 30).file(read_name("name", name)))
    except BadRequest:
        return
    assert file.parent == folder.resolve()
    assert not file.name.startswith(".")


def test_there_has_to_be_something_to_save_and_to_load(server: Process) -> None:
    nothing = server.ask("/sessions/save", name="talk", prompt="nobody has asked this")
    assert "nothing to save" in message(nothing, 422, "session")
    assert "talk" in message(server.ask("/sessions/load", name="talk"), 404, "unknown_session")
    status, told = server.ask("/sessions/save", name="talk")
    assert (status, told["error"]["param"]) == (400, "messages")
    assert os.listdir(server.sessions) == []


def test_a_folder_is_made_for_its_owner_alone_or_refused_with_a_sentence(tmp_path: Path) -> None:
    SessionFolder(str(tmp_path / "a" / "b"), 1 << 30)
    (tmp_path / "a" / "b" / ".unfinished-ab12_xyz").touch()  # of a save that was killed
    SessionFolder(str(tmp_path / "a" / "b"), 1 << 30)
    assert not os.listdir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    (tmp_path / "file").write_text("")
    for folder, why in (
        (f"{tmp_path}/file", "File exists"),
        (f"{tmp_path}/file/b", "Not a dir"),
        ("~nobody-here/x", ""),
    ):
        with pytest.raises(EngineError, match=f"--sessions {folder}: {why}.*; name a folder that is there"):
            SessionFolder(folder, 1 << 30)


def test_files_that_are_no_sessions_are_neither_listed_nor_removed_nor_counted(tmp_path: Path, tiny_path: Path) -> None:
    """The folder may have something else, such as a model."""
    (tmp_path / "model.session").write_bytes((tiny_path / "model.safetensors").read_bytes())
    (tmp_path / "letter.session").write_text("Dear Ada,")
    (tmp_path / "folder.session").mkdir()
    folder = SessionFolder(str(tmp_path), 1)
    assert folder.all() == []
    folder.limit("talk")(0, 1)
    for name in ("model", "letter", "folder"):
        with pytest.raises(EngineError, match=f"{name} cannot be removed") as raised:
            folder.remove(name)
        assert raised.value.code == "storage"
    assert len(os.listdir(tmp_path)) == 3


# -- faults ----------------------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_session_and_the_server(server: Process) -> None:
    size = saved(server).stat().st_size
    with small_disk(server.sessions, size * 3 // 2):
        file = saved(server)
        before = file.read_bytes()
        turn(server, [USER, AGAIN])
        for _ in range(3):
            full = message(server.ask("/sessions/save", name="talk", messages=[USER, AGAIN]), 507, "storage")
            assert "No space left on device" in full
            assert str(server.sessions) not in full
            assert file.read_bytes() == before
            assert os.listdir(server.sessions) == [file.name]
        with server.client() as client:
            client.send(id=1, save="other", messages=[USER, AGAIN])
            assert client.rest_of(1)[1]["error"]["code"] == "storage"
        assert server.ask("/sessions/load", name="talk")[0] == 200


def test_sessions_take_no_more_of_the_disk_than_the_limit(server: Process) -> None:
    """What has the name is replaced, and does not count."""
    file, _ = (saved(server, name) for name in ("other", "talk"))
    before, long = file.read_bytes(), [{"role": "user", "content": "the end " * 20}]
    turn(server, long)
    for _ in range(2):
        refused = message(server.ask("/sessions/save", name="other", messages=long), 507, "storage")
        assert "--max-sessions-size" in refused
    assert file.read_bytes() == before
    assert server.ask("/sessions/talk", "DELETE")[0] == 204
    for _ in range(2):
        assert server.ask("/sessions/save", name="other", messages=long)[0] == 200
    assert os.listdir(server.sessions) == [file.name]


def test_a_corrupted_session_is_refused_and_the_server_lives_on(server: Process) -> None:
    """All damages that there are: tests/test_sessions.py."""
    file = saved(server)
    content = file.read_bytes()
    for data in (content[: len(content) // 2], b"", content[:99] + bytes([content[99] ^ 1]) + content[100:]):
        file.write_bytes(data)
        told = message(server.ask("/sessions/load", name="talk"), 422, "session")
        assert "talk" in told
        assert str(server.sessions) not in told
        with server.client() as client:
            assert client.ask(id=1, load="talk")[1]["error"]["code"] == "session"
    file.write_bytes(content)
    assert server.ask("/sessions/load", name="talk")[0] == 200


@pytest.mark.slow
def test_a_session_that_is_being_saved_is_saved_before_the_server_ends(tiny_path: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with start(tiny_path, tmp_path, prelude=WAITING, GO=str(go)) as process:
        turn(process, [USER])
        saving, told = save_that_waits(process, go)
        assert turn(process, [AGAIN])[1]["completion_tokens"] == 3  # nobody waits for the disk
        process.signal(signal.SIGTERM)
        go.touch()
        saving.join(PATIENCE)
        assert told[0][0] == 200
        assert process.wait() == 0
    assert (tmp_path / "sessions" / "talk.session").stat().st_size > 0


@pytest.mark.slow
def test_a_disk_that_hangs_holds_up_sessions_alone(tiny_path: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with start(tiny_path, tmp_path, "--request-seconds", "10", prelude=WAITING, GO=str(go)) as process:
        turn(process, [USER])
        asking, told = save_that_waits(process, go)
        others = [threading.Thread(target=process.ask, args=("/sessions", "GET")) for _ in range(6)]
        for other in others:
            other.start()
        assert turn(process, [AGAIN])[1]["completion_tokens"] == 3
        assert process.ask("/stats", "GET")[0] == 200
        message(process.ask("/sessions/save", name="late", messages=[USER]), 504, "timeout")
        for thread in (asking, *others):
            thread.join(PATIENCE)
        message(told[0], 504, "timeout")
        go.touch()
        eventually(process.is_idle)
        assert process.ask("/sessions/load", name="talk")[0] == 200  # what had begun went on to its end
        message(process.ask("/sessions/load", name="late"), 404, "unknown_session")  # and nothing else began


@pytest.mark.slow
def test_the_end_of_a_server_does_not_wait_for_a_disk_that_hangs(tiny_path: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    impatient = """
from polarlm.server import serving
from polarlm.server.running import driver
serving._DRAIN_SECONDS = driver._LAST_SECONDS = 0.3
"""
    with start(tiny_path, tmp_path, prelude=WAITING + impatient, GO=str(go)) as process:
        turn(process, [USER])
        asking, told = save_that_waits(process, go)
        process.signal(signal.SIGTERM)
        asking.join(PATIENCE)
        message(told[0], 503, "closing")
        assert process.wait() == 0
        assert "Traceback" not in process.errors.read_text()
        assert any("the disk did not finish in time" in line.get("message", "") for line in process.log())

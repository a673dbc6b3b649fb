"""Processes that this project starts: they run nothing of the folder that the user is in, speak lines, and end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from polarlm.children import Child, how_ended, python
from polarlm.engine.config import EngineConfig
from polarlm.engine.sampling import grammar_worker
from polarlm.model_loaders import demo
from polarlm.model_loaders.chat import template_worker
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.limited_process import LimitedProcess
from polarlm.server.http import documents
from polarlm.server.mcp.session import McpError, McpServer, Session
from polarlm.server.models.process import ModelProcess
from polarlm.server.models.registry import NamedModel
from tests.pairs import mostly_slow
from tests.server.lines import PATIENCE, eventually
from tests.tiny import make_model

ROOT = Path(__file__).resolve().parents[1]
PLANTED = ("types", "runpy", "json", "asyncio", "jinja2", "llguidance", "mcp", "pip", "polarlm", "sitecustomize")
NOWHERE = "http://127.0.0.1:9/"


def _template(folder: Path) -> None:
    assert LimitedProcess(Path(template_worker.__file__), "{{ 6 * 7 }}").ask([{}]) == [{"text": "42"}]


def _grammar(folder: Path) -> None:
    first = {"tokens": ["<end>", "a"], "special": [0], "ends": [0]}
    worker = LimitedProcess(Path(grammar_worker.__file__), first)
    assert worker.ask({"grammar": 'start: "a"', "seconds": 60}) == ""
    worker.close()


def _pdf(folder: Path) -> None:
    assert b"damaged" in asyncio.run(documents._read(b"%PDF-1.4 x", 100, 30))


def _download(folder: Path) -> None:
    with pytest.raises(LoadError, match="pip"):
        demo.demo_model()


def _model(folder: Path) -> None:
    async def fetch() -> Path:
        named = NamedModel("tiny", EngineConfig(weights=str(folder / "model")))
        process = ModelProcess(named, None, lambda code: None)
        try:
            return await process.fetch()
        finally:
            await process.end()

    (folder / "model").mkdir()
    assert asyncio.run(fetch()) == make_model(folder / "model")


def _mcp(folder: Path) -> None:
    with pytest.raises(McpError, match=r"web: (?!It has ended)"):
        asyncio.run(Session(McpServer("web", url=NOWHERE), 10_000).connect())


# The others take a second each.
@mostly_slow("start", [_template, _grammar, _pdf, _download, _model, _mcp], [_template, _grammar, _pdf, _model])
def test_a_child_runs_nothing_of_the_current_folder(
    start: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, ran = tmp_path / "here", tmp_path / "ran"
    here.mkdir()
    for number, name in enumerate(PLANTED):
        file = here / f"{name}.py" if number % 2 else here / name / "__init__.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\nraise ImportError('planted')\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv(demo.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", ["", str(here), *sys.path])
    start(tmp_path)
    assert not ran.exists(), ran.read_text()


# Speaks as each line asks it to, and starts a program in its group.
SPEAKER = """
import json, os, subprocess, sys, threading
from polarlm.children import Parent
end = threading.Event()
def hear(said):
    if said == "garbage":
        parent.write(b"no JSON" * 1000)
    elif said == "exit":
        os._exit(3)
    parent.tell(said)
parent = Parent(hear, end.set)
parent.write = parent._out.write
print("what a library prints")
parent.tell(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid)
end.wait()
"""


class Heard:
    """A child that runs SPEAKER, and what it says."""

    def __init__(self, most: float = 1 << 30) -> None:
        self.lines: SimpleQueue[Any] = SimpleQueue()
        self.codes: SimpleQueue[int] = SimpleQueue()
        command = [sys.executable, "-c", SPEAKER]
        self.child = Child(command, self.lines.put, self.codes.put, most=most, errors=subprocess.DEVNULL)
        self.program = psutil.Process(self.lines.get(timeout=PATIENCE))

    def ended(self) -> int:
        """The exit code; the program has ended as well."""
        code = self.codes.get(timeout=PATIENCE)
        eventually(lambda: not self.program.is_running() or self.program.status() == psutil.STATUS_ZOMBIE)
        return code


def test_lines_come_in_order_however_long_and_the_child_ends_when_its_pipe_is_closed() -> None:
    heard, large = Heard(), ["é" * 1_000_000, None]
    heard.child.tell(1, large, "last")
    assert [heard.lines.get(timeout=PATIENCE) for _ in range(3)] == [1, large, "last"]
    heard.child.close()
    assert heard.ended() == 0


def test_who_tells_a_child_that_does_not_listen_does_not_wait() -> None:
    heard = Heard()
    os.kill(heard.child.pid, signal.SIGSTOP)
    heard.child.tell("x" * 10_000_000)
    heard.child.kill()
    assert (heard.ended(), how_ended(-9)) == (-signal.SIGKILL, "crashed (SIGKILL)")
    heard.child.tell("nobody")


@pytest.mark.parametrize("said", ["garbage", "x" * 2000])
def test_a_child_that_writes_no_line_of_the_protocol_is_killed(said: str) -> None:
    heard = Heard(most=1000)
    heard.child.tell(said)
    assert heard.ended() == -signal.SIGKILL
    assert heard.child.broke_off


def test_an_end_has_its_exit_code() -> None:
    heard = Heard()
    heard.child.tell("exit")
    assert (heard.ended(), heard.child.broke_off, heard.child.end()) == (3, False, 3)


def test_the_current_folder_is_looked_at_where_this_project_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for paths in ([""], [str(ROOT)], [os.curdir]):
        monkeypatch.setattr(sys, "path", [*paths, "/elsewhere"])
        *_, count, first, second = python("pip")
        assert (count, os.path.realpath(first), second) == ("2", str(ROOT), "/elsewhere")


def test_all_children_start_alike() -> None:
    """`sys.executable` is the beginning of every other way."""
    files = (file for top in ("engine", "model_loaders", "server", "polarlm") for file in (ROOT / top).rglob("*.py"))
    starting = {
        file.name
        for file in files
        if re.search(r"[(\[]sys\.executable|import multiprocessing", file.read_text("utf-8"))
    }
    assert starting == {"children.py"}

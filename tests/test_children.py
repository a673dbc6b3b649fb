"""Processes that this project starts run nothing of the folder that the user is in."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polarlm.children import python
from polarlm.engine.config import EngineConfig
from polarlm.engine.sampling import grammar_worker
from polarlm.model_loaders import demo
from polarlm.model_loaders.chat.template_process import TemplateProcess
from polarlm.model_loaders.errors import LoadError
from polarlm.model_loaders.limited_process import LimitedProcess
from polarlm.server.http import documents
from polarlm.server.mcp.file import McpServer
from polarlm.server.mcp.session import McpError, Session
from polarlm.server.models.process import ModelProcess
from polarlm.server.models.registry import NamedModel
from tests.tiny import make_model

ROOT = Path(__file__).resolve().parents[1]
PLANTED = ("types", "runpy", "json", "asyncio", "jinja2", "llguidance", "mcp", "pip", "polarlm", "sitecustomize")
NOWHERE = "http://127.0.0.1:9/"


def _template(folder: Path) -> None:
    assert TemplateProcess("{{ 6 * 7 }}").render([{}]) == ["42"]


def _grammar(folder: Path) -> None:
    first = {"tokens": ["<end>", "a"], "special": [0], "ends": [0]}
    worker = LimitedProcess(Path(grammar_worker.__file__), first)
    assert worker.ask({"grammar": 'start: "a"', "seconds": 60}) == ""
    worker.close()


def _pdf(folder: Path) -> None:
    assert b"damaged" in asyncio.run(documents._read(b"%PDF-1.4 x", 100))


def _download(folder: Path) -> None:
    with pytest.raises(LoadError, match="pip"):
        demo.demo_model()


def _model(folder: Path) -> None:
    async def fetch() -> Path:
        named = NamedModel("tiny", EngineConfig(weights=str(folder / "model")))
        process = ModelProcess(named, None, lambda code: None)
        try:
            return await process.fetched()
        finally:
            await process.end()

    (folder / "model").mkdir()
    assert asyncio.run(fetch()) == make_model(folder / "model")


def _mcp(folder: Path) -> None:
    with pytest.raises(McpError, match=r"web: (?!It has ended)"):
        asyncio.run(Session(McpServer("web", url=NOWHERE), 10_000).connect())


@pytest.mark.parametrize("start", [_template, _grammar, _pdf, _download, _model, _mcp])
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


def test_the_current_folder_is_looked_at_where_this_project_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for given in ([""], [str(ROOT)], [os.curdir]):
        monkeypatch.setattr(sys, "path", [*given, "/elsewhere"])
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

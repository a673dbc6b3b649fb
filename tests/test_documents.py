"""The documents say what the code says."""

from __future__ import annotations

import ast
import cProfile
import json
import re
import shutil
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, cast

import pytest
from starlette.routing import Route

from polarlm.bench import result
from polarlm.bench.lab import tables
from polarlm.engine import SamplingParams
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.errors import EngineError
from polarlm.engine.requests.runner import Runner
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import create_app
from polarlm.server.http.errors import _ENGINE_STATUS, _REFUSED_STATUS
from scripts import docs, keywords
from scripts.docs import ROOT
from tests.examples.test_deploy import PROJECT
from tests.test_snippets import PAGES
from tests.tiny import PLAIN, ids, load_tiny, make_model

EMBEDDING, SERVER = (ROOT / "docs" / name for name in ("embedding.md", "server.md"))
NUMBERS = {"n_ctx", "n_prompt_tokens", "lacking"}  # attributes of an EngineError that are numbers


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.name)
def test_the_parts_of_a_document_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == docs.written(text, {**docs.PARTS, **tables.PARTS}), "run `make readme`"


def test_the_keyword_arguments_that_editors_know_are_the_settings_that_there_are():
    assert keywords.FILE.read_text(encoding="utf-8") == keywords.text()


def rows(document, header):
    """The cells of each row of the table of `document` whose header begins so."""
    table = document.read_text(encoding="utf-8").split(f"\n| {header} |")[1].split("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


def test_every_code_of_an_error_is_explained():
    raised = {"invalid_request"}  # the default
    for path in (ROOT / "engine").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search("(Engine|Constraint)Error", text) else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("EngineError", "ConstraintError"):
                codes = node.args[1:2] or [more.value for more in node.keywords if more.arg == "code"]
                raised.update(ast.literal_eval(code) for code in codes)
    assert raised == {*re.findall(r'"(\w+)"', EngineError.__doc__)} - NUMBERS
    assert raised == {code for row in rows(EMBEDDING, "Code") for code in re.findall(r"`(\w+)`", row[0])}


def test_every_status_of_an_error_is_explained():
    told = {
        (int(status), code)
        for row in rows(SERVER, "Status")
        for status in row[0].split(", ")
        for code in re.findall(r"`(\w+)`", row[1])
    }
    assert {(status, code) for code, status in {**_ENGINE_STATUS, **_REFUSED_STATUS}.items()} <= told


def test_every_endpoint_is_explained():
    def shared(method: str, path: str) -> tuple[str, str]:  # most paths are there with /v1 and without
        return method, path.removeprefix("/v1")

    told = {shared(*pair) for row in rows(SERVER, "Endpoint") for pair in re.findall(r"`(\w+) (\S+)`", row[0])}
    config = ServerConfig()
    driver = cast(Any, SimpleNamespace(engine=None, config=config, model_info=None))
    routes = cast(list[Route], create_app(driver, config).routes)
    there = {shared(next(iter({*route.methods} - {"HEAD"})), re.sub(r"{.*?}", "NAME", route.path)) for route in routes}
    assert told == there


def test_every_extra_is_explained():
    rows = re.findall(r"^\| (`[\w, `-]+`) \|", (ROOT / "docs" / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {*re.findall(r"[\w-]+", " ".join(rows))} == {*PROJECT["project"]["optional-dependencies"]} - {"dev"}


def test_every_room_of_the_engine_is_explained():
    told = {
        name
        for row in rows(ROOT / "ARCHITECTURE.md", "Folder | What is in it | Start reading at")
        for name in names(row)
    }
    files = {path.relative_to(ROOT / "engine").parts for path in (ROOT / "engine").rglob("*.py")}
    there = {parts[0] if len(parts) == 1 else f"{parts[0]}/" for parts in files}  # compiled leftovers are no room
    assert told == {name for name in there if not name.startswith("_")}


@pytest.mark.parametrize("walk", docs.WALKS)
def test_a_walk_can_be_read_in_an_hour(walk):
    *places, _, total = docs.lines_of(walk).splitlines()
    assert len(places) <= 12
    assert int(total.split()[0]) <= 700


def test_the_walks_are_what_runs(tmp_path, monkeypatch):
    """A prompt and a step of a small model in NumPy enter every place, and no file on the way that has none."""
    profile, run_unit = cProfile.Profile(), Runner.run_unit
    monkeypatch.setattr(Runner, "run_unit", lambda runner: profile.runcall(run_unit, runner))
    with load_tiny(make_model(tmp_path), ops=NumpyOps(), **PLAIN | {"cache_type": "ring4"}) as engine:
        engine.generate(ids(1, 60), SamplingParams(max_tokens=2, ignore_eos=True))
    codes = [entry.code for entry in profile.getstats() if isinstance(entry.code, CodeType)]
    entered = {(Path(code.co_filename).resolve(), code.co_firstlineno) for code in codes}
    places = [place for walk in docs.WALKS for place in docs.places(walk)]
    for name, first, last, _ in places:
        lines = [line for path, line in entered if path == ROOT / "engine" / name]
        assert any(first <= line <= last for line in lines), f"nothing in lines {first} to {last} of {name} ran"
    files = " ".join(path.as_posix() for path, _ in entered)
    way = set(re.findall(r"/engine/(requests/[\w/]+\.py|model/(?:forward|decoder)\.py|state/store\.py)", files))
    assert way <= {name for name, *_ in places} | {"requests/scheduler.py"}  # whose turn it is


def test_every_folder_of_kernels_is_explained():
    told = {name for row in rows(ROOT / "cuda" / "README.md", "Folder | Contents") for name in names(row)}
    assert told == {f"{path.name}/" for path in (ROOT / "cuda").iterdir() if path.is_dir()}


def names(row):
    """What stands in code spans in the first cell of a row."""
    return re.findall(r"`([^`]+)`", row[0])


FOLDERS = "bench", "cuda", "engine", "examples", "model_loaders", "polarlm", "scripts", "server", "tests"


@cache
def code():
    """The texts of all code, by path."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".cu", ".cuh", ".js")
    }


@cache
def words():
    return {word for text in code().values() for word in re.findall(r"\w+", text)}


OTHERS = {"hex3.py", "int8.py", "q1_0.py", "server.py"}  # docs/adding.md's, and a user's own
OF_TODAY = [page for page in PAGES if page.parent.name != "results"]  # results have the names of their day


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_code_spans_are_those_of_the_code(page):
    """Members of classes, files, tests and classes."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for name in {*re.findall(r"`([^`\n]+)`", prose)}:
        if member := re.fullmatch(r"([A-Z]\w*[a-z]\w*)\.(_?[a-z]\w*)(?:\(.*\))?", name):
            classes = [text for text in code().values() if re.search(rf"^class {member[1]}\b", text, re.MULTILINE)]
            assert any(re.search(rf"\b{member[2]}\b", text) for text in classes), name
        elif re.fullmatch(r"[\w./]+\.(?:py|cuh?|js)", name) and name.split("/")[-1] not in OTHERS:
            assert any(f"/{path}".endswith(f"/{name}") for path in code()), name
        elif re.fullmatch(r"test_\w+|(?:[A-Z][a-z]+){2,}", name):
            assert name in words(), name


# -- tables of results ---------------------------------------------------------------------------------------------


def test_a_new_measurement_of_a_gpu_replaces_the_rows_of_an_older_version(tmp_path, monkeypatch):
    for file in result.RESULTS.glob("*-2026-*.json"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(result, "RESULTS", tmp_path)
    newer = json.loads(max(tmp_path.glob("gpu-*.json")).read_text(encoding="utf-8"))
    for row in newer["rows"]:
        if row["contestant"].startswith("polarlm ") and row["quantity"] == "tokens/s":
            row |= {"runs": [1000.0], "value": 1000.0}
    newer["date"] = "2026-12-01"
    (tmp_path / "gpu-nvidia-h200-8b-2026-12-01.json").write_text(json.dumps(newer), encoding="utf-8")
    part = re.sub(" +", " ", tables.speed_in_short())
    assert "| NVIDIA H200, 2026-12-01 | 8B, Q4_K_M | generation at 2,048 | 1,000 | 3.79 (llama.cpp of 2026-" in part
    assert "2026-11-28" not in part

"""The documents say what the code says."""

from __future__ import annotations

import ast
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.routing import Route

from polarlm.engine import codecs
from polarlm.engine.errors import EngineError
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import create_app
from polarlm.server.http.errors import _ENGINE_STATUS, _REFUSED_STATUS
from scripts import docs
from scripts.docs import ROOT

EMBEDDING, SERVER = (ROOT / "docs" / name for name in ("embedding.md", "server.md"))
NUMBERS = {"n_ctx", "n_prompt_tokens", "lacking"}  # attributes of an EngineError that are numbers


@pytest.mark.parametrize("page", docs.PAGES, ids=lambda page: page.name)
def test_the_parts_of_a_document_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert text == docs.written(text), "run `make readme`"


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
    shape = CacheShape(8, (LayerShape(codecs.get("f16"), codecs.get("f16"), 1, 8),))
    engine = SimpleNamespace(kept_blocks=object(), cache_shape=shape)
    config = ServerConfig(share_blocks=True)
    driver = cast(Any, SimpleNamespace(engine=engine, config=config, about=None))
    routes = cast(list[Route], create_app(driver, config).routes)
    there = {shared(next(iter({*route.methods} - {"HEAD"})), re.sub(r"{.*?}", "NAME", route.path)) for route in routes}
    assert told == there


def test_every_room_of_the_engine_is_explained():
    told = {
        name
        for row in rows(ROOT / "ARCHITECTURE.md", "Folder | What is in it | Start reading at")
        for name in names(row)
    }
    files = {path.relative_to(ROOT / "engine").parts for path in (ROOT / "engine").rglob("*.py")}
    there = {parts[0] if len(parts) == 1 else f"{parts[0]}/" for parts in files}  # compiled leftovers are no room
    assert told == {name for name in there if not name.startswith("_")}


def test_a_step_can_be_read_in_an_hour():
    *places, _, total = docs.step().splitlines()
    assert len(places) <= 12
    assert int(total.split()[0]) <= 700


def test_every_folder_of_kernels_is_explained():
    told = {name for row in rows(ROOT / "cuda" / "README.md", "Folder | Contents") for name in names(row)}
    assert told == {f"{path.name}/" for path in (ROOT / "cuda").iterdir() if path.is_dir()}


def names(row):
    """What stands in code spans in the first cell of a row."""
    return re.findall(r"`([^`]+)`", row[0])

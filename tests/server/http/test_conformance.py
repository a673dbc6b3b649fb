"""The table of llama-server's promises names tests that exist and fields that are refused, and the page has it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from polarlm.server.reading.fields import FIELDS
from scripts.make_conformance_table import DOCUMENT, PROMISES, table
from scripts.promises.promise import Promise

TESTS = Path(__file__).resolve().parents[1]
EACH = pytest.mark.parametrize(
    "promise", [pytest.param(promise, id=f"{endpoint}: {promise.says}") for endpoint, promise in PROMISES]
)


@cache
def names_in(file: str) -> set[str]:
    (path,) = TESTS.rglob(file)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_has_the_table() -> None:
    assert table() in DOCUMENT.read_text(encoding="utf-8"), "run python -m scripts.make_conformance_table"


@EACH
def test_a_promise_is_held_by_tests_or_has_a_reason(promise: Promise) -> None:
    assert promise.standing in ("held", "different", "refused")
    assert promise.tests if promise.standing == "held" else promise.why
    assert promise.standing != "refused" or promise.tests or promise.fields
    for test in promise.tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in names_in(file)


@EACH
def test_a_field_that_is_refused_is_refused(promise: Promise) -> None:
    assert {FIELDS[name].standing for name in promise.fields} <= {"refused"}

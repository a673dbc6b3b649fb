"""Lists of cases have what they promise, and tests that run the product of all values say why."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.pairs import each, in_turn, pairs

TESTS = Path(__file__).parent


def test_every_value_occurs() -> None:
    assert each("abc", [1, 2]) == [("a", 1), ("b", 2), ("c", 1)]
    assert each([[]], "ab", [1]) == [([], "a", 1), ([], "b", 1)]


def test_any_two_values_occur_together() -> None:
    for axes in ("ab", "cd", "efgh"), ("abc", "def", "ghi"), ("ab", "cde", "fgh", "ij"), (range(16), "ab", "cde"):
        found = pairs(*axes)
        for (i, one), (j, other) in combinations(enumerate(axes), 2):
            assert {(row[i], row[j]) for row in found} == set(product(one, other)), axes
        *_, second, most = sorted(map(len, axes))
        assert len(found) <= second * most + 1, axes
        assert len(found) == len(set(found)), axes


def test_a_test_that_skips_every_case_fails() -> None:
    def skips_odd_numbers(number: int) -> None:
        if number % 2:
            pytest.skip("it is odd")

    in_turn("number", [1, 2])(skips_odd_numbers)()
    with pytest.raises(pytest.fail.Exception, match="every case is skipped: it is odd"):
        in_turn("number", [1, 3])(skips_odd_numbers)()
    with pytest.raises(pytest.skip.Exception, match="no case of number"):
        in_turn("number", [])(skips_odd_numbers)()


def parametrizes(node: ast.AST) -> bool:
    inside = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and one.attr == "parametrize")
    return any(ast.unparse(one) == "pytest.mark.parametrize" for one in inside)


def aliases(source: str, module: ast.Module) -> set[str]:
    """Names that parametrize the tests that they decorate: of such a decorator, or of a function that makes one."""
    found, lines = set(), source.split("\n")
    for node in module.body:
        if not any("parametrize" in line for line in lines[node.lineno - 1 : node.end_lineno]):
            continue  # most nodes; to go through all of them takes seconds
        if isinstance(node, ast.Assign) and parametrizes(node.value):
            found.update(map(ast.unparse, node.targets))
        elif isinstance(node, ast.FunctionDef) and any(map(parametrizes, node.body)):
            found.add(node.name)
    return found


def decorated(body: Sequence[ast.stmt]) -> Iterator[ast.FunctionDef]:
    """Functions with two or more decorators, of a module and its classes."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from decorated(node.body)
        elif isinstance(node, ast.FunctionDef) and len(node.decorator_list) > 1:
            yield node


def unexplained(source: str, module: ast.Module, of_module: Mapping[str, set[str]]) -> list[str]:
    """Names of the functions with two or more decorators that parametrize, and no "# Product: …" directly above the
    first. of_module: a module's name → its aliases."""
    lines, found = source.splitlines(), []
    known = aliases(source, module)
    for node in module.body:
        if isinstance(node, ast.ImportFrom):
            own = of_module.get(node.module or "", set())
            known.update(name.asname or name.name for name in node.names if name.name in own)
    for test in decorated(module.body):
        above = lines[test.decorator_list[0].lineno - 2].strip()
        count = sum(parametrizes(one) or ast.unparse(one) in known for one in test.decorator_list)
        if count >= 2 and not above.startswith("# Product: "):
            found.append(test.name)
    return found


def test_a_test_that_runs_a_product_says_what_it_finds() -> None:
    mark, test = 'pytest.mark.parametrize("a", [1])', "def f(): ...\n"
    for before, first in (
        ("", f"@{mark}"),
        (f"every_a = {mark}", "@every_a"),
        (f"def every_a(test): return {mark}(test)", "@every_a"),
        ("from tests.all import every_one as every_a", "@every_a"),
    ):
        twice = f'{first}\n@pytest.mark.parametrize("b", [2])\n{test}'
        of_module = {"tests.all": {"every_one"}}
        for source, names in (
            (f"{before}\n\n{twice}", ["f"]),
            (f"{before}\n# Product: a and b meet.\n{twice}", []),
            (f"{before}\n\n{first}\n{test}", []),
        ):
            assert unexplained(source, ast.parse(source), of_module) == names
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(TESTS.rglob("*.py"))}
    gc.disable()  # it would go through the trees of all files again and again
    try:
        modules = {path: ast.parse(source) for path, source in sources.items()}
    finally:
        gc.enable()
    of_module = {
        ".".join(path.relative_to(TESTS.parent).with_suffix("").parts): aliases(sources[path], module)
        for path, module in modules.items()
    }
    for path, module in modules.items():
        assert unexplained(sources[path], module, of_module) == [], path.relative_to(TESTS)

"""Lists of cases have what they promise, and tests that run the product of all values say why."""

from __future__ import annotations

import ast
from itertools import combinations, product
from pathlib import Path

from tests.pairs import each, pairs

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


def is_parametrize(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.parametrize"


def unexplained(source: str) -> list[str]:
    """Names of the functions with two or more parametrize decorators and no "# Product: …" directly above the first."""
    lines, found = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            above = lines[node.decorator_list[0].lineno - 2].strip() if node.decorator_list else ""
            if sum(map(is_parametrize, node.decorator_list)) >= 2 and not above.startswith("# Product: "):
                found.append(node.name)
    return found


def test_a_test_that_runs_a_product_says_what_it_finds() -> None:
    twice = '@pytest.mark.parametrize("a", [1])\n@pytest.mark.parametrize("b", [2])\ndef f(): ...\n'
    assert unexplained(f"\n{twice}") == ["f"]
    assert unexplained(f"# Product: a and b meet.\n{twice}") == []
    for path in sorted(TESTS.rglob("*.py")):
        assert unexplained(path.read_text(encoding="utf-8")) == [], path.relative_to(TESTS)

"""`scripts.mutate`: which tokens it changes, and that it tells what tests find from what they do not."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from scripts import mutate
from scripts.mutate import Mutation, chosen, mutations

MODULE = '''"""One - two."""
from __future__ import annotations
LIMIT = 5


def f(x: int, *rest: int, n: int = 3) -> int | None:
    """x - 1"""
    return g(*rest, -x) if x < n and not rest else x + 40  # x - 1


def g(*all: int) -> int:
    return len(all)
'''
KERNEL = """// a < b
#if N > 3
__device__ float f(float *x, int n) {
    for (int i = 0; i < n; ++i) x[i] = *x + 1.0f;  // a - b
    __syncthreads();
}
"""
TESTS = """import pytest
from polarlm_like import module


def test_f():
    assert module.f(7) == 47
    assert module.f(1) == 1


@pytest.mark.slow
def test_f_at_its_limit():
    assert module.f(3) == 43
"""


@pytest.fixture
def product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of a product with one room, of Python and CUDA."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # its tests need none, and seconds go into each
    monkeypatch.setattr(mutate, "ROOMS", {"polarlm_like": ["tests/test_module.py", "tests/none.py"]})
    for name, content in (
        ("polarlm_like/__init__.py", ""),
        ("polarlm_like/module.py", MODULE),
        ("polarlm_like/kernel.cu", KERNEL),
        ("tests/test_module.py", TESTS),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_what_runs_is_changed_and_nothing_else(product: Path) -> None:
    found = [(m.file.rpartition("/")[2], m.line, m.old, m.new) for m in mutations(product, ["polarlm_like"])]
    assert found == [
        ("kernel.cu", 4, "<", "<="),
        ("kernel.cu", 4, "+", "-"),
        ("kernel.cu", 5, "__syncthreads();", ";"),
        ("module.py", 8, "<", "<="),
        ("module.py", 8, "and", "or"),
        ("module.py", 8, "not", ""),
        ("module.py", 8, "+", "-"),
        ("module.py", 8, "40", "41"),
    ]


@pytest.mark.slow
def test_mutations_are_killed_by_short_tests_or_slow_ones_or_survive(
    product: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate, "ROOT", product)
    rooms = ["--rooms", "polarlm_like", "--jobs", "2", "--output", str(product / "outcomes.json")]
    assert mutate.main(rooms) == 0
    rows = json.loads((product / "outcomes.json").read_text(encoding="utf-8"))
    assert {row["old"]: row["outcome"] for row in rows if row["file"].endswith(".py")} == {
        "<": mutate.KILLED_SLOWLY,
        **dict.fromkeys(["and", "not", "+", "40"], mutate.KILLED),
    }
    assert {row["outcome"] for row in rows if row["file"].endswith(".cu")} == {mutate.SURVIVED}
    assert (product / "polarlm_like" / "module.py").read_text(encoding="utf-8") == MODULE
    assert capsys.readouterr().out.splitlines()[-1].split() == ["all", "4", "5", "8"]


def test_the_choice_is_fair_and_repeatable() -> None:
    found = [Mutation(room, f"{room}.py", line, 0, "<", "<=") for room in "ab" for line in range(50)]
    found += [Mutation("c", "c.py", 0, 0, "<", "<=")]
    picked = chosen(found, 21, 3)
    assert picked == chosen(found, 21, 3) != chosen(found, 21, 4)
    assert [sum(one.room == room for one in picked) for room in "abc"] == [10, 10, 1]


@pytest.mark.slow
def test_every_room_has_mutations_and_tests() -> None:
    found = {mutation.room for mutation in mutations(mutate.ROOT)}
    assert found == set(mutate.ROOMS)
    assert all((mutate.ROOT / test).exists() for tests in mutate.ROOMS.values() for test in tests)

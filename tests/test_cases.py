"""The cases of a test that `make test` runs: those that it makes are those that it would choose from all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

TESTS = """
import pytest

@pytest.fixture(params=range(3))
def fixture(request):
    return request.param

@pytest.mark.parametrize("case", range(10))
def test_four(case): pass

@pytest.mark.parametrize("case", range(3))
def test_all_of_three(case): pass

@pytest.mark.parametrize("case", [*range(8), pytest.param(8, marks=pytest.mark.slow)])
def test_four_with_marks_of_cases(case): pass

@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("case", range(10))
def test_two(case, fixture): pass

@pytest.mark.slow
@pytest.mark.parametrize("case", range(10))
def test_none(case): pass

@pytest.mark.slow
def test_no_case(): pass

def test_of_a_fixture(fixture): pass

class TestClass:
    @pytest.mark.slow(keep=1)
    @pytest.mark.parametrize("case", "abc")
    def test_one(self, case): pass
"""


def collected(folder: Path, expression: str, *names: str) -> list[str]:
    """Ids of the tests that pytest would run, without the name of the file; as many as it had made are last."""
    command = [sys.executable, "-m", "pytest", "--co", "-q", "--rootdir", str(folder), "-c", os.devnull]
    command += ["-p", "tests.conftest", "-p", "no:cacheprovider", "-m", expression, *(names or ["test_some.py"])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return [line.split("::", 1)[1] for line in lines if "::" in line] + [lines[-1].split(" tests ")[0].split("/")[-1]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    return tmp_path


def test_no_case_is_made_that_would_be_left_out(folder: Path) -> None:
    *made, few = collected(folder, "not slow")
    *chosen, all_of_them = collected(folder, "not (slow)")
    assert made == chosen
    assert [name for name in made if "test_four[" in name] == [f"test_four[{case}]" for case in (0, 3, 6, 9)]
    counts = {"test_all_of_three": 3, "test_four_with": 4, "test_two": 2, "test_no": 0, "test_of_a": 3, "TestClass": 1}
    assert {name: sum(one.startswith(name) for one in made) for name in counts} == counts
    assert (few, all_of_them) == ("19", "69")


def test_a_case_that_is_named_is_run(folder: Path) -> None:
    assert collected(folder, "not slow", "test_some.py::test_four[5]")[0] == "test_four[5]"

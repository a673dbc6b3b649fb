"""A level of CPU features is a class in a file of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from polarlm.engine.jit import isa
from polarlm.engine.jit.compile import compiler
from polarlm.engine.jit.isa.levels import LEVELS, all_levels

FILE = """
from polarlm.engine.jit.lang import Level

class MadeUp(Level):
    name = "made-up"
    needs = ("a feature",)

LEVELS = (MadeUp(),)
"""


def test_a_file_is_enough_for_a_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_machine.py").write_text(FILE)
    monkeypatch.setattr(isa, "__path__", [*isa.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{isa.__name__}.a_machine", raising=False)
    (generic, made_up, *others) = all_levels()
    assert (generic, *others) == LEVELS
    assert (generic.name, made_up.name, made_up.features) == ("generic", "made-up", "+a feature")


def test_the_table_of_the_readme_has_every_level() -> None:
    text = (Path(__file__).resolve().parents[2] / "engine" / "jit" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) \|$", text, re.M)
    assert rows == [(level.name, str(level.lanes)) for level in LEVELS]


def test_code_belongs_to_a_machine_and_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a folder that several machines share has a set of compiled kernels for each."""
    found = []
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(compiler, "machine", lambda machine=machine: machine)
        found += [compiler.target_description(level) for level in LEVELS]
    assert len(set(found)) == 2 * len(LEVELS)

"""A level of CPU features is a class in a file of its own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jit.levels import Narrow, declared, run

from polarlm.engine.jit import isa  # isort: skip
from polarlm.engine.jit.compile import compiler
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.isa.levels import LEVELS, found
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I32, Value, vector

FILE = """
from polarlm.engine.jit.isa.generic import Generic

class MadeUp(Generic):
    name = "made-up"
    needs = ("a feature",)

LEVELS = (MadeUp(),)
"""


def test_a_file_is_enough_for_a_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_machine.py").write_text(FILE)
    monkeypatch.setattr(isa, "__path__", [*isa.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"{isa.__name__}.a_machine", raising=False)
    (generic, made_up, *others) = found()
    assert (generic, *others) == LEVELS
    assert (generic.name, made_up.name, made_up.features) == ("generic", "made-up", "+a feature")


def test_the_table_of_the_readme_has_every_level() -> None:
    text = (Path(__file__).resolve().parents[2] / "engine" / "jit" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) \|$", text, re.M)
    assert rows == [(level.name, str(level.lanes)) for level in LEVELS]


def test_a_kernel_takes_its_operations_from_the_level() -> None:
    level, lanes = Narrow(), vector(I32, 16)

    def emit(e: Emitter, args: Any, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            at = unit * 64
            total = e.level.dot4(e, e.zero(lanes), e.load(args.a + at, lanes), e.load(args.b + at, lanes))
            e.store(total, args.out + at)

    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (10, 64), np.uint8), rng.integers(-128, 128, (10, 64), np.int8)
    out = np.zeros((10, 16), np.int32)
    run(Kernel("test_narrow", emit, declared("a b out")), level, 10, (a, b, out))
    np.testing.assert_array_equal(out, (a.astype(int) * b).reshape(10, 16, 4).sum(-1))
    assert level.dots == 1


def test_code_belongs_to_a_machine_and_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a folder that several machines share has a set of compiled kernels for each."""
    found = []
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(compiler, "machine", lambda machine=machine: machine)
        found += [compiler.target_description(level) for level in LEVELS]
    assert len(set(found)) == 2 * len(LEVELS)

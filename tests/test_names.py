"""`polarlm` is the name of everything; the packages' short names are aliases, which a user's own modules replace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import polarlm
from polarlm import aliases
from polarlm import engine as package
from tests.programs import ROOT, output_of


def run(program: str, folder: Path, *, module: str = "") -> str:
    """The output of a program in `folder`; with `module`, of `python -m module` and the program's words."""
    command = [sys.executable, *(("-m", module, *program.split()) if module else ("-c", program))]
    return output_of(*command, folder=folder, PYTHONPATH=str(ROOT)).strip()


def test_it_exports_what_the_engine_exports() -> None:
    assert polarlm.__all__ == package.__all__
    assert polarlm.Engine is package.Engine
    assert {name for name in dir(polarlm) if not name.startswith("__")} == {*polarlm.__all__}
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        polarlm.Motor  # noqa: B018


def test_names_are_imported_when_they_are_used(tmp_path: Path) -> None:
    program = "import sys, polarlm; print('numpy' in sys.modules); polarlm.Engine; print('numpy' in sys.modules)"
    assert run(program, tmp_path).split() == ["False", "True"]


def test_a_short_name_is_the_same_module(tmp_path: Path) -> None:
    """Whichever of the two is imported first."""
    modules = {"engine": "state.store", "server": "running.driver", "model_loaders": "rope", "bench": "report"}
    program = "import sys\n"
    for (name, inner), first in zip(modules.items(), ("", "polarlm.") * 2, strict=True):
        program += f"""
import {first}{name}.{inner}
import {name}.{inner}, polarlm.{name}.{inner}
assert {name} is polarlm.{name}
assert {name}.{inner} is polarlm.{name}.{inner}
assert {name}.{inner}.__spec__.name == {name}.{inner}.__name__ == "polarlm.{name}.{inner}"
print(*sorted(m for m in sys.modules if m.startswith("{name}.") and sys.modules[m] is not sys.modules["polarlm." + m]))
"""
    assert {*modules} == {*aliases.NAMES}
    assert run(program, tmp_path) == ""


def test_a_function_stays_where_a_module_has_its_name(tmp_path: Path) -> None:
    program = """
import polarlm.engine.records.fragments
import polarlm.engine.records as package
package.fragments = function = lambda: None
import engine.records.fragments
print(package.fragments is function)
"""
    assert run(program, tmp_path) == "True"


def test_modules_run_by_their_short_names(tmp_path: Path) -> None:
    assert run("--version", tmp_path, module="engine.chat").startswith("polarlm")


@pytest.mark.slow
@pytest.mark.parametrize("as_package", [False, True])
def test_a_users_own_modules_are_theirs(as_package: bool, tmp_path: Path) -> None:
    for name in aliases.NAMES:
        file = tmp_path / name / "__init__.py" if as_package else tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"mine = {name!r}\n", encoding="utf-8")
        if as_package:
            (file.parent / "config.py").write_text("mine = True\n", encoding="utf-8")
    inner = "import engine.config; assert engine.config.mine" if as_package else ""
    for before, after in (("import polarlm", "import engine"), ("import engine", "import polarlm")):
        program = f"""
{before}
{after}
import server, model_loaders, bench
{inner}
from polarlm import Engine
import polarlm.server.running.driver, polarlm.model_loaders.rope
assert Engine.__module__ == "polarlm.engine.engine"
print(engine.mine, server.mine, model_loaders.mine, bench.mine)
"""
        assert run(program, tmp_path) == "engine server model_loaders bench"

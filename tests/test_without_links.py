"""A checkout of a system without symbolic links, where git writes links as files with their targets."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, output_of
from tests.test_wheel import build, contents

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("checkout")
    ignored = shutil.ignore_patterns("__pycache__", "results")
    for name in ("polarlm", "bench", "cuda", "engine", "model_loaders", "server"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy)
    links = [path for path in (copy / "polarlm").iterdir() if path.is_symlink()]
    for link in links:
        target = os.readlink(link)
        link.unlink()
        link.write_text(target, encoding="utf-8")
    return copy


def run(checkout: Path, folder: Path, *words: str) -> str:
    return output_of(sys.executable, *words, folder=folder, PYTHONPATH=str(checkout), OMP_NUM_THREADS="1")


def test_commands_run_by_every_name(checkout: Path, tmp_path: Path) -> None:
    assert run(checkout, checkout, "-m", "polarlm", "--version") == "polarlm 0.1.0\n"
    for words in (["polarlm", "chat"], ["server"], ["polarlm.bench.speed"]):
        assert run(checkout, tmp_path, "-m", *words, "--help").startswith("usage: ")


def test_a_model_answers(checkout: Path, tiny_path: Path, tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
import polarlm, polarlm.engine.state.store, engine.state.store
from polarlm import Engine, SamplingParams
from polarlm.engine.backends.cuda.device.kernel_source import folder
from polarlm.server.http.page import _page
assert engine.state.store is polarlm.engine.state.store
assert Path(engine.__file__).parent == Path(sys.argv[2]) / "engine"
assert list(folder().rglob("*.cu")) and "<html" in _page()[0]
with Engine.load(sys.argv[1], device="cpu") as loaded:
    print(len(loaded.generate("the end", SamplingParams(max_tokens=4, ignore_eos=True)).token_ids))
"""
    assert run(checkout, tmp_path, "-c", program, str(tiny_path), str(checkout)) == "4\n"


def test_the_wheel_is_the_same(checkout: Path, tmp_path: Path) -> None:
    ours, theirs = (build(tmp_path / name, "--wheel", checkout=root) for name, root in (("1", ROOT), ("2", checkout)))
    assert contents(theirs) == contents(ours)

"""What is installed: the packages, the CUDA sources inside `engine`, and nothing called `cuda`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


def test_no_member_shadows_nvidias_namespace(members: list[str]) -> None:
    assert not [name for name in members if name.split("/")[0] == "cuda"]


def test_the_server_brings_its_page(members: list[str]) -> None:
    assert "server/page.html" in members


@pytest.mark.parametrize("package", ["engine", "model_loaders", "server"])
def test_type_checkers_may_read_the_annotations(members: list[str], package: str) -> None:
    assert f"{package}/py.typed" in members


def test_every_package_and_every_cuda_source_is_there(members: list[str]) -> None:
    python = {str(p.relative_to(ROOT)) for folder in ("engine", "model_loaders") for p in (ROOT / folder).rglob("*.py")}
    sources = {f"engine/_cuda/{p.relative_to(ROOT / 'cuda')}" for p in (ROOT / "cuda").rglob("*") if p.is_file()}
    assert python | sources <= set(members)
    assert not [name for name in members if name.startswith(("tests/", "bench/", "scripts/"))]

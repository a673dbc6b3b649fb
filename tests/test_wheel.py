"""What is installed: the packages and the CUDA sources inside `polarlm`, aliases of the packages, and no `cuda`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from polarlm import aliases

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
    assert "polarlm/server/page.html" in members


@pytest.mark.parametrize("package", ["polarlm", "polarlm/engine", "engine", "model_loaders", "server"])
def test_type_checkers_may_read_the_annotations(members: list[str], package: str) -> None:
    assert f"{package}/py.typed" in members


def test_every_file_is_there_below_one_name(members: list[str]) -> None:
    packages = [p for folder in ("engine", "model_loaders", "server", "bench") for p in (ROOT / folder).rglob("*.py")]
    sources = [p for p in (ROOT / "cuda").rglob("*") if p.is_file()]
    assert {f"polarlm/{path.relative_to(ROOT)}" for path in packages + sources} <= set(members)
    assert {name for name in members if name.split("/")[0] in aliases.NAMES} == {
        f"{package}/{file}" for package in ("engine", "model_loaders", "server") for file in ("__init__.py", "py.typed")
    }
    assert not [name for name in members if "results" in name or name.startswith(("tests/", "scripts/"))]

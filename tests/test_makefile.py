"""The Makefile: what it installs, by what `nvidia-smi` says of the driver and by which wheels there are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

OLD = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver}              Driver Version: {driver}      CUDA Version: {cuda}     |
|-----------------------------------------+------------------------+----------------------+
"""
NEW = OLD.replace("Driver Version:", "KMD Version:").replace("CUDA Version:", "CUDA UMD Version:")  # from 610 on


def make_command() -> str:
    make = shutil.which("make")
    if make is None or os.name == "nt":
        pytest.skip("there is no make here")
    return make


def extra(folder: Path, output: str | None) -> str:
    """The extra that make installs where `nvidia-smi` prints `output`, or cannot be found."""
    make = make_command()
    for name in ("sh", "sed", "echo"):
        os.symlink(str(shutil.which(name)), folder / name)
    if output is not None:
        (folder / "output").write_text(output)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\nexec {shutil.which('cat')} '{folder / 'output'}'\n")
        (folder / "nvidia-smi").chmod(0o755)
    command = [make, "--print-data-base", "--dry-run", "-C", str(ROOT), "help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(folder)}, timeout=60)
    assert done.returncode == 0, done.stderr
    (chosen,) = re.findall(r"^EXTRA := (.*)$", done.stdout, re.MULTILINE)
    return str(chosen)


@pytest.mark.parametrize(
    ("format", "cuda", "expected"),
    [
        (OLD, "11.8", ""),
        (OLD, "12.4", "cuda12"),
        (NEW, "14.1", "cuda13"),
    ],
)
def test_the_version_of_the_driver_chooses_the_extra(tmp_path: Path, format: str, cuda: str, expected: str) -> None:
    assert extra(tmp_path, format.format(driver="610.10.01", cuda=cuda)) == expected


@pytest.mark.parametrize("output", [None, "NVIDIA-SMI has failed because it couldn't communicate with the driver.\n"])
def test_without_a_driver_there_is_none(tmp_path: Path, output: str | None) -> None:
    assert extra(tmp_path, output) == ""


@pytest.mark.parametrize("has_wheel", [True, False])
def test_the_kernels_of_the_cpu_are_installed_if_they_can_be(tmp_path: Path, has_wheel: bool) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>"{tmp_path}/calls"\ncase "$*" in *cpu*) exit {0 if has_wheel else 1};; esac\n'
    )
    python.chmod(0o755)
    target = f"{tmp_path}/.installed"
    command = [make_command(), "-C", str(ROOT), f"VENV={tmp_path}", f"PY={python}", "EXTRA=cuda13", target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    wanted = [".[cpu,hub,cuda13]"] if has_wheel else [".[cpu,hub,cuda13]", ".[hub,cuda13]"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == wanted
    assert all("--only-binary llvmlite" in call for call in calls)
    assert ("NumPy" in done.stderr) is not has_wheel
    assert Path(target).exists()

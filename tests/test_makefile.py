"""The Makefile chooses the CUDA extra by what `nvidia-smi` says of the driver."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

OLD = """\
Fri Nov 20 12:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI {driver}              Driver Version: {driver}      CUDA Version: {cuda}     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
"""
NEW = OLD.replace("Driver Version:", "KMD Version:").replace("CUDA Version:", "CUDA UMD Version:")  # from 610 on


def extra(folder: Path, output: str | None) -> str:
    """The extra that make installs where `nvidia-smi` prints `output`, or cannot be found."""
    make = shutil.which("make")
    if make is None or os.name == "nt":
        pytest.skip("there is no make here")
    for name in ("sh", "sed", "echo"):
        os.symlink(str(shutil.which(name)), folder / name)
    if output is not None:
        (folder / "output").write_text(output)
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\nexec {shutil.which('cat')} '{folder / 'output'}'\n")
        (folder / "nvidia-smi").chmod(0o755)
    command = [make, "--print-data-base", "--dry-run", "-C", str(ROOT), "help"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(folder)}, timeout=60)
    assert done.returncode == 0, done.stderr
    (found,) = re.findall(r"^EXTRA := (.*)$", done.stdout, re.MULTILINE)
    return str(found)


@pytest.mark.parametrize("form", [OLD, NEW], ids=["up to 580", "from 610 on"])
@pytest.mark.parametrize(
    ("cuda", "expected"), [("11.8", ""), ("12.4", "cuda12"), ("13.0", "cuda13"), ("13.3", "cuda13"), ("14.1", "cuda13")]
)
def test_the_version_of_the_driver_chooses_the_extra(tmp_path: Path, form: str, cuda: str, expected: str) -> None:
    assert extra(tmp_path, form.format(driver="610.10.01", cuda=cuda)) == expected


@pytest.mark.parametrize("output", [None, "NVIDIA-SMI has failed because it couldn't communicate with the driver.\n"])
def test_without_a_driver_there_is_none(tmp_path: Path, output: str | None) -> None:
    assert extra(tmp_path, output) == ""

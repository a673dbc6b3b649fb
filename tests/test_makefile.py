"""The Makefile: the CUDA extra that it chooses by what `nvidia-smi` says of the driver, and the GPU's commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
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
        (OLD, "13.0", "cuda13"),
        (NEW, "13.3", "cuda13"),
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


def test_the_gpu_s_tests_take_arguments() -> None:
    command = [make_command(), "--dry-run", "-C", str(ROOT), "gpu-test", "PY=python3", "ARGS=--limit 9 -k gemv"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "python3 -m scripts.gpu_test --limit 9 -k gemv" in done.stdout.splitlines()


def gpu_bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make gpu-bench` with a Python that only says what it would measure, an empty cache and no package index."""
    python = folder / "python"
    python.write_text(
        '#!/bin/sh\ncase "$2" in bench.*) shift; echo "$@";; '
        f"*) PIP_NO_INDEX=1 POLARLM_CACHE='{folder / 'cache'}' exec '{sys.executable}' \"$@\";; esac\n"
    )
    python.chmod(0o755)
    command = [make_command(), "--no-print-directory", "-C", str(ROOT), "gpu-bench", f"PY={python}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_without_the_demonstration_model_the_kernels_are_measured(tmp_path: Path) -> None:
    done = gpu_bench(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["bench.gpu"]
    assert "The demonstration model could not be downloaded" in done.stderr
    assert "speed of a whole model was not measured: pass one as WEIGHTS=PATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_is_given_is_measured(tmp_path: Path) -> None:
    done = gpu_bench(tmp_path, "WEIGHTS=/a folder/model.gguf", "ARGS=--layers 2")
    assert done.returncode == 0, done.stderr
    measured = "bench.speed --device cuda --weights /a folder/model.gguf"
    assert done.stdout.splitlines() == ["bench.gpu --layers 2", measured]

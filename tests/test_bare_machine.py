"""The commands for a GPU on a machine without some packages and without a network, rehearsed on the emulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.bare_machine import MISSING

ROOT = Path(__file__).resolve().parents[1]
GPU_TESTS = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "tests" / "cuda").glob("test_*.py"))


def bare(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What `python -m` of a bare GPU machine does with `command`."""
    environment = {**os.environ, "POLARLM_TEST_GPU": "1", **variables}
    return subprocess.run(
        [sys.executable, "-m", "tests.bare_machine", "-m", *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def bare_pytest(*arguments: str) -> str:
    """The output of pytest, which must pass."""
    done = bare("pytest", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_bare_machine_lacks_packages_and_a_network(tmp_path: Path) -> None:
    program = tmp_path / "test_what_is_missing.py"
    program.write_text(
        f"""
import importlib, importlib.util, socket
import pytest

@pytest.mark.parametrize("name", {MISSING!r})
def test_package(name):
    assert importlib.util.find_spec(name) is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)

def test_network():
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("127.0.0.1", 9), 1)
    with socket.socket() as one, pytest.raises(OSError, match="no network"):
        one.connect(("127.0.0.1", 9))
"""
    )
    assert f"{len(MISSING) + 1} passed" in bare_pytest(str(program))


def test_every_test_of_a_gpu_is_found() -> None:
    """No file needs a package that is not there when it is imported."""
    found = bare_pytest("--collect-only", *GPU_TESTS)
    assert all(f"{name}::" in found for name in GPU_TESTS)


def test_tests_of_a_gpu_pass() -> None:
    """Some of each kind: kernels alone, ops, a model; packed weights need no package for their format."""
    files = [f"tests/cuda/test_{name}.py" for name in ("kernels_basic", "packed_weights", "packed_model")]
    bare_pytest(*files, "-k", "rms_norm or parts_of_the_inputs or (activation and q4_k and 12) or mixed_types")

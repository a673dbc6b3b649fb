"""Memory while a model is loaded: its weights are there once, beside a bounded part of the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llvmlite")

from polarlm.bench.gpu.shapes import llama
from polarlm.engine.jit.compile import images
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from scripts.make_random_model import write
from tests.random_model import tokenizer_file
from tests.test_bare_python import ROOT

pytestmark = pytest.mark.skipif(not images.AVAILABLE, reason="LLVM, which is loaded elsewhere, takes more memory")

SHAPE = llama(5, 1024, 4096, 16, 4, 64, 262, 512, 10_000.0)
MATRIX = 2 * 4096 * 1024 * 34 // 32  # bytes of the largest, gate and up together
MIB = 1 << 20

PROGRAM = """
import json, re, sys, threading
from pathlib import Path
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
import polarlm.engine.backends.native.ops

def memory():
    found = re.findall(r"^(\\w+):\\s*(\\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return {name: 1024 * int(number) for name, number in found if name in ("VmHWM", "VmRSS", "RssFile")}

before = memory()
settings = {"device": "cpu", "threads": 1, "calibration": False, "cache_type": "f16"}
parts = assemble(settle(sys.argv[1], None, settings), None)
print(json.dumps({"before": before, "after": memory(), "weights": parts.model.weights.bytes}))
for thread in threading.enumerate():
    if thread.name == "compiler":
        thread.join()  # the next process compiles none
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 80 MB, and a cache with its kernels."""
    folder = tmp_path_factory.mktemp("model")
    write(folder / "random-Q8_0.gguf", "wide", SHAPE, "q8_0", tokenizer_file(folder))
    loaded(folder)
    return folder


def loaded(folder: Path) -> dict:
    """What a new process that loads the model says of its memory, in bytes."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "random-Q8_0.gguf")],
        cwd=ROOT,
        env={**os.environ, CACHE_VARIABLE: str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_model_is_in_memory_once_while_it_is_loaded(folder: Path) -> None:
    found = loaded(folder)
    before, after, weights = found["before"], found["after"], found["weights"]
    assert weights > 70 * MIB
    staging = 8 * MIB
    assert after["VmHWM"] <= after["VmRSS"] + staging + MATRIX
    assert after["VmHWM"] - before["VmRSS"] <= weights + staging + MATRIX + 24 * MIB  # libraries, code, heaps
    assert after["VmRSS"] - before["VmRSS"] <= weights + 20 * MIB  # what was freed is given back
    assert after["RssFile"] - before["RssFile"] <= 16 * MIB  # the model's file does not stay

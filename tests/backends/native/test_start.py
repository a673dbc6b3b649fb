"""What a process that loads a model has in memory: its weights once, and LLVM only if it compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polarlm.bench.shapes import llama
from polarlm.engine.jit.compile import images
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from scripts.make_random_model import write
from tests.programs import ROOT
from tests.random_model import random_model, tokenizer_file

pytestmark = pytest.mark.skipif(not images.AVAILABLE, reason="LLVM links kernels on this system")

ANSWERS = """
import json, sys, threading
from pathlib import Path
from polarlm.engine import Engine, SamplingParams

answers, threads = [], []
for cache_type in ("f16", "balanced"):
    with Engine.load(sys.argv[1], device="cpu", cache_type=cache_type, threads=2) as engine:
        answer = engine.generate([*range(7, 90)], SamplingParams(max_tokens=40, ignore_eos=True, temperature=0))
        answers.append(answer.token_ids)
        threads.append(engine.status().threads.why)
maps = Path("/proc/self/maps").read_text().splitlines()
for thread in threading.enumerate():
    if thread.name == "compiler":
        thread.join()  # kernels that were announced and are not needed, too
print(json.dumps({"answers": answers, "threads": threads, "llvm": [line for line in maps if "llvm" in line.lower()]}))
"""

MEMORY = """
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

SHAPE = llama(5, 1024, 4096, 16, 4, 64, 262, 512, 10_000.0)
MATRIX = 2 * 4096 * 1024 * 34 // 32  # bytes of the largest, gate and up together
MIB = 1 << 20


def ran(program: str, model: Path, cache: Path) -> dict[str, Any]:
    """What a program prints in a new process with this cache folder."""
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        cwd=ROOT,
        env={**os.environ, CACHE_VARIABLE: str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.slow  # several processes
def test_llvm_is_loaded_only_to_compile(tmp_path: Path) -> None:
    """Its library takes tens of megabytes."""
    model, cache = random_model(tmp_path), tmp_path / "cache"
    first, second = ran(ANSWERS, model, cache), ran(ANSWERS, model, cache)
    for damaged in [path for path in cache.rglob("kernels/*/*") if path.is_file()][::3]:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    third = ran(ANSWERS, model, cache)
    assert [bool(one["llvm"]) for one in (first, second, third)] == [True, False, True]
    assert first["answers"] == second["answers"] == third["answers"]
    assert all("kernels compiled" in why and "attention" not in why for why in first["threads"])


@pytest.mark.slow  # a model of 80 MB
def test_a_model_is_in_memory_once_while_it_is_loaded(tmp_path: Path) -> None:
    """Beside a bounded part of the file."""
    model, cache = tmp_path / "random-Q8_0.gguf", tmp_path / "cache"
    write(model, "wide", SHAPE, "q8_0", tokenizer_file(tmp_path))
    ran(MEMORY, model, cache)  # the next process finds the kernels in the cache
    actual = ran(MEMORY, model, cache)
    before, after, weights = actual["before"], actual["after"], actual["weights"]
    assert weights > 70 * MIB
    staging = 8 * MIB
    assert after["VmHWM"] <= after["VmRSS"] + staging + MATRIX
    assert after["VmHWM"] - before["VmRSS"] <= weights + staging + MATRIX + 24 * MIB  # libraries, code, heaps
    assert after["VmRSS"] - before["VmRSS"] <= weights + 20 * MIB  # what was freed is given back
    assert after["RssFile"] - before["RssFile"] <= 16 * MIB  # the model's file does not stay

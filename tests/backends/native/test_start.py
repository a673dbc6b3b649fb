"""A process that finds all its kernels in the cache does without LLVM, whose library takes tens of megabytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llvmlite")

from polarlm.engine.jit.compile import images
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from tests.random_model import random_model
from tests.test_bare_python import ROOT

pytestmark = pytest.mark.skipif(not images.AVAILABLE, reason="LLVM links kernels on this system")

PROGRAM = """
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


def started(model: Path, cache: Path) -> dict[str, Any]:
    """The answers of a new process, and what of LLVM is in its memory."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        cwd=ROOT,
        env={**os.environ, CACHE_VARIABLE: str(cache)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert all("kernels compiled" in why and "attention" not in why for why in found["threads"])
    return found


@pytest.mark.slow
def test_llvm_is_loaded_only_to_compile(tmp_path: Path) -> None:
    model, cache = random_model(tmp_path), tmp_path / "cache"
    first, second = started(model, cache), started(model, cache)
    assert first["llvm"]
    assert second["llvm"] == []
    assert second["answers"] == first["answers"]
    for damaged in [path for path in cache.rglob("kernels/*/*") if path.is_file()][::3]:
        damaged.write_bytes(damaged.read_bytes()[:-1])
    third = started(model, cache)
    assert third["llvm"]
    assert third["answers"] == first["answers"]

"""A Python that lacks some of the packages: what does not need them works, what does says so in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import output_of
from tests.random_model import random_model

_WITHOUT = "import sys; sys.modules.update({name: None for name in %r})\n"


def run_without(missing: list[str], program: str, *arguments: object, **variables: str) -> str:
    """What a Python in which `missing` cannot be imported prints."""
    command = [sys.executable, "-c", _WITHOUT % missing + program, *arguments]
    return output_of(*command, **{"POLARLM_CACHE": None, **variables})


@pytest.mark.slow
def test_safetensors_need_neither_gguf_nor_a_cache_folder(tiny_path: Path, tmp_path: Path) -> None:
    """And a cache folder that is named needs no package."""
    program = """
from polarlm.engine import Engine, SamplingParams
said = []
with Engine.load(sys.argv[1], device="cpu", block_size=8, verbose=said.append) as engine:
    print(len(engine.generate([7, 8, 9], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids))
print(*said, sep="\\n")
"""
    count, *said = run_without(["gguf", "platformdirs"], program, tiny_path).splitlines()
    assert count == "5"
    assert any("platformdirs" in line and "POLARLM_CACHE" in line for line in said)
    run_without(["gguf", "platformdirs"], program, tiny_path, POLARLM_CACHE=str(tmp_path))
    assert list(tmp_path.glob("calibration-*"))


def test_a_vocabulary_needs_its_own_library_only(tiny_path: Path, tmp_path: Path) -> None:
    """The others would take megabytes of memory."""
    program = """
from polarlm.model_loaders import load
for path in sys.argv[1:]:
    print(load(path).tokenizer.tokenize("he"))
"""
    missing = ["sentencepiece", "google"]
    assert len(run_without(missing, program, tiny_path, random_model(tmp_path)).splitlines()) == 2


@pytest.mark.slow
def test_what_needs_them_says_so(tmp_path: Path) -> None:
    program = """
from polarlm.engine import Engine, EngineError
for path in (sys.argv[1], None):
    try:
        Engine.load(path, device="cpu")
    except EngineError as error:
        print(error)
"""
    file = random_model(tmp_path)
    of_file, of_demo = run_without(["gguf", "platformdirs"], program, file).splitlines()
    assert str(file) in of_file
    assert "pip install gguf" in of_file
    assert "platformdirs" in of_demo
    assert "POLARLM_CACHE" in of_demo


@pytest.mark.slow
def test_what_a_model_does_not_need_takes_no_memory(tmp_path: Path) -> None:
    """The constants of GGUF files would need a package of 6 MB, a bar that is not shown another of 2, HTTP 25 ms."""
    pytest.importorskip("llvmlite")
    program = """
from polarlm.engine import Engine, SamplingParams
with Engine.load(sys.argv[1], device="cpu", verbose=print) as engine:
    engine.generate([7, 8, 9], SamplingParams(max_tokens=3, ignore_eos=True))
print([name for name in ("gguf", "http.client", "jinja2", "sentencepiece", "tqdm") if name in sys.modules])
"""
    assert run_without([], program, random_model(tmp_path)).splitlines()[-1] == "[]"


def test_everything_else_imports_without_them() -> None:
    run_without(
        ["gguf", "platformdirs"],
        "import polarlm.bench.lab.gpu, polarlm.bench.speed, tests.conftest, polarlm.engine.backends.cuda.ops",
    )


@pytest.mark.slow
def test_without_llvmlite_numpy_computes_and_says_so(tiny_path: Path, tmp_path: Path) -> None:
    program = """
import importlib, pkgutil
from polarlm import engine, model_loaders, server
from polarlm.engine import Engine, SamplingParams
from polarlm.engine.loading import assembly
from polarlm.engine.backends.select import select
assembly.select = lambda device, threads, compiled=True: select(device, threads, compiled)
said = []
with Engine.load(sys.argv[1], device="cpu", block_size=8, verbose=said.append) as loaded:
    print(len(loaded.generate([7, 8, 9], SamplingParams(max_tokens=5, ignore_eos=True)).token_ids))
print(*(line for line in said if "polarlm[cpu]" in line), sep="\\n")
parts = ("engine.backends.native", "engine.backends.cuda.device.cupy_", "engine.jit", "engine.chat.__main__")
needs_more = tuple(f"polarlm.{part}" for part in (*parts, "server.__main__"))
for package in (engine, model_loaders, server):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.startswith(needs_more):
            importlib.import_module(module.name)
"""
    count, *said = run_without(["llvmlite"], program, tiny_path, POLARLM_CACHE=str(tmp_path)).splitlines()
    assert count == "5"
    assert len(said) == 1
    assert "NumPy" in said[0]

"""Kernels of AArch64 under an emulator: equal to NumPy's at the highest level of three CPUs; and the demonstration
model.

The environment variable TESTS_ARM64_PYTHON names a folder with a program `python`, which runs an AArch64 Python with
the engine's dependencies and pytest, on the CPU that TESTS_ARM_CPU names as QEMU does: `.ci/arm64 FOLDER` makes
one. It is 20 to 50 times slower than the machine, so a few cases of each test run, and one CPU answers; with
TESTS_ARM64_SELECTION=all, all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from polarlm.engine.jit.isa import VARIABLE as LEVEL
from polarlm.model_loaders.user_dirs import cache_folder
from tests.jit.emulated import HOST
from tests.programs import ROOT

VARIABLE, ALL = "TESTS_ARM64_PYTHON", "TESTS_ARM64_SELECTION"
LEVEL_OF = {"cortex-a72": "neon", "neoverse-n1": "neon-dot", "neoverse-v1": "neon-i8mm"}
DEMO = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Each operation of a level, products of weights, attention over codes and over full precision, encoding, prompts,
# experts, recurrent layers; and that images are linked and found.
TESTS = [
    "tests/jit/test_level_ops.py",
    "tests/jit/test_images.py::test_code_finds_its_constants_at_any_address",
    "tests/backends/native/test_levels.py::test_the_variable_names_the_highest_level",
    "tests/ops/test_linear.py::test_inputs_are_rounded_to_the_nearest",
    "tests/ops/test_linear.py::test_products_at_some_levels",
    "tests/ops/test_attention_of_steps.py::test_rows_attend_to_their_sequence",
    "tests/ops/test_attention_of_steps.py::test_rows_attend_to_codes",
    "tests/backends/native/codecs/test_tables.py::test_scores",
    "tests/backends/native/codecs/test_tables.py::test_mix",
    "tests/backends/native/codecs/test_tiles.py::test_scores_and_mixes_are_those_of_what_is_decoded",
    "tests/ops/test_encoding.py::test_codes_with_a_metric_in_compiled_kernels",
    "tests/ops/test_encoding.py::test_without_feedback_codes_are_equal",
    "tests/ops/test_encoding.py::test_tiles_without_a_metric_are_those_of_numpy",
    "tests/ops/test_attention_of_prompts.py::test_a_prompt_attends",
    "tests/ops/test_experts.py::test_results_of_experts",
    "tests/ops/test_recurrent.py::test_short_convolutions_and_slots_are_those_of_numpy",
    "tests/ops/test_recurrent.py::test_a_prompt_in_parts_and_the_steps_after_it_are_the_recurrence",
]


def test_every_test_is_there() -> None:
    for file, _, name in (test.partition("::") for test in TESTS):
        module = import_module(file.removesuffix(".py").replace("/", "."))
        assert not name or hasattr(module, name), name


@pytest.fixture(params=LEVEL_OF)
def emulated(request: pytest.FixtureRequest) -> tuple[list[str], dict[str, str], str]:
    """The command of a Python of a CPU, its environment, and the CPU's highest level."""
    if not (folder := os.environ.get(VARIABLE)):
        pytest.skip(f"{VARIABLE} names no folder with an AArch64 Python, for which QEMU is needed")
    variables = {"TESTS_ARM_CPU": request.param, "OPENBLAS_NUM_THREADS": "1", HOST: sys.executable}
    command, environment = [str(Path(folder) / "python")], {**os.environ, **variables}
    environment.pop(LEVEL, None)  # which is one of this machine's
    if subprocess.run([*command, "-c", ""], env=environment, capture_output=True).returncode:
        environment["TESTS_ARM_CPU"] = "max"  # QEMU 7.2 has no Neoverse V1
    return command, environment, LEVEL_OF[request.param]


@pytest.mark.slow
def test_kernels_are_equal_to_numpy(emulated: tuple[list[str], dict[str, str], str]) -> None:
    command, environment, level = emulated
    cases = "" if os.environ.get(ALL) == "all" else "not slow"
    options = ["-p", "no:cacheprovider", "-p", "tests.jit.emulated", "-m", cases, "-k", "not instructions and not cuda"]
    for flag in ("divide by zero", "overflow", "invalid value"):  # QEMU leaves them set behind a product
        options += ["-W", f"ignore:{flag} encountered in matmul:RuntimeWarning"]
    done = subprocess.run([*command, "-m", "pytest", *options, *TESTS], **_run(environment))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert f"highest level: {level}\n" in done.stdout
    print(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_demonstration_model_answers(emulated: tuple[list[str], dict[str, str], str], tmp_path: Path) -> None:
    """With kernels of the CPU's highest level, which are images. A chat's template would need a process of its own."""
    model = cache_folder() / DEMO
    if not model.is_file():
        pytest.skip("the demonstration model is not in the cache folder")
    command, environment, level = emulated
    if os.environ.get(ALL) != "all" and level != LEVEL_OF["neoverse-v1"]:
        pytest.skip(f"one CPU answers, unless {ALL}=all")
    program = f"""
import tests.jit.emulated
from polarlm.engine import Engine, SamplingParams
settings = {{"device": "cpu", "threads": 1, "ctx_size": 256, "cache_type_k": "f16", "cache_type_v": "f16"}}
with Engine.load({str(model)!r}, **settings) as engine:
    print(engine.generate("The capital of France is", SamplingParams(max_tokens=3, temperature=0)).text)
from polarlm.engine.jit.compile import images, library
print(images.AVAILABLE, *(one.level.name for one in library._instances.values()))
"""
    done = subprocess.run([*command, "-c", program], **_run({**environment, "XDG_CACHE_HOME": str(tmp_path)}))
    assert done.returncode == 0, done.stderr[-2000:]
    *answer, kernels = done.stdout.strip().splitlines()  # an answer may have lines
    assert "Paris" in " ".join(answer)
    available, first, *_ = kernels.split()  # what needs no level follows
    assert (available, first) == ("True", level)


def _run(environment: dict[str, str]) -> dict[str, Any]:
    return {"cwd": ROOT, "env": environment, "capture_output": True, "text": True}

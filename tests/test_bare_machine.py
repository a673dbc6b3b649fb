"""The commands for a GPU on a machine without some packages and without a network, run on the emulator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from polarlm.bench import result
from polarlm.bench.lab.gpu import __main__ as gpu_bench
from polarlm.bench.lab.gpu import peer
from polarlm.engine import EngineError
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from scripts import gpu_first, gpu_test
from tests.bench.test_gpu import SIZES, emulated

ROOT = Path(__file__).resolve().parents[1]
LONG = 600  # seconds, on a busy machine
GPU_TESTS = [str(file.relative_to(ROOT)) for file in gpu_test.files()]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != CACHE_VARIABLE} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG, check=False)


def bare_pytest(*arguments: str) -> str:
    """The output of pytest on a bare GPU machine, where it must pass."""
    command = [sys.executable, "-m", "tests.bare_machine", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = run(command, TESTS_GPU="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # all files are imported
def test_every_test_of_a_gpu_is_found() -> None:
    """No file needs a package that is not there when it is imported."""
    collected = bare_pytest("--collect-only", *GPU_TESTS)
    assert all(f"{name}::" in collected for name in GPU_TESTS)


@pytest.mark.slow  # kernels are emulated
def test_the_gpu_s_tests_pass_and_are_written(tmp_path: Path) -> None:
    """Packed weights, which need no package for their format; and whole engines, with both kinds of launches."""
    some = "(activation and 3-True) or Q4_K_M-1] or demonstration or out_of_memory or (random_schedules and f16)"
    some += " or replayed_batches or recurrent_layers or join_and_leave or (begin_ahead and not no)"
    command = ["make", "--no-print-directory", "gpu-test", f"PY={sys.executable} -m tests.bare_machine"]
    results = tmp_path / "results.txt"
    flags = "--files test_linear,test_gpu,test_schedules"
    flags += f" --workers 1 --limit {LONG} --budget {LONG} --results {results} -p no:cacheprovider -k '{some}'"
    done = run([*command, f"ARGS={flags}"])
    assert done.returncode == 0, done.stdout + done.stderr
    said = results.read_text()
    assert said.startswith("Fake GPU, ")
    assert len(re.findall(r"(?m)^test_\w+.*, launches in turn: passed, \d+ s$", said)) == 1
    tests = gpu_test.outcomes(said)
    passed = {test.split("::")[1].split("[")[0] for test, outcome in tests.items() if outcome == "PASSED"}
    assert passed >= {
        "test_replayed_steps_equal_launched_steps",
        "test_replayed_batches_equal_launched_batches",
        "test_replayed_steps_of_recurrent_layers_equal_launched_steps",
        "test_sequences_may_join_and_leave_between_replays",
        "test_steps_that_begin_ahead_have_the_tokens_of_steps_that_wait",
        "test_answers_of_random_schedules_are_those_of_the_cpu",
    }
    reasons = re.findall(r"(?m)^SKIPPED \[\d+\] \S+: (.*)", said)
    expected = r"needs the demonstration model: |needs .* of the GPU's memory, of which |only the emulator sees races"
    assert all(re.match(expected, why) for why in reasons), reasons


def test_without_a_gpu_or_packages_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(device: str, threads: int) -> None:
        raise EngineError("device=cuda: No NVIDIA driver found")

    monkeypatch.setattr(gpu_test, "select", missing)
    assert gpu_test.main([]) == 2
    assert capsys.readouterr().err == "error: device=cuda: No NVIDIA driver found\n"
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert gpu_test.main([]) == 2
    assert capsys.readouterr().err == "error: The tests need the Python packages hypothesis\n"


def test_files_of_tests_beyond_the_budget_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = SimpleNamespace(name="Some GPU", free_memory=lambda: 1 << 30)
    monkeypatch.setattr(gpu_test, "select", lambda *_: (gpu, ""))
    monkeypatch.setattr(gpu_test, "_runs", lambda: [([Path(name)], "", {}) for name in ("test_one.py", "test_two.py")])
    monkeypatch.setattr(gpu_test, "_run", lambda *arguments: limits.append(arguments[4]) or time.sleep(0.02) or 0)
    limits: list[float] = []
    assert gpu_test.main(["--budget", "0.01", "--results", str(tmp_path / "results.txt")]) == 0
    assert len(limits) == 1
    assert limits[0] <= 0.01
    assert (tmp_path / "results.txt").read_text().endswith("\ntest_two: left out, since the time was over\n")
    assert "test_two: left out" in capsys.readouterr().out


def test_what_pytest_says_of_a_test_is_read() -> None:
    """In one process and in several; a summary says it again."""
    said = """tests/ops/test_a.py::test_one[a b] PASSED                 [ 33%]
tests/ops/test_a.py::test_two SKIPPED (needs more memory)    [ 66%]
[gw1] [100%] FAILED tests/cuda/test_b.py::test_three[1-x y]
FAILED tests/cuda/test_b.py::test_three[1-x y] - assert 1 == 2
"""
    assert gpu_test.outcomes(said) == {
        "tests/ops/test_a.py::test_one[a b]": "PASSED",
        "tests/ops/test_a.py::test_two": "SKIPPED",
        "tests/cuda/test_b.py::test_three[1-x y]": "FAILED",
    }


@pytest.mark.slow
def test_a_new_gpu_is_measured_by_one_command(tmp_path: Path) -> None:
    """A program that fails, here for want of a package that writes models, ends no other."""
    command = ["make", "--no-print-directory", "gpu-first", f"PY={sys.executable} -m tests.bare_machine"]
    done = run([*command, f"ARGS=--only requests,memory --results {tmp_path}"])
    assert done.returncode == 2, done.stdout + done.stderr  # make's
    assert "No module named 'gguf'" in (tmp_path / "model.txt").read_text()
    _, requests, memory = done.stdout.splitlines()
    assert requests.startswith("requests: left out, since the model could not be written")
    assert memory.startswith("memory: left out, since CUDA's compute-sanitizer is not there")


def test_the_programs_of_a_first_run_fit_into_nine_minutes(tmp_path: Path, tiny_path: Path) -> None:
    tests, *_ = programs = gpu_first.programs(tmp_path, tiny_path)
    assert sum(one.seconds + gpu_first.AFTER for one in programs) <= 9 * 60
    assert not gpu_test._parser().parse_known_args(tests.command[1:])[1]


@pytest.mark.slow  # kernels are emulated
def test_the_programs_of_a_first_run_leave_results(tmp_path: Path, tiny_path: Path) -> None:
    _, *measured, _ = gpu_first.programs(tmp_path, tiny_path)
    for program in measured:
        few = "--only", "kernels", "--contexts", "64", "--budget", "1"
        assert gpu_bench.main([*program.command[1:], *few], emulated(), SIZES) == 0
        assert [*result.read(tmp_path / f"{program.name}.json").parts("device")]


@pytest.mark.slow  # kernels are emulated
def test_the_gpu_s_benchmark_needs_neither_packages_nor_a_network(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "gpu-bench", f"PY={sys.executable} -m tests.bare_machine"]
    output = tmp_path / "out.json"
    flags = "--only prompts,kernels --contexts 64 --batches 1 --types ring4/ring3.5,f16 --budget 100000"
    done = run([*command, f"ARGS={flags} --output {output}"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    results = result.read(output)
    assert results["machine"]["gpu"]["name"] == "Fake GPU"
    assert all([*results.parts(prefix=part)] for part in ("device", "attention", "product of", "encoding"))
    assert {one["what"].split()[0] for one in results["not_measured"]} == {"prompt"}
    assert all("there is no model: " in one["why"] for one in results["not_measured"])
    # No PyTorch, or one that knows nothing of the stand-in.
    notes = {row.failure for row in results.rows("seconds") if row.contestant in peer.NAMES}
    assert notes in ({"PyTorch is not installed"}, {"PyTorch sees no GPU"})

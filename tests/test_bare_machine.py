"""The commands for a GPU on a machine without some packages and without a network, run on the emulator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polarlm.engine import EngineError
from polarlm.model_loaders.user_dirs import CACHE_VARIABLE
from scripts import gpu_test, sanitize
from tests.bare_machine import MISSING
from tests.cuda.gpu_sizes import needs
from tests.written_results import OVER

ROOT = Path(__file__).resolve().parents[1]
LONG = 600  # seconds, on a busy machine
GPU_TESTS = [str(file.relative_to(ROOT)) for file in gpu_test.files()]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != CACHE_VARIABLE} | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LONG, check=False)


def bare_pytest(*arguments: str) -> str:
    """The output of pytest on a bare GPU machine, where it must pass."""
    command = [sys.executable, "-m", "tests.bare_machine", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = run(command, POLARLM_TEST_GPU="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
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


@pytest.mark.slow
def test_every_test_of_a_gpu_is_found() -> None:
    """No file needs a package that is not there when it is imported."""
    found = bare_pytest("--collect-only", *GPU_TESTS)
    assert all(f"{name}::" in found for name in GPU_TESTS)


def test_every_test_that_can_run_on_a_gpu_does() -> None:
    """In the order of importance; test files of the emulator and of texts alone are left out."""
    folder = ROOT / "tests" / "cuda"
    names = [file.stem for file in gpu_test.files()]
    assert names[: len(gpu_test.FIRST)] == [*gpu_test.FIRST]
    assert len({*names}) == len(names)
    on_device = re.compile(r"open_device\b|tests\.cuda\.programs|run_naive")
    others = {"test_cupy_cards", "test_cupy_device"}  # which have a function of their own of that name
    expected = {file.stem for file in folder.glob("test_*.py") if on_device.search(file.read_text(encoding="utf-8"))}
    assert {*names} == expected - others


def test_processes_share_the_memory_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    found = [gpu_test.workers_for(free << 30) for free in (1, 5, 12, 23, 79)]
    assert found == [1, 1, 4, 7, 12]
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert gpu_test.workers_for(79 << 30) == 4


def test_what_does_not_fit_the_gpu_is_skipped_with_the_reason() -> None:
    """Two processes share a GPU of 8 GB. A large model of bfloat16 takes 3.2 GiB."""
    needs(int(3.2 * 2**30), 7 << 30)
    with pytest.raises(pytest.skip.Exception, match=r"needs 5\.2 GiB of the GPU's memory, of which 4\.0 GiB are free"):
        needs(int(4.2 * 2**30), 4 << 30)


# Runs the program under test with memcheck, and finds a race in it with racecheck.
SANITIZER = """#!/bin/sh
test "$2" = memcheck || { echo "a race in a kernel"; exit 9; }
shift 4
exec "$1" -m tests.bare_machine "$2" "$3"
"""


@pytest.mark.slow
def test_the_gpu_s_tests_pass_and_are_written(tmp_path: Path) -> None:
    """Some of each kind: kernels alone, ops, a model; packed weights need no package for their format."""
    some = "rms_norm_is or parts_of_the_inputs or (activation and q4_k and -12-)"
    some += " or (random_schedules and f16) or Q4_K_M-1] or demonstration or out_of_memory"
    some += " or (long_context and (f16 or ring4/)) or missing_order or (polarpair_encoder and m4n4)"
    some += " or (large and q4_k and (8 or launched))"
    command = ["make", "--no-print-directory", "gpu-test", f"PY={sys.executable} -m tests.bare_machine"]
    results = tmp_path / "results.jsonl"
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(SANITIZER)
    sanitizer.chmod(0o755)
    flags = f"--workers 1 --budget {LONG} --sanitize {LONG} --results {results} -p no:cacheprovider -k '{some}'"
    done = run([*command, f"ARGS={flags}"], PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    first, *lines, memcheck, racecheck = [json.loads(line) for line in results.read_text().splitlines()]
    assert first["gpu"] == "Fake GPU"
    assert memcheck == {"sanitizer": "memcheck", "result": "passed", "why": ""}, done.stdout
    assert racecheck == {"sanitizer": "racecheck", "result": "failed", "why": "a race in a kernel"}
    assert done.returncode != 0
    about, *again = [json.loads(line) for line in results.with_suffix(".in-turn.jsonl").read_text().splitlines()]
    assert about["launches"] == "in turn"
    assert {line["test"] for line in again if line["result"] == "passed"} < {line["test"] for line in lines}
    assert {line["test"].split("::")[1].split("[")[0] for line in again if line["result"] == "passed"} >= {
        "test_replayed_steps_equal_launched_steps",
        "test_answers_of_random_schedules_are_those_of_the_cpu",
    }
    assert {line["test"].split("::")[0].split("/")[-1] for line in lines} >= {"test_packed_weights.py"}
    skipped = {line["test"].split("::")[1]: line["why"] for line in lines if line["result"] != "passed"}
    demonstration = skipped.pop("test_the_text_equals_that_of_the_cpu[demonstration-The old lighthouse]")
    assert demonstration.startswith("needs the demonstration model: The cache folder is not known without")
    of_large_models = {why for why in skipped.values() if re.match(r"needs .* of the GPU's memory, of which ", why)}
    assert of_large_models, "the stand-in has 1 GiB"
    assert set(skipped.values()) - of_large_models == {"only the emulator sees races"}, skipped


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


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("script", "result", "why"),
    [
        (None, "skipped", "compute-sanitizer is not installed"),
        ("echo ERROR SUMMARY: 0 errors", "passed", ""),
        ("echo Invalid write; exit 9", "failed", "Invalid write"),
        ("echo begun; exec sleep 60", "skipped", "not finished after 1 s; begun"),
    ],
)
def test_a_sanitizer_has_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, result: str, why: str
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sanitize, "find", lambda name: script and str(program))
    assert [*sanitize.sanitize(1)] == [(tool, result, why) for tool in ("memcheck", "racecheck")]


PROGRAM = """
import pytest

def test_one():
    pass

def test_two():
    assert 1 == 2, "they differ"

def test_three():
    pytest.skip("the moon is full")
"""


@pytest.mark.slow
def test_results_are_written_as_they_come_and_can_be_resumed(tmp_path: Path) -> None:
    program, results = tmp_path / "test_program.py", tmp_path / "results.jsonl"
    program.write_text(PROGRAM)

    def lines(*flags: str) -> list[tuple[str, str, str]]:
        results.unlink(missing_ok=True)
        plugins = ("-p", "no:cacheprovider", "-p", "xdist.plugin", "-p", "tests.written_results")
        command = [sys.executable, "-m", "pytest", str(program), *plugins, "--results", str(results), *flags]
        run(command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        found = [json.loads(line) for line in results.read_text().splitlines()]
        return [(one["test"].split("::")[1], one["result"], one.get("why", "")) for one in found]

    earlier = tmp_path / "earlier.jsonl"
    assert sorted(line[:2] for line in lines("-n", "2", "--maxschedchunk", "2")) == [
        ("test_one", "passed"),
        ("test_three", "skipped"),
        ("test_two", "failed"),
    ]
    results.rename(earlier)
    with earlier.open("a") as file:
        file.write('{"test": "cut o')
    again = lines("--but-not", str(earlier))
    assert [line[:2] for line in again] == [("test_two", "failed"), ("test_three", "skipped")]
    assert "they differ" in again[0][2]
    assert again[1][2] == "the moon is full"
    assert {line[1:] for line in lines("--until", "1")} == {("skipped", OVER)}


@pytest.mark.slow
def test_the_gpu_s_benchmark_needs_neither_packages_nor_a_network(tmp_path: Path) -> None:
    command = ["make", "--no-print-directory", "gpu-bench", f"PY={sys.executable} -m tests.bare_machine"]
    output = tmp_path / "out.json"
    flags = f"--output {output} --layers 1 --contexts 64 --batches 1 --types f16,ring4/ring3.5 --budget 100000"
    done = run([*command, f"ARGS={flags}"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "The speed of a whole model was not measured: pass one as WEIGHTS=PATH." in done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    assert found["machine"]["gpu"]["name"] == "Fake GPU"
    assert not found["not_measured"]
    assert all(found[part] for part in ("limits", "attention", "steps", "matrices", "prefill", "encoding"))
    # No PyTorch, or one that knows nothing of the stand-in.
    notes = {peer["note"] for peer in found["attention_peers"]}
    assert notes in ({"PyTorch is not installed"}, {"PyTorch sees no GPU"})

"""`make gpu-hour`: every part with and without its tool, what is cut off, and how an interrupted run goes on.

The GPU is CuPy's stand-in, in all processes; ncu and compute-sanitizer are scripts that run the program under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts import counters, gpu_hour
from scripts.gpu_hour import CUT_OFF, FAILED, PASSED, SKIPPED, Hour, Result

ROOT = Path(__file__).resolve().parents[1]
LONG = 900  # seconds, on a busy machine

# Takes the options of ncu away, runs the program, and writes counters of what it says that it has launched.
NCU = """#!/bin/sh
while [ "$1" != -m ]; do
    [ "$1" = --log-file ] && log=$2
    python=$1
    shift
done
"$python" "$@" || exit 1
exec "$python" "$0.py" "$3" "$log"
"""
WRITE_COUNTERS = """
import csv, json, sys
with open(sys.argv[2], "w") as file:
    file.write("==PROF== Connected to process 1\\n")
    out = csv.writer(file, quoting=csv.QUOTE_ALL)
    out.writerow(["ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"])
    for number, line in enumerate(open(sys.argv[1])):
        kernel = json.loads(line)["kernel"] + "_kernel"
        out.writerow([number, kernel, "gpu__time_duration.sum", "nsecond", "12,340"])
        out.writerow([number, kernel, "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "81.25"])
        out.writerow([number, kernel, "lts__throughput.avg.pct_of_peak_sustained_elapsed", "%", "n/a"])
"""
SANITIZER = '#!/bin/sh\nshift 4\nexec "$@"\n'


def tool(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """Of processes on a machine with the stand-in for a GPU, whose tools are in a folder."""
    tool(folder, "sitecustomize.py", "from tests.bare_machine import prepare\nprepare()\n")
    paths = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return {**os.environ, **paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CUDA_HOME": str(folder)}


def state(folder: Path) -> dict[str, str]:
    parts = json.loads((folder / "hour.json").read_text(encoding="utf-8"))["parts"]
    return {name: part["result"] for name, part in parts.items()}


def wait_for_end(process: psutil.Process) -> None:
    """Until it is gone, or nobody has asked for its exit code yet; another process may have its number by now. An end
    by a signal takes a moment."""
    with contextlib.suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


def begun(folder: Path, *passed: str) -> Path:
    """The folder of a run whose parts have passed."""
    folder.mkdir()
    of = {name: {"result": PASSED, "why": "before", "seconds": 1.0} for name in passed}
    (folder / "hour.json").write_text(json.dumps({"gpu": "Fake GPU", "parts": of}), encoding="utf-8")
    return folder


@pytest.mark.slow
def test_an_hour_passes_and_its_table_is_last(tmp_path: Path) -> None:
    tools = tool(tool(tmp_path / "tools", "ncu", NCU), "compute-sanitizer", SANITIZER)
    (tools / "ncu.py").write_text(WRITE_COUNTERS)
    tests = "-p no:cacheprovider -k 'rms_norm_is or (replayed_steps_equal and Q4_K_M-1])'"
    times = "--layers 1 --contexts 64 --batches 1 --types f16"
    folder = begun(tmp_path / "hour")
    flags = f'''--minutes 60 --resume {folder} --tests "{tests}" --times "{times}"'''
    command = ["make", "--no-print-directory", "gpu-hour", f"PY={sys.executable}", f"ARGS={flags}"]
    made = {"cwd": ROOT, "env": environment(tools), "capture_output": True, "text": True, "timeout": LONG}
    done = subprocess.run(command, check=False, **made)
    assert done.returncode == 0, done.stdout + done.stderr
    assert state(folder) == dict.fromkeys(gpu_hour.PARTS, PASSED), done.stdout
    counted = next(line for line in done.stdout.splitlines() if line.startswith("| attention"))
    assert [cell.strip() for cell in counted.split("|")][4:9] == ["decode_attention", "12.3", "81.2", "—", "—"]
    assert "Not predicted: Fake GPU is none of 3060, " in done.stdout.split("Encoding, with metrics")[1]
    assert (folder / "report.md").read_text(encoding="utf-8") in done.stdout
    again = subprocess.run(command, check=False, **made)
    assert again.returncode == 0
    assert "at most" not in again.stdout, "all parts had passed"


def counted(folder: Path, script: str | None, monkeypatch: pytest.MonkeyPatch, seconds: float = LONG) -> Result:
    """What the part with counters says; script: of ncu."""
    path = str(tool(folder, "ncu", script) / "ncu") if script else None
    monkeypatch.setattr(counters, "find", lambda program: path)
    return gpu_hour.kernel_counters(hour(folder), seconds)


def hour(folder: Path, **other: Any) -> Hour:
    return Hour(folder, 60, (), (), "Fake GPU", 1, None)


@pytest.mark.parametrize(
    ("script", "result", "why"),
    [
        (None, SKIPPED, "ncu is not installed"),
        ("#!/bin/sh\necho no such metric; exit 3", FAILED, "no such metric"),
        (
            "#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1",
            SKIPPED,
            "the driver lets only an administrator read counters (ERR_NVGPUCTRPERM)",
        ),
        ("#!/bin/sh\ntrue", PASSED, "0 launches counted"),
    ],
)
def test_counters_have_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, result: str, why: str
) -> None:
    found = counted(tmp_path, script, monkeypatch)
    assert (found.result, found.why.splitlines()[-1]) == (result, why)


def test_what_a_part_has_begun_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch may have been counted and not written; those that were written are in the table."""
    script = f"""#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
cat > "$2" <<END
"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","gemv_kernel","gpu__time_duration.sum","nsecond","2000"
END
for file in "$@"; do :; done
echo '{{"part": "qkv", "weights": "bf16", "rows": 1, "kernel": "gemv"}}' > "$file"
echo '{{"part": "out", "weights": "bf16", "rows": 1, "kernel": "gemv"}}' >> "$file"
sh -c 'echo $$ > {tmp_path}/process; exec sleep {LONG}'
"""
    for seconds in (2, 20, 200):  # it may begin late
        found = counted(tmp_path, script, monkeypatch, seconds=seconds)
        if (tmp_path / "process").exists():
            break
    assert (found.result, found.why) == (CUT_OFF, "1 launches counted")
    with contextlib.suppress(psutil.NoSuchProcess):
        wait_for_end(psutil.Process(int((tmp_path / "process").read_text())))
    shown = counters.table(tmp_path / "counters.csv", tmp_path / "launches.jsonl").splitlines()
    assert [[cell.strip() for cell in line.split("|")][1:6] for line in shown[4:]] == [
        ["qkv", "bf16", "1", "gemv", "2.0"]
    ]
    (tmp_path / "launches.jsonl").write_text('{"part": "a", "weights": "b", "rows": 1, "kernel": "narrow"}\n')
    assert "are not those of the launches" in counters.table(tmp_path / "counters.csv", tmp_path / "launches.jsonl")


def parts(monkeypatch: pytest.MonkeyPatch, *results: str) -> list[tuple[str, float]]:
    """Parts that end at once; what is called, with its seconds."""
    called: list[tuple[str, float]] = []

    def part(name: str, result: str) -> Callable[[Hour, float], Result]:
        def work(of: Hour, seconds: float) -> Result:
            called.append((name, seconds))
            if result == "interrupted":
                raise KeyboardInterrupt
            return Result(result, result)

        return work

    monkeypatch.setattr(
        gpu_hour, "PARTS", {name: (part(name, one), 2.0) for name, one in zip("abc", results, strict=True)}
    )
    return called


def test_each_part_gets_its_share_of_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that ends at once leaves its time to those after it; a second run has what has not passed."""
    called, results = parts(monkeypatch, PASSED, CUT_OFF, PASSED), dict[str, Result]()
    gpu_hour.run_parts(hour(tmp_path), results)
    assert called == [
        (name, pytest.approx(seconds, rel=0.1)) for name, seconds in zip("abc", (1200, 1800, 3600), strict=True)
    ]
    assert state(tmp_path) == {"a": PASSED, "b": CUT_OFF, "c": PASSED}
    assert gpu_hour.results_of(tmp_path, "Fake GPU") == results
    del called[:]
    gpu_hour.run_parts(hour(tmp_path), results)
    assert [name for name, _ in called] == ["b"]


def test_a_part_that_is_interrupted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts(monkeypatch, PASSED, "interrupted", PASSED)
    with pytest.raises(KeyboardInterrupt):
        gpu_hour.run_parts(hour(tmp_path), {})
    assert state(tmp_path) == {"a": PASSED, "b": CUT_OFF}


@pytest.mark.slow
@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_hour_goes_on(tmp_path: Path, ended_by: signal.Signals) -> None:
    """What it has begun ends with it. Parts without their tools are skipped."""
    tools, folder = tmp_path / "tools", begun(tmp_path / "hour", "tests", "times", "other launches", "sanitizer")
    os.mkfifo(tmp_path / "begun")
    tool(tools, "ncu", f"#!/bin/sh\necho $$ > {tmp_path}/begun\nexec sleep {LONG}\n")
    command = [sys.executable, "-m", "scripts.gpu_hour", "--resume", str(folder)]
    given = {"cwd": ROOT, "env": environment(tools), "text": True}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given)
    child = psutil.Process(int((tmp_path / "begun").read_text()))
    running.send_signal(ended_by)
    _, said = running.communicate(timeout=LONG)
    assert running.returncode == 130
    assert f"This goes on: make gpu-hour ARGS='--resume {folder}'" in said
    wait_for_end(child)
    assert state(folder)["counters"] == CUT_OFF
    tool(tools, "ncu", "#!/bin/sh\nexit 0\n")
    done = subprocess.run(command, capture_output=True, timeout=LONG, check=False, **given)
    assert done.returncode == 0, done.stderr
    assert state(folder) == dict.fromkeys(gpu_hour.PARTS, PASSED)
    assert "tests: " not in done.stdout
    assert "Nothing was timed." in done.stdout


def test_times_go_on_after_a_file_that_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is ended may be writing. What was written whole is taken over."""
    given: list[list[str]] = []

    def run(self: Hour, part: str, seconds: float, command: list[str], shown: Path) -> int | None:
        given.append(command)
        output = Path(command[command.index("--output") + 1])
        output.write_text('{"complete": false, "done": ["limits"], "not_measured": [], "model": {"la', encoding="utf-8")
        self.file("times.log").write_text("killed")
        if len(given) > 1:
            output.write_text('{"complete": false, "done": ["limits"], "not_measured": []}', encoding="utf-8")
        return None

    monkeypatch.setattr(Hour, "run", run)
    found = [gpu_hour.times(hour(tmp_path), 100) for _ in range(3)]
    assert [one.result for one in found] == [CUT_OFF] * 3
    assert found[1].why == "1 measurements, 0 not made"
    assert ["--resume" in command for command in given] == [False, False, True]
    assert all(command[command.index("--budget") + 1] == "85" for command in given)


def test_failures_are_named_and_the_last_run_of_a_test_counts(tmp_path: Path) -> None:
    lines = [{"test": f"a.py::test_{n}", "result": FAILED} for n in range(30)]
    lines += [{"test": "a.py::test_3", "result": PASSED}]
    (tmp_path / "tests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"test": "cut')
    text = gpu_hour.format_report(hour(tmp_path), {"tests": Result(FAILED, "1 passed\n29 failed", 3.0)})
    failed = text.split("Failed tests\n\n")[1].splitlines()
    assert failed[2:4] == ["- a.py::test_2", "- a.py::test_4"]
    assert failed[20] == "- and 9 more"
    assert "29 failed |" in text


@pytest.mark.parametrize(
    ("written", "sentence"),
    [(None, "there is no hour.json of an earlier run"), ('{"gpu": "Other", "parts": {}}', "has results of Other")],
)
def test_only_an_earlier_run_on_this_gpu_goes_on(tmp_path: Path, written: str | None, sentence: str) -> None:
    if written:
        (tmp_path / "hour.json").write_text(written)
    with pytest.raises(gpu_hour.EngineError, match=sentence):
        gpu_hour.results_of(tmp_path, "Fake GPU")


def test_without_a_gpu_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(device: str, threads: int) -> None:
        raise gpu_hour.EngineError("device=cuda: No NVIDIA driver found")

    monkeypatch.setattr(gpu_hour, "select", missing)
    assert gpu_hour.main([]) == 2
    assert capsys.readouterr().err == "error: device=cuda: No NVIDIA driver found\n"

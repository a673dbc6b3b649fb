"""`make gpu-test`: runs the kernels' tests on the GPU of this machine, the most telling first.

Files run in groups, each with processes of its own, which take seconds to start and are ended after --limit seconds.
The result file gets what pytest says of each test as it ends, and a line for the machine and for each group, so that a
run that is cut off can be read. Arguments that are not listed go to pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polarlm.bench.result import LOCAL, slug
from polarlm.engine import EngineError
from polarlm.engine.backends.cuda.device import overlap
from polarlm.engine.backends.select import select

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ROOT / "tests" / "ops", ROOT / "tests" / "cuda"
# Every op; packed weights; whole models; what only a GPU can show; whole engines. Then single kernels in all variants.
_OPS = ("test_linear", "test_heads", "test_rows", "test_stores_emulated", "test_recurrent")
_MODELS = ("test_packed_model", "test_model_emulated")
FIRST = (*_OPS, *_MODELS, "test_gpu", "test_schedules", "test_family_scores")
LAST = ("test_gpu_large",)  # tens of seconds alone
# Whole models and engines: where the GPU has overlapped launches, they run with these and with launches in turn.
AGAIN = (*_MODELS, "test_gpu", "test_schedules")
# What a file has that runs kernels on the device. Tests of CuPy's stand-in have a device of their own.
_ON_DEVICE, _STAND_IN = re.compile(r"open_device\b|\bCUDA\b|tests\.cuda\.programs|run_naive"), "test_cupy_"
_MOST_WORKERS, _WORKER_BYTES = 12, 3 << 30  # processes of a file, and the GPU's memory for each
_NEEDED = ("pytest", "hypothesis")
_PASSED = (0, 5)  # pytest's exit codes; 5: -k has chosen no test of the file
# What pytest says of a test: in one process, and in several.
_OUTCOME = re.compile(
    r"^(?P<test>tests/\S+::.*?) (?P<outcome>PASSED|FAILED|SKIPPED|ERROR)\b|"
    r"^\[gw\d+\] \[ *\d+%\] (?P<outcome_there>[A-Z]+) (?P<test_there>tests/\S+::.*?) *$",
    re.MULTILINE,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all tests passed, 1 if one failed or was ended, 2 where nothing can run, 130 after Ctrl-C."""
    options, for_pytest = _parser().parse_known_args(argv)
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(f"error: The tests need the Python packages {' and '.join(missing)}", file=sys.stderr)
        return 2
    try:
        ops, _ = select("cuda", 0)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    name = f"gpu-tests-{slug(ops.name)}-{time.strftime('%Y-%m-%d-%H%M%S')}.txt"
    results = options.results or LOCAL / name
    results.parent.mkdir(parents=True, exist_ok=True)
    _write(results, f"{ops.name}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {' '.join(for_pytest)}")
    print(f"{ops.name}: results go to {results} as they come", flush=True)
    arguments = ["-vv", "-rsP", *_processes(options.workers or workers_for(ops.free_memory())), *for_pytest]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code, end = 0, time.monotonic() + options.budget
    try:
        for group, launches, environment in _runs():
            names = options.files.split(",") if options.files else [file.stem for file in group]
            if not (chosen := [file for file in group if file.stem in names]):
                continue
            if (left := end - time.monotonic()) > 0:
                code |= _run(chosen, launches, arguments, results, min(left, options.limit), environment)
            else:
                _tell(results, chosen, launches, "left out, since the time was over")
    except KeyboardInterrupt:
        code = 130
    finally:
        said = outcomes(results.read_text(encoding="utf-8", errors="replace"))
        for test, outcome in said.items():
            if outcome in ("FAILED", "ERROR"):
                print(f"{outcome.lower()}: {test}")
        counts = Counter(said.values())
        print(f"{', '.join(f'{count} {name.lower()}' for name, count in counts.items())}; written to {results}")
    return code


def outcomes(said: str) -> dict[str, str]:
    """Each test of what pytest has said, and its outcome."""
    found = (match.groupdict() for match in _OUTCOME.finditer(said))
    return {one["test"] or one["test_there"]: one["outcome"] or one["outcome_there"] for one in found}


def _write(results: Path, line: str) -> None:
    with results.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def _tell(results: Path, group: Sequence[Path], launches: str, result: str) -> None:
    """Write and print what became of the tests of some files."""
    names = ", ".join(file.stem for file in group)
    line = f"{names}{f', launches {launches}' if launches else ''}: {result}"
    _write(results, line)
    print(line, flush=True)


def _run(
    group: Sequence[Path],
    launches: str,
    arguments: Sequence[str],
    results: Path,
    limit: float,
    environment: Mapping[str, str],
) -> int:
    """Return 0 if no test of these files failed, else 1."""
    began = time.monotonic()
    command = [*python("scripts.gpu_test"), "-m", "pytest", *map(str, group), *arguments]
    code = wait(start(command, {"TESTS_GPU": "1", "PYTHONUNBUFFERED": "1", **environment}, results), limit)
    result = "ended" if code is None else "passed" if code in _PASSED else "failed"
    _tell(results, group, launches, f"{result}, {time.monotonic() - began:.0f} s")
    return int(result != "passed")


def start(command: Sequence[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """A process with further variables of the environment, in a group of its own. output: a file to which it adds what
    it prints, so that a run that is cut off can be read."""
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def wait(running: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit status of a process; None if it was ended, with its children, after `limit` seconds."""
    try:
        return running.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(running)


def end(running: subprocess.Popen[bytes]) -> None:
    """End a process and its children."""
    if running.poll() is None:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def python(program: str) -> list[str]:
    """The command that has started this process, up to its program: Python and its flags."""
    return sys.orig_argv[: sys.orig_argv.index(program) - 1] if program in sys.orig_argv else [sys.executable]


def _runs() -> Iterator[tuple[list[Path], str, Mapping[str, str]]]:
    """Each group of files, the kind of its launches if that is not the default, and its environment variables."""
    from polarlm.engine.backends.cuda.device.cupy_device import CupyDevice, can_overlap  # it needs CuPy

    first, last, again = ([file for file in files() if file.stem in names] for names in (FIRST, LAST, AGAIN))
    yield first, "", {}
    yield [file for file in files() if file not in (*first, *last)], "", {}
    if overlap.VARIABLE not in os.environ and can_overlap():
        value, launches = ("0", "in turn") if CupyDevice().overlaps else ("1", "overlapped")
        yield again, launches, {overlap.VARIABLE: value}
    yield last, "", {}


def files() -> list[Path]:
    """The files of tests that run on a GPU, in the order of their importance."""
    paths = {
        path.stem: path
        for path in sorted(path for folder in FOLDERS for path in folder.glob("test_*.py"))
        if _ON_DEVICE.search(path.read_text(encoding="utf-8")) and not path.stem.startswith(_STAND_IN)
    }
    return [paths[name] for name in dict.fromkeys((*FIRST, *paths, *LAST))]


def workers_for(free: int) -> int:
    """The number of processes for so many free bytes on the GPU."""
    return max(1, min(_MOST_WORKERS, os.cpu_count() or 1, free // _WORKER_BYTES))


def _processes(count: int) -> list[str]:
    """pytest's arguments for tests in several processes: most of their time goes into compiling kernels."""
    if count < 2:
        return []
    if importlib.util.find_spec("xdist") is None:
        print("The Python package pytest-xdist is missing: the tests run in one process, which takes longer")
        return []
    return ["-n", str(count), "--maxschedchunk", "2"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_test", description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, help="processes; as many as the GPU's free memory is enough for")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="most for each group of files")
    parser.add_argument("--budget", type=float, default=540, metavar="SECONDS", help="most for all files")
    parser.add_argument("--files", metavar="NAME,NAME", help="only these files of tests, such as test_gpu")
    parser.add_argument("--results", type=Path, help="file of the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())

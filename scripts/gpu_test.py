"""`make gpu-test`: runs the kernels' tests on the GPU of this machine, the most telling first.

Then a small pass runs under compute-sanitizer, where it is installed.
Every result goes to a file as it comes, so that a run that is cut off can be read, and gone on with by --resume.
Arguments that are not listed go to pytest.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from polarlm.bench import report
from polarlm.engine import EngineError
from polarlm.engine.backends.cuda.device import overlap
from polarlm.engine.backends.select import select
from scripts.sanitize import sanitize

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "cuda"
# Every op; packed weights; whole models; what only a GPU can show; whole engines. Then single kernels in all variants.
_OPS = ("test_ops_emulated", "test_packed_weights", "test_recurrent")
_MODELS = ("test_packed_model", "test_model_emulated")
FIRST = (*_OPS, *_MODELS, "test_gpu", "test_gpu_large", "test_schedules", "test_family_scores")
# They would show nothing about the GPU: tests of the compiler for other architectures, of the emulator, of CuPy's
# stand-in, of threads, texts and counts.
NEVER = (
    *(
        "test_cards",
        "test_compile",
        "test_cupy_cards",
        "test_cupy_device",
        "test_docs",
        "test_host_experts",
        "test_memory",
        "test_traffic",
        "test_modules",
        "test_overlap",
        "test_several_cards",
    ),
    *("test_warm_up", "test_tracing", "test_shapes", "test_source"),
)
# Whole models and engines: where the GPU has overlapped launches, they run with these and with launches in turn.
AGAIN = (*_MODELS, "test_gpu", "test_schedules")
_MOST_WORKERS = 12
_WORKER_BYTES = 3 << 30  # of the GPU's memory, for each process
_BUDGET = 340  # seconds
_AGAIN_SECONDS = 60  # seconds of them that are left to tests with the other kind of launches
_SANITIZED = 60  # seconds of each tool of compute-sanitizer
_NEEDED = ("pytest", "hypothesis")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns pytest's exit code, 1 if the sanitizer finds something, or 2 where nothing can run."""
    options, for_pytest = _parser().parse_known_args(argv)
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(f"error: The tests need the Python packages {' and '.join(missing)}", file=sys.stderr)
        return 2
    try:
        ops, _ = select("cuda", 0)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    import pytest

    from tests.written_results import write

    os.environ["POLARLM_TEST_GPU"] = "1"
    results = options.results or _results(ops.name)
    write(results, {"gpu": ops.name, "started": time.strftime("%Y-%m-%d %H:%M:%S"), "pytest": for_pytest})
    print(f"{ops.name}: results go to {results} as they come; no test begins after {options.budget} s")
    end, other = time.time() + options.budget, other_launches()
    first_end = end - min(_AGAIN_SECONDS, options.budget / 2) if other else end
    workers = options.workers or workers_for(ops.free_memory())
    limits = pytest_arguments(results, first_end, options.resume, workers)
    code = int(pytest.main([*map(str, files()), *limits, *for_pytest]))
    if other:
        os.environ[overlap.VARIABLE], launches = other
        path = results.with_suffix(f".{launches.replace(' ', '-')}.jsonl")
        write(path, {"gpu": ops.name, "launches": launches, "pytest": for_pytest})
        print(f"Again with {overlap.VARIABLE}={other[0]}: results go to {path}")
        some = [str(file) for file in files() if file.stem in AGAIN]
        code = int(pytest.main([*some, *pytest_arguments(path, end, None, workers), *for_pytest])) or code
        del os.environ[overlap.VARIABLE]
    for tool, result, why in sanitize(options.sanitize):
        write(results, {"sanitizer": tool, "result": result, "why": why})
        print(f"compute-sanitizer {tool}: {result}" + (f": {why}" if why else ""), flush=True)
        code = code or int(result == "failed")
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_test", description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, help="processes; as many as the GPU's free memory is enough for")
    parser.add_argument("--budget", type=int, default=_BUDGET, help="seconds after which no test begins")
    parser.add_argument(
        "--sanitize", type=int, default=_SANITIZED, metavar="SECONDS", help="most for each tool of compute-sanitizer"
    )
    parser.add_argument("--results", type=Path, help="file of the results, one line of JSON for each test")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="leave out tests that passed in these results")
    return parser


def other_launches() -> tuple[str, str] | None:
    """The value of `overlap.VARIABLE` for the launches that are not the GPU's default, and their name.

    None where the GPU has no overlapped launches, or the environment says which ones all tests are to use.
    """
    from polarlm.engine.backends.cuda.device.cupy_device import CupyDevice, can_overlap  # it needs CuPy

    if overlap.VARIABLE in os.environ or not can_overlap():
        return None
    return ("0", "in turn") if CupyDevice().overlaps else ("1", "overlapped")


def files() -> list[Path]:
    """The files of tests that run on a GPU, in the order of their importance."""
    there = {file.stem: file for file in sorted(FOLDER.glob("test_*.py"))}
    left_out = {name for name in there if name in NEVER or name.startswith("test_emulator_")}
    return [there[name] for name in dict.fromkeys((*FIRST, *there)) if name not in left_out]


def workers_for(free: int) -> int:
    """The number of processes for so many free bytes on the GPU."""
    return max(1, min(_MOST_WORKERS, os.cpu_count() or 1, free // _WORKER_BYTES))


def pytest_arguments(results: Path, until: float, earlier: Path | None, workers: int) -> list[str]:
    """pytest's arguments for a run that may be cut off: see `tests.written_results`."""
    limits = ["-p", "tests.written_results", "--results", str(results), "--until", str(until)]
    return [*limits, *([] if earlier is None else ["--but-not", str(earlier)]), *_workers(workers)]


def _workers(count: int) -> list[str]:
    """pytest's arguments for tests in several processes: most of their time goes into compiling kernels."""
    if count < 2:
        return []
    if importlib.util.find_spec("xdist") is None:
        print("The Python package pytest-xdist is missing: the tests run in one process, and fewer in the time")
        return []
    return ["-n", str(count), "--maxschedchunk", "2"]


def _results(gpu: str) -> Path:
    """A new file in the folder of local results."""
    folder = ROOT / "bench" / "results" / "local"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"gpu-tests-{report.slug(gpu)}-{time.strftime('%Y-%m-%d-%H%M%S')}.jsonl"


if __name__ == "__main__":
    sys.exit(main())

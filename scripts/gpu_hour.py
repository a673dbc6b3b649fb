"""`make gpu-hour`: what the first hour with a GPU is for, by one command, within a number of minutes.

Five parts run one after another, each in processes of its own, so that a fault of one leaves the others alone: tests
of the kernels; times; tests with the kind of launches that is not the GPU's default; counters of single kernels by ncu,
and a small pass under compute-sanitizer, where these are installed. A part gets its share of the minutes that are left.
All results go to one folder as they come. A run that was cut off goes on with --resume FOLDER. At the end there is a
table of predicted and measured times, with the kernels whose predictions are furthest off.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from polarlm.bench.gpu.predict import beside

from polarlm.bench import report
from polarlm.bench.gpu.setup import Sizes
from polarlm.engine import EngineError
from polarlm.engine.backends.cuda.device import overlap
from polarlm.engine.backends.select import select
from scripts import counters, gpu_test
from scripts.processes import run_for
from scripts.sanitize import TOOLS, sanitize
from tests.written_results import OVER, outcomes, read, write

PASSED, FAILED, CUT_OFF, SKIPPED = "passed", "failed", "cut off", "skipped"
_BEGIN = 0.85  # of a part's seconds in which something new begins; after all of them it is ended
_SHOWN = 20  # failures, and lines of output after one
_STATE, _TABLES, _REPORT = "hour.json", "times.md", "report.md"
_INTERRUPTED = 130
_NO_TEST = 5  # pytest's exit code where there is no test, as when all of them have passed before


@dataclass(frozen=True)
class Result:
    """How a part has ended, what it says of that, and its seconds, those of earlier runs included."""

    result: str
    why: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Hour:
    """A run. minutes: for all of it. tests, times: arguments for pytest and for `bench.gpu`. gpu: its name. workers:
    processes of its tests. other_launches: see `gpu_test.other_launches`."""

    folder: Path
    minutes: float
    tests: Sequence[str]
    times: Sequence[str]
    gpu: str
    workers: int
    other_launches: tuple[str, str] | None

    def file(self, name: str) -> Path:
        return self.folder / name

    def run(
        self,
        part: str,
        seconds: float,
        command: Sequence[str],
        shown: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int | None:
        """The exit code of a command; None if it was ended after so many seconds. Its output goes to PART.log; shown:
        another file for its standard output. environment: see `run_for`."""
        with self.file(f"{part}.log").open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n")
            log.flush()
            if shown is None:
                return run_for(seconds, command, log, environment=environment)
            with shown.open("w", encoding="utf-8") as output:
                return run_for(seconds, command, output, log, environment)

    def end_of(self, part: str) -> str:
        lines = self.file(f"{part}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return "\n".join(lines[-_SHOWN:])


# -- the parts -----------------------------------------------------------------------------------------------------


def tests(hour: Hour, seconds: float) -> Result:
    return _tests(hour, "tests", gpu_test.files(), seconds, {})


def other_launches(hour: Hour, seconds: float) -> Result:
    if hour.other_launches is None:
        return Result(SKIPPED, "the GPU has no overlapped launches, or the environment says which launches to take")
    value, _ = hour.other_launches
    files = [gpu_test.FOLDER / f"{name}.py" for name in gpu_test.AGAIN]
    return _tests(hour, "other-launches", files, seconds, {overlap.VARIABLE: value})


def _tests(hour: Hour, part: str, files: Sequence[Path], seconds: float, environment: dict[str, str]) -> Result:
    results = hour.file(f"{part}.jsonl")
    arguments = gpu_test.pytest_arguments(
        results, time.time() + _BEGIN * seconds, results if results.exists() else None, hour.workers
    )
    command = [sys.executable, "-m", "pytest", *map(str, files), *arguments, *hour.tests]
    code = hour.run(part, seconds, command, environment={"POLARLM_TEST_GPU": "1", **environment})
    last = outcomes(results)
    counted = {name: sum(line["result"] == name for line in last.values()) for name in (PASSED, FAILED, SKIPPED)}
    left = sum(line.get("why") == OVER for line in last.values())
    said = f"{counted[PASSED]} passed, {counted[FAILED]} failed, {counted[SKIPPED] - left} skipped"
    if counted[FAILED]:
        return Result(FAILED, said)
    if code is None or left:
        return Result(CUT_OFF, f"{said}; {f'{left} were left' if left else 'the last one had not ended'}")
    if code == _NO_TEST and not last:
        return Result(SKIPPED, "no test was chosen")
    return Result(PASSED, said) if code in (0, _NO_TEST) else Result(FAILED, hour.end_of(part))


def times(hour: Hour, seconds: float) -> Result:
    output = hour.file("times.json")
    command = [sys.executable, "-m", "polarlm.bench.gpu", "--output", str(output)]
    command += ["--budget", str(max(1, int(_BEGIN * seconds))), *(["--resume", str(output)] if _timed(hour) else [])]
    code = hour.run("times", seconds, [*command, *hour.times], hour.file(_TABLES))
    found = _timed(hour)
    if code not in (0, None) or found is None:
        return Result(FAILED if code else CUT_OFF, hour.end_of("times"))
    said = f"{len(found['done'])} measurements, {len(found['not_measured'])} not made"
    return Result(PASSED if found["complete"] else CUT_OFF, said)


def _timed(hour: Hour) -> dict[str, Any] | None:
    """What has been timed so far; None if nothing has, or if a process was ended while it wrote the file."""
    try:
        found: dict[str, Any] = json.loads(hour.file("times.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def kernel_counters(hour: Hour, seconds: float) -> Result:
    written, launches = hour.file("counters.csv"), hour.file("launches.jsonl")
    command = counters.command(written, launches)
    if command is None:
        return Result(SKIPPED, f"{counters.PROGRAM} is not installed")
    for file in (written, launches):
        file.unlink(missing_ok=True)
    code = hour.run("counters", seconds, command)
    said = f"{len(counters.read(written))} launches counted"
    if code is None:
        return Result(CUT_OFF, said)
    log = written.read_text(encoding="utf-8", errors="replace") if written.exists() else ""
    if counters.FORBIDDEN in log + hour.end_of("counters"):
        return Result(SKIPPED, f"the driver lets only an administrator read counters ({counters.FORBIDDEN})")
    return Result(PASSED, said) if code == 0 else Result(FAILED, hour.end_of("counters"))


def sanitizer(hour: Hour, seconds: float) -> Result:
    file = hour.file("sanitizer.jsonl")
    results = {line["sanitizer"]: line for line in read(file)}
    to_do = [tool for tool in TOOLS if tool not in results or results[tool]["result"] != PASSED]
    for tool, result, why in sanitize(seconds / max(1, len(to_do)), to_do):
        results[tool] = {"sanitizer": tool, "result": result, "why": why}
        write(file, results[tool])
    ends = [line["result"] for line in results.values()]
    said = "; ".join(f"{tool}: {line['why'] or line['result']}" for tool, line in results.items())
    if FAILED in ends:
        return Result(FAILED, said)
    if SKIPPED in ends:
        return Result(CUT_OFF if "not finished" in said else SKIPPED, said)
    return Result(PASSED, said)


# Name → what runs, and its share of the time.
PARTS: dict[str, tuple[Callable[[Hour, float], Result], float]] = {
    "tests": (tests, 4),
    "times": (times, 5),
    "other launches": (other_launches, 2),
    "counters": (kernel_counters, 2),
    "sanitizer": (sanitizer, 2),
}


# -- the run -------------------------------------------------------------------------------------------------------


def run_parts(hour: Hour, results: dict[str, Result]) -> None:
    """Run the parts that have not passed, each for its share of what is left. `results` is kept in a file."""
    end = time.monotonic() + 60 * hour.minutes
    to_do = [name for name in PARTS if name not in results or results[name].result != PASSED]
    for index, name in enumerate(to_do):
        work, share = PARTS[name]
        left = end - time.monotonic()
        seconds = max(1.0, left * share / sum(PARTS[other][1] for other in to_do[index:]))
        print(f"{name}: {report.duration(seconds)} at most", flush=True)
        began, before = time.monotonic(), results[name].seconds if name in results else 0.0
        results[name] = Result(CUT_OFF, "it was interrupted", before)
        save(hour, results)
        try:
            results[name] = work(hour, seconds)
        finally:
            results[name] = replace(results[name], seconds=round(before + time.monotonic() - began, 1))
            save(hour, results)
        print(f"  {results[name].result}: {results[name].why}", flush=True)


def save(hour: Hour, results: dict[str, Result]) -> None:
    state = {"gpu": hour.gpu, "date": report.today(), "parts": {name: asdict(one) for name, one in results.items()}}
    hour.file(_STATE).write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def results_of(folder: Path, gpu: str) -> dict[str, Result]:
    """The results of an earlier run. Raises EngineError if there are none, or those of another GPU."""
    try:
        state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        found = {name: Result(**part) for name, part in state["parts"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"--resume {folder}: there is no {_STATE} of an earlier run ({error!r})") from None
    if state["gpu"] != gpu:
        raise EngineError(f"--resume {folder} has results of {state['gpu']}, and this is {gpu}: leave it out")
    return found


def format_report(hour: Hour, results: dict[str, Result]) -> str:
    """Counters, failures, how the parts have ended, and then the times, at last next to predictions."""
    texts = [f"# {hour.gpu}", counters.table(hour.file("counters.csv"), hour.file("launches.jsonl"))]
    failed = [
        f"- {test}"
        for part in ("tests", "other-launches")
        for test, line in outcomes(hour.file(f"{part}.jsonl")).items()
        if line["result"] == FAILED
    ]
    if failed:
        more = [f"- and {len(failed) - _SHOWN} more"] if len(failed) > _SHOWN else []
        texts.append("\n".join(["Failed tests", "", *failed[:_SHOWN], *more]))
    ends = [(name, results[name]) for name in PARTS if name in results]
    rows = [(name, one.result, f"{one.seconds:.0f}", one.why.split("\n")[-1]) for name, one in ends]
    texts.append(f"Parts\n\n{report.table(('part', 'result', 'seconds', 'what'), rows)}")
    return "\n\n".join([*texts, _times(hour)])


def _times(hour: Hour) -> str:
    """The tables of `bench.gpu`; where it was ended before it printed them, the times next to predictions alone."""
    shown, found, config = hour.file(_TABLES), _timed(hour), Sizes().config
    if shown.exists() and (text := shown.read_text(encoding="utf-8").strip()):
        return text
    if found is None:
        return "Nothing was timed."
    config = replace(config, layers=config.layers[:1] * found["model"]["layers"])
    return beside(hour.gpu, config, hour.file("times.json"))


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if no part has failed, 1 if one has, 2 where nothing can run, 130 after Ctrl-C."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ops, _ = select("cuda", 0)
        folder = options.resume or _new_folder(ops.name)
        results = results_of(folder, ops.name) if options.resume else {}
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    hour = Hour(
        folder,
        options.minutes,
        shlex.split(options.tests),
        shlex.split(options.times),
        ops.name,
        gpu_test.workers_for(ops.free_memory()),
        gpu_test.other_launches(),
    )
    print(f"{ops.name}: {options.minutes:g} minutes; all results go to {folder}", flush=True)
    try:
        run_parts(hour, results)
    except KeyboardInterrupt:
        print(f"Interrupted. This goes on: make gpu-hour ARGS='--resume {folder}'", file=sys.stderr)
        return _INTERRUPTED
    text = format_report(hour, results)
    hour.file(_REPORT).write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}\n\nWritten to {hour.file(_REPORT)}")
    if any(one.result == CUT_OFF for one in results.values()):
        print(f"Not all parts have ended. This goes on: make gpu-hour ARGS='--resume {folder}'")
    return int(any(one.result == FAILED for one in results.values()))


def _new_folder(gpu: str) -> Path:
    folder = report.LOCAL / f"gpu-hour-{report.slug(gpu)}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    folder.mkdir(parents=True)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_hour", description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60, help="for all parts together; the table comes after them")
    parser.add_argument(
        "--resume", type=Path, metavar="FOLDER", help="go on with an earlier run: leave out what passed"
    )
    parser.add_argument("--tests", default="", metavar="FLAGS", help="flags for pytest, such as '-k gemv'")
    parser.add_argument("--times", default="", metavar="FLAGS", help="flags for bench.gpu, such as '--layers 8'")
    return parser


if __name__ == "__main__":
    sys.exit(main())

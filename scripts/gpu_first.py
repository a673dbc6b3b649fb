"""`make gpu-first`: what a GPU shows within nine minutes, from nothing: whether it is right, then how fast it is.

Tests and families, a memory checker where CUDA's toolkit is there, then the requests of a model and its kernels. The
model has random weights and is written meanwhile. Each is a program of its own, with a share of the time, and leaves a
file in a folder of results and its output beside it; a program that fails ends no other.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polarlm.bench.result import LOCAL, slug
from polarlm.engine.errors import EngineError
from scripts.gpu_test import end, python, start, wait

SHAPE, TYPE = "llama-8b", "q4_k"
_CACHES = "balanced,f16,ring3"
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
AFTER = 20.0  # seconds that a program may take after its own budget: the last measurement comes to its end


@dataclass(frozen=True)
class Program:
    """A program. seconds: its budget, which its flags name, too; command: what comes after `python -m`."""

    name: str
    seconds: float
    command: tuple[str, ...]
    needs_model: bool = False


def programs(results: Path, model: Path) -> list[Program]:
    """The programs in the order of their importance."""
    model_flags = "--weights", str(model), "--types", _CACHES

    def bench_program(name: str, seconds: int, *flags: str) -> Program:
        command = "polarlm.bench.lab.gpu", "--budget", str(seconds), *flags, "--output", str(results / f"{name}.json")
        return Program(name, seconds, command, name != "kernels")

    tests = "scripts.gpu_test", "--budget", "160", "--results", str(results / "tests-said.txt")
    return [
        Program("tests", 160, tests),
        bench_program("requests", 180, *model_flags, "--only", "prompts,rates,sequences,server"),
        bench_program("kernels", 60, "--types", _CACHES, "--only", "kernels", "--contexts", "2048,32768"),
        Program("memory", 45, ("tests.cuda.small_batches",)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if all programs ended well, 1 if one did not, 2 where nothing can run, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_first", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", metavar="NAME,NAME", help="only these programs: tests, requests, kernels, memory")
    parser.add_argument("--results", type=Path, help="folder of the results")
    parser.add_argument("--model", type=Path, help="a model to measure instead of one with random weights")
    options = parser.parse_args(argv)
    try:
        name = _gpu()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    results = options.results or LOCAL / f"gpu-first-{slug(name)}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    results.mkdir(parents=True, exist_ok=True)
    print(f"{name}: results go to {results}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model.gguf"
        names = None if options.only is None else options.only.split(",")
        chosen = [one for one in programs(results, model) if names is None or one.name in names]
        writer = None
        if options.model is None and any(program.needs_model for program in chosen):
            writer = start(_writing(model), _UNBUFFERED, results / "model.txt")
        try:
            return max([_run(program, results, writer) for program in chosen], default=0)
        except KeyboardInterrupt:
            return 130
        finally:
            if writer is not None:
                end(writer)


def _gpu() -> str:
    """The name of the GPU. Raises EngineError without one."""
    from polarlm.engine.backends.select import select

    return select("cuda", 0)[0].name


def _writing(model: Path) -> list[str]:
    flags = "--shape", SHAPE, "--type", TYPE
    return [*python("scripts.gpu_first"), "-m", "scripts.make_random_model", *flags, str(model)]


def _run(program: Program, results: Path, writer: subprocess.Popen[bytes] | None) -> int:
    """Return 0 if the program ended well, else 1."""
    began, name = time.monotonic(), program.name
    command = [*python("scripts.gpu_first"), "-m", *program.command]
    if name == "memory":
        if (checker := shutil.which("compute-sanitizer")) is None:
            print("memory: left out, since CUDA's compute-sanitizer is not there", flush=True)
            return 0
        command = [checker, "--tool", "memcheck", "--error-exitcode", "1", *command]
    if program.needs_model and writer is not None and writer.wait() != 0:
        print(f"{name}: left out, since the model could not be written: see {results / 'model.txt'}", flush=True)
        return 1
    print(f"{name}: {program.seconds:.0f} s at most", flush=True)
    output = results / f"{name}.txt"
    code = wait(start(command, _UNBUFFERED, output), program.seconds + AFTER)
    ended = "ended, its time was over" if code is None else "done" if code == 0 else f"failed with status {code}"
    print(output.read_text(encoding="utf-8", errors="replace"))
    print(f"{name}: {ended}, {time.monotonic() - began:.0f} s", flush=True)
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())

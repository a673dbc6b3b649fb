"""`python -m polarlm.bench.lab.gpu`: requests of a model on a GPU, and kernels next to their limits.

The most wanted measurements come first. Each section has a share of --budget, and what it leaves goes to the next; the
report names those for which there was no time. The JSON file is written after each measurement, so that an interrupted
run keeps its results.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from polarlm.bench.command import TYPES_HELP, at_least, cache_types, file_names, model_named, numbers
from polarlm.bench.lab.gpu.plan import SHARES, Plan, Work
from polarlm.bench.lab.gpu.setup import Gpu, Sizes, open_gpu
from polarlm.bench.lab.gpu.tables import report_of
from polarlm.bench.result import Output, Result, ResultWriter, duration
from polarlm.bench.runner import WorkloadRunner
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note, run
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import hub_setting, model_setting, setting

# A sequence has a sink block, a quantized block and a current block, and starts more than a block before the context.
_LEAST_BLOCKS = 4


@dataclass(frozen=True)
class Options:
    """The flags of the measurements."""

    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    only: str = setting(",".join(SHARES), "--only", metavar="NAME,NAME", help="sections to measure")
    types: str = setting(
        "balanced,f16,compact,polarquant,turbo4",
        "--types",
        metavar="TYPES",
        help=f"{TYPES_HELP}. The first runs sequences, the first two run prompts and rates, and all of them attention",
    )
    llama_cpp: str | None = setting(
        None, "--llama-cpp", metavar="FOLDER", help="where llama.cpp's llama-bench and llama-batched-bench are"
    )
    contexts: str = setting("2048,32768,131072", "--contexts", metavar="N,N", help="tokens that attention sees")
    batches: str = setting("1,16", "--batches", metavar="N,N", help="sequences of attention; the first matter most")
    budget: int = setting(540, "--budget", metavar="SECONDS", help="begin nothing new after so many seconds")


def main(argv: Sequence[str] | None = None, gpu: Gpu | None = None, sizes: Sizes | None = None) -> int:
    """Measures, writes the JSON, prints the tables; returns the exit code. gpu: None for the machine's own."""
    return run(lambda flags: _measure_and_report(flags, gpu, sizes or Sizes()), argv)


def _measure_and_report(argv: Sequence[str], gpu: Gpu | None, sizes: Sizes) -> None:
    options, destination = parse(
        argv,
        {"GPU": Options, "Output": Output},
        prog="python -m polarlm.bench.lab.gpu",
        description="Requests of a model and kernels on a GPU, compared with its limits, PyTorch and llama.cpp.",
        checks={"budget": at_least(1)},
    )
    types, sections = cache_types(options.types), [name.strip() for name in options.only.split(",")]
    if unknown := [name for name in sections if name not in SHARES]:
        raise FlagError(f"--only {options.only}: {unknown[0]!r} is not among {', '.join(SHARES)}")
    for cache_type in types:
        cache_type.check(sizes.config.attention.head_dim)
    contexts = numbers("--contexts", options.contexts, _LEAST_BLOCKS * sizes.block_size)
    batches = numbers("--batches", options.batches, 1)
    model = model_named(options.weights, options.hf_repo)
    gpu = gpu or open_gpu()
    subject = file_names(model)
    writer = ResultWriter(destination.path("gpu", f"{gpu.about['name']} {subject}"), "lab.gpu", argv, gpu.about)
    result = Result({"model": subject, "not_measured": []})
    runner = WorkloadRunner(options.budget, lambda complete: writer.write(result, complete=complete), time.monotonic)
    note(f"Takes {duration(options.budget)} at most, plus the rest of the last measurement")
    plan = Plan(gpu, sizes, types, contexts, batches, model, options.llama_cpp, runner.seconds_left)
    with runner.final_write():
        _measure(plan, sections, result, runner)
    report_of(result).show(writer.path)


def _measure(plan: Plan, sections: Sequence[str], result: Result, runner: WorkloadRunner) -> None:
    """Run the tasks of all sections, as far as there is time: what a section leaves goes to the next."""
    budget, shares = runner.end - runner.began, sum(SHARES[name] for name in sections)
    runner.end = runner.began

    def miss(what: str, why: str) -> None:
        result["not_measured"].append({"what": what, "why": why.rstrip(".")})

    for section in (name for name in SHARES if name in sections):
        runner.end += budget * SHARES[section] / shares
        try:
            for name, work in plan.section(section):
                if not runner.seconds_left():
                    runner.left_out.append(name)
                    miss(name, "the time of its section was over")
                    continue
                note(f"{runner.seconds:6.1f} s  {name}")
                plan.gpu.clock.free()  # the memory of earlier measurements
                if why := _failure(work, result):
                    miss(name, why)
                runner.write(False)
        except EngineError as error:
            miss(section, str(error))
    plan.unload()


def _failure(work: Work, result: Result) -> str:
    """Run one task; why it has no rows, "" if it has. An error ends only this task."""
    try:
        work(result)
    except EngineError as error:
        return str(error)
    except MemoryError:
        return "there is not enough memory"
    except Exception as error:
        traceback.print_exc()
        return f"failed: {type(error).__name__}: {error}".splitlines()[0]
    return ""


if __name__ == "__main__":
    sys.exit(main())

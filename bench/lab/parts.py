"""`python -m polarlm.bench.lab.parts`: what the time of a prompt goes to, by kind of kernel.

The fastest of several prompts counts, and the one whose launches took least. On a CPU each launch runs alone, between
two looks at the clock; the rest is what a prompt takes beside them when nobody looks: Python, as far as no thread
computes meanwhile. On a GPU events are recorded around each launch, and the device begins when all is launched. A
kernel without a kind is a part by its own name. A second table, of a CPU, has what Python costs on more cores.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from polarlm.bench.command import TYPES_HELP, at_least, cache_types, file_names, model_named, numbers
from polarlm.bench.lab.cores import CORES, Work, additions_of, elapsed, single_launches
from polarlm.bench.lab.gpu.setup import CupyClock
from polarlm.bench.report import NOTHING, Column, Report, Section, Table, provenance
from polarlm.bench.result import Output, Result, ResultWriter, digest_of_model
from polarlm.engine import Engine, EngineError, PromptOptions
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import AUTO, hub_setting, model_setting, setting
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.weight_formats import Linear

_STEPS = 32  # after a prompt
PRODUCTS, REST, WHOLE = "products", "rest", "whole"
# Kind → the beginnings of its kernels' names, on CPUs and on GPUs. The longest that fits counts.
KINDS = {
    PRODUCTS: ("product_", "gemm", "gemv", "add_parts"),
    "inputs of products": ("quantize", "interleave", "matrices", "narrow"),
    "weights of products": ("dequantize_kernel", "repack"),
    "embedding": ("dequantize_", "embed"),
    "norms": ("norm_rows", "layer_norm", "rms_norm", "centre"),
    "RoPE, heads": ("heads_", "to_slot", "transform_heads", "place_kv", "append_kv", "rotate", "copy_full"),
    "attention": ("attention_", "prompt_", "text_", "merge_", "prefill_", "naive_", "decode_attention"),
    "latent vectors": ("join_", "take_", "latent_"),
    "decoding": ("decode_", "to_matrices_"),
    "encoding": ("encode_",),
    "gates": ("gate_", "activate_mul", "elementwise", "scale_rows", "clip"),
    "experts": ("route", "arrange", "combine", "group_pairs", "add_experts"),
    "recurrent layers": ("gated_delta", "channel_delta", "delta_", "advance_", "mamba2", "short_conv", "state_"),
    "head": ("best_of_rows", "softcap", "sample", "logprobs"),
}


@dataclass(frozen=True)
class Options:
    """The flags."""

    weights: str | None = model_setting()
    hf_repo: str | None = hub_setting()
    types: str = setting("balanced", "--types", metavar="TYPE", help=TYPES_HELP)
    input_bits: str = setting(AUTO, "--input-bits", metavar="BITS", help="as in the chat")
    device: str = setting("auto", "--device", choices=("auto", "cpu", "cuda"), help="as in the chat")
    threads: int = setting(0, "--threads", "-t", metavar="N", help="CPU threads; 0 as in the chat")
    prompt: str = setting("256,2048", "--prompt", metavar="N,N", help="tokens of the prompts")
    repeat: int = setting(3, "--repeat", metavar="N", help="runs of each prompt")


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes the JSON, prints the table."""
    options, destination = parse(
        argv,
        {"Parts": Options, "Output": Output},
        prog="python -m polarlm.bench.lab.parts",
        description="What the time of prompts goes to, by kind of kernel.",
        checks={"repeat": at_least(1), "threads": at_least(0)},
    )
    subject = file_names(model_named(options.weights, options.hf_repo))
    writer = ResultWriter(destination.path("parts", subject), "lab.parts", argv)
    result = measure(options)
    writer.write(result, complete=True)
    title = f"Parts of prompts: {result['model']}"
    Report(title, "", [Section("", [table_of(result), cores_of(result)])], provenance(result)).show(writer.path)


def kind_of(kernel: str) -> str:
    """The kind of a kernel; its name if it has none."""
    fitting = [(len(start), kind) for kind, starts in KINDS.items() for start in starts if kernel.startswith(start)]
    return max(fitting, default=(0, kernel))[1]


class HostClock:
    """Times are seconds on the wall. (Those of a process count its other threads at ticks, too seldom for a launch.)"""

    def mark(self) -> float:
        return time.perf_counter()

    def difference(self, begin: float, end: float) -> float:
        return end - begin

    def whole(self, work: Work) -> float:
        """The time of work."""
        begin = self.mark()
        work()
        return self.mark() - begin


class EventClock:
    """Times are seconds of the GPU that has worked last."""

    def __init__(self) -> None:
        import cupy

        self._cuda = cupy.cuda

    def mark(self) -> Any:
        return self._cuda.get_current_stream().record(self._cuda.Event())

    def difference(self, begin: Any, end: Any) -> float:
        return float(self._cuda.get_elapsed_time(begin, end)) / 1e3

    def whole(self, work: Work) -> float:
        return CupyClock().held(work, 1)


class Trace:
    """Times the launches of prompts, by other methods in place of those of the ops that launch."""

    def __init__(self, ops: Any, clock: HostClock | EventClock) -> None:
        self._ops, self._clock, self._matrix = ops, clock, ""

    def times(self, prompt: Work) -> tuple[dict[str, list[float]], float, Mapping[str, int]]:
        """The times of each launch of the parts, and of the whole; weights · rows of the products."""

        def work() -> None:
            self._launches = list[tuple[str, Any, Any]]()
            self._work: defaultdict[str, int] = defaultdict(int)
            if self._ops.backend == "cuda":
                self._ops.forget()  # what is recorded is launched as one
            prompt()

        whole = None if self._ops.backend == "cuda" else self._clock.whole(prompt)
        with ExitStack() as stack:
            stack.enter_context(patch.object(type(self._ops), "stream", None))
            for owner, name, by in self._replacements():
                stack.enter_context(patch.object(owner, name, partial(by, getattr(owner, name))))
            timed = self._clock.whole(work)
        parts: defaultdict[str, list[float]] = defaultdict(list)
        for part, *marks in self._launches:
            parts[part].append(self._clock.difference(*marks))
        return parts, timed if whole is None else whole, self._work

    def _replacements(self) -> Sequence[tuple[Any, str, Callable[..., Any]]]:
        linear = self._ops, "linear", self._linear
        if self._ops.backend == "cuda":
            device = self._ops._device
            return linear, (device, "launch", self._launch), (device, "gemm", self._launch_gemm)
        from polarlm.engine.jit.run.workers import workers  # needs llvmlite

        return linear, (workers(), "run", self._run)

    def _linear(self, linear: Callable[..., Any], x: Any, w: Linear, *rest: Any, **named: Any) -> Any:
        formats = ", ".join(dict.fromkeys(part.format.name for part in w.parts))
        self._matrix = f"{PRODUCTS}: {formats} {w.shape[0]:,} × {w.shape[1]:,}"
        self._work[self._matrix] += len(x) * w.shape[0] * w.shape[1]
        try:
            return linear(x, w, *rest, **named)
        finally:
            self._matrix = ""

    def _run(self, run: Callable[..., None], commands: Any, threads: int) -> None:
        """Run each launch of a command buffer alone."""
        names = {code.address: kernel.name for kernel, code in self._ops._launch.library._loaded.items()}
        for launch, one in single_launches(commands):
            self._launch(lambda kernel, one=one: run(one, threads), names[launch.kernel])

    def _launch(self, launch: Callable[..., None], kernel: str, *rest: Any, **named: Any) -> None:
        kind, begin = kind_of(kernel), self._clock.mark()
        launch(kernel, *rest, **named)
        self._launches.append((self._matrix or kind if kind == PRODUCTS else kind, begin, self._clock.mark()))

    def _launch_gemm(self, gemm: Callable[..., None], *arrays: Any, **named: Any) -> None:
        self._launch(lambda kernel: gemm(*arrays, **named), "gemm")


def measure(options: Options) -> Result:
    """The parts of prompts of all lengths. Raises FlagError, EngineError or LoadError."""
    path, lengths = model_named(options.weights, options.hf_repo), sorted(numbers("--prompt", options.prompt))
    settings = {"device": options.device, "threads": options.threads, "ctx_size": max(lengths) + 1 + _STEPS}
    settings |= {"input_bits": options.input_bits, "parallel": 1}
    loaded = assemble(settle(path, None, {**settings, **cache_types(options.types)[0].settings()}), note)
    ops, source = loaded.model.ops, loaded.source
    with Engine(loaded) as engine:
        if ops.backend not in ("native", "cuda"):
            raise EngineError("NumPy computes here, and has no kernels")
        threads = None if ops.backend == "cuda" else ops.threads().number  # type: ignore[union-attr]
        trace = Trace(ops, EventClock() if threads is None else HostClock())
        model = f"{source.name} on {ops.name}" if threads is None else source.name
        result = Result({"model": model, "threads": threads, **digest_of_model(source.weights.files())})
        answer = partial(engine.generate, options=PromptOptions(cache_prompt=False), temperature=0, ignore_eos=True)
        for length in lengths:
            ids = np.random.default_rng(0).integers(0, len(source.vocabulary), length).tolist()
            prompt, steps = (partial(answer, ids, max_tokens=number) for number in (1, 1 + _STEPS))
            steps()  # compiles
            runs = [trace.times(prompt) for _ in range(options.repeat)]
            parts, _, work = min(runs, key=lambda run: _total(run[0]))
            _, whole, _ = min(runs, key=lambda run: run[1])
            _add(result, length, {**parts, REST: [whole - _total(parts)], WHOLE: [whole]}, work)
            if threads is not None:
                _add_cores(result, length, ops, prompt, steps)
    return result


def _add_cores(result: Result, length: int, ops: Any, prompt: Work, steps: Work) -> None:
    """Add the "seconds" that a prompt and a step after it would take on `CORES`, and those of them in which Python is
    "alone". steps: the prompt and `_STEPS` steps."""
    threads = result["threads"]
    for cores in CORES:
        with patch.object(ops._launch, "threads", cores):
            before, added = (
                min((additions_of(work, threads) for _ in range(3)), key=lambda run: sum(one.seconds for one in run))
                for work in (prompt, steps)
            )
        for name, number, (seconds, alone) in (
            (f"prompt of {length:,}", 1, elapsed(before, cores)),
            (f"step after {length:,}", _STEPS, elapsed(added[len(before) :], cores)),
        ):
            result.add_all(name, f"{cores} cores", {"seconds": seconds / number, "alone": alone / number})


def _total(parts: Mapping[str, list[float]]) -> float:
    """The times of all launches together."""
    return sum(map(sum, parts.values()))


def _add(result: Result, length: int, parts: Mapping[str, list[float]], work: Mapping[str, int]) -> None:
    """Add the "launches" of each part, its "seconds" and "share", and of products the "rate" of weights · rows."""
    whole = parts[WHOLE][0]
    for part, times in sorted(parts.items(), key=lambda one: (one[0] == WHOLE, one[0] == REST, -sum(one[1]))):
        seconds, launches = sum(times), None if part in (REST, WHOLE) else len(times)
        figures = {"seconds": seconds, "launches": launches, "share": seconds / whole}
        if part in work:
            figures["rate"] = work[part] / seconds
        result.add_all(part, f"{length:,}", figures)


_COLUMNS = (
    Column("tokens", lambda figures: figures["seconds"].contestant),
    Column.of("launches", "launches", "{:,.0f}".format),
    Column.of("ms", "seconds", lambda seconds: f"{1e3 * seconds:,.2f}"),
    Column.of("share", "share", "{:.1%}".format),
    Column.of("GFLOPS", "rate", lambda rate: f"{2e-9 * rate:,.0f}"),
)


def table_of(result: Result) -> Table:
    return Table.of("part", _COLUMNS, ((part, figures) for part, _, figures in result.parts() if "share" in figures))


def cores_of(result: Result) -> Table:
    """What prompts and steps would take on more cores: milliseconds, and the share in which Python is alone."""
    lines = dict.fromkeys(name for name, _, figures in result.parts() if "alone" in figures)

    def cell(name: str, cores: str) -> str:
        seconds, alone = (result.value(name, cores, quantity) for quantity in ("seconds", "alone"))
        return NOTHING if not seconds or alone is None else f"{1e3 * seconds:,.2f} ms, {alone / seconds:.1%}"

    return Table.cross("simulated, Python alone", lines, {one: one for one in (f"{n} cores" for n in CORES)}, cell)


if __name__ == "__main__":
    sys.exit(main())

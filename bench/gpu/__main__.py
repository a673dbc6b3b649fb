"""`python -m polarlm.bench.gpu`: times of the kernels on a GPU, next to its limits and PyTorch's kernels.

The most important measurements come first; the report names those for which --budget leaves no time. The JSON file is
written after each of them, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench import report
from polarlm.bench.command import TYPES_HELP, CacheType, at_least, cache_types, numbers
from polarlm.bench.gpu.attention import measure_attention, measure_encoding
from polarlm.bench.gpu.cache import Content
from polarlm.bench.gpu.model import FORMATS, Cell, RandomModel, default_type, random_metrics
from polarlm.bench.gpu.peer import PeerTime, half_attention, prompt_attention
from polarlm.bench.gpu.setup import Gpu, Sizes, open_gpu
from polarlm.bench.gpu.shapes import shape_of
from polarlm.bench.gpu.steps import measure_matrix, measure_prefill, measure_steps
from polarlm.bench.gpu.tables import Limits, Results, Row, format_tables
from polarlm.bench.random_weights import RandomMatrix
from polarlm.bench.report import Output
from polarlm.engine import EngineError, codecs
from polarlm.engine.backends.cuda.device import Array
from polarlm.engine.cli.commands import note, run
from polarlm.engine.cli.flags import parse
from polarlm.engine.config import setting
from polarlm.model_loaders.config import ModelConfig

# A sequence has a sink block, a quantized block and a current block, and starts more than a block before the context.
_LEAST_BLOCKS = 4
_SEVERAL_ROWS = (4, 8, 16, 32, 64, 128, 256)  # of products
_MATRICES = ("qkv", "out", "gate_up", "down", "head")

Peers = Callable[[ModelConfig, int, int, int, int], "list[PeerTime]"]
Task = tuple[str, Callable[[], Sequence[Row]]]


@dataclass(frozen=True)
class Options:
    """The flags of the measurements."""

    types: str = setting(
        "f16,ring4/ring3.5,ring3/ring3.5,polarquant,turbo4", "--types", metavar="TYPES", help=TYPES_HELP
    )
    contexts: str = setting("2048,8192,32768,131072", "--contexts", metavar="N,N", help="tokens that attention sees")
    batches: str = setting("1,16", "--batches", metavar="N,N", help="sequences of a step; the first ones matter most")
    layers: int = setting(32, "--layers", metavar="N", help="layers of the model of random weights")
    budget: int = setting(400, "--budget", metavar="SECONDS", help="begin nothing new after so many seconds")


def main(
    argv: Sequence[str] | None = None,
    gpu: Gpu | None = None,
    sizes: Sizes | None = None,
    peers: Peers = half_attention,
) -> int:
    """Measures, writes the JSON, prints the tables; returns the exit code. gpu: None for the machine's own."""
    return run(lambda flags: _measure_and_report(flags, gpu, sizes or Sizes(), peers), argv)


def _measure_and_report(argv: Sequence[str], gpu: Gpu | None, sizes: Sizes, peers: Peers) -> None:
    started = time.monotonic()
    options, destination = parse(
        argv,
        {"Kernels": Options, "Output": Output},
        prog="python -m polarlm.bench.gpu",
        description="Times of the kernels on a GPU, compared with its limits and with PyTorch's kernels.",
        checks={"layers": at_least(1), "budget": at_least(1)},
    )
    types = cache_types(options.types)
    for cache_type in types:
        cache_type.check(sizes.config.attention.head_dim)
    contexts = numbers("--contexts", options.contexts, _LEAST_BLOCKS * sizes.block_size)
    batches = numbers("--batches", options.batches, 1)
    gpu = gpu or open_gpu()
    output = destination.path("gpu", gpu.about["name"])
    note(f"Takes {report.duration(options.budget)} at most, plus the rest of the last task")
    sizes = replace(sizes, config=replace(sizes.config, layers=sizes.config.layers[:1] * options.layers))
    plan = Plan(gpu, sizes, peers, types, contexts, batches)
    results = Results(model=shape_of(sizes.config))
    complete = True
    for name, work in plan.tasks():
        if time.monotonic() - started > options.budget:
            results.missing.append((name, f"the {options.budget} s of --budget were over"))
            complete = False
            continue
        note(f"{time.monotonic() - started:6.1f} s  {name}")
        _do(name, partial(_afresh, gpu, work), results)
        _write(output, argv, results, gpu, complete=False)
    _write(output, argv, results, gpu, complete=complete)
    note(f"Written to {output}")
    print(f"{', '.join(f'{name} {value}' for name, value in gpu.about.items()).removeprefix('name ')}\n")
    print(format_tables(results))


def _do(name: str, work: Callable[[], Sequence[Row]], results: Results) -> None:
    """Run one task and keep its rows. An error ends only this task."""
    try:
        results.rows += work()
    except EngineError as error:
        results.missing.append((name, str(error).rstrip(".")))
    except MemoryError:
        results.missing.append((name, "there is not enough memory"))
    except Exception as error:
        traceback.print_exc()
        results.missing.append((name, f"failed: {type(error).__name__}: {error}".splitlines()[0]))


def _afresh(gpu: Gpu, work: Callable[[], Sequence[Row]]) -> Sequence[Row]:
    """The result of `work`, after the memory of earlier measurements has been freed."""
    gpu.clock.free()
    return work()


def _one(measure: Callable[..., Row], *arguments: Any) -> list[Row]:
    return [measure(*arguments)]


def _write(output: Path, argv: Sequence[str], results: Results, gpu: Gpu, *, complete: bool = True) -> None:
    report.write(output, "gpu", argv, results.as_json(), gpu=gpu.about, complete=complete)


def _named(cell: Cell) -> str:
    """The name of the cell in the list of tasks."""
    count, others = len(cell), len(cell) - 1
    return f"{cell[0]} × {count}" if cell[-1] == cell[0] else f"{cell[0]} × 1 and {cell[-1]} × {others}"


@dataclass
class Plan:
    """The tasks, in order of importance."""

    gpu: Gpu
    sizes: Sizes
    peers: Peers
    types: Sequence[CacheType]
    contexts: Sequence[int]
    batches: Sequence[int]

    def __post_init__(self) -> None:
        sizes = self.sizes
        self._content = Content.random(
            sizes.blocks, sizes.block_size, sizes.config.attention.kv_heads, sizes.config.attention.head_dim
        )
        self._model: RandomModel | None = None
        self._no_model: set[str] = set()

    def tasks(self) -> Iterator[Task]:
        yield "limits of the device", self._limits
        yield from self._attention(self.batches[0])
        yield from self._model_tasks()
        for batch in self.batches[1:]:
            yield from self._attention(batch)
        yield "encoding", self._encoding
        yield "limits of the device, once more", self._limits

    def _limits(self) -> list[Row]:
        _, device = self.gpu.open()
        clock, sizes, n = self.gpu.clock, self.sizes, self.sizes.gemm

        def random(rows: int, columns: int) -> Array:
            return device.from_host(RandomMatrix("bf16", rows, columns).raw(slice(0, rows)).view(np.uint16))

        source = random(sizes.copied // (2 * n), n)
        to = device.empty(source.shape, source.dtype)
        copied = clock.seconds(lambda: clock.copy(to, source), sizes.runs)
        x, weight, y = random(n, n), random(n, n), device.empty((n, n), "float32")
        multiplied = clock.seconds(lambda: device.gemm(y, x, weight, add=False), sizes.runs)
        return [Limits(2 * source.nbytes / copied, 2 * n**3 / multiplied)]

    def _attention(self, batch: int) -> Iterator[Task]:
        sizes = self.sizes
        for context in self.contexts:
            shape = sizes.config, context, batch, sizes.rotated, sizes.runs
            yield f"fp16 kernels of PyTorch, {context} × {batch}", partial(self.peers, *shape)
            for cache_type in self.types:
                work = partial(_one, measure_attention, self.gpu, sizes, self._content, cache_type, context, batch)
                yield f"attention, {cache_type.label}, {context} × {batch}", work

    def _model_tasks(self) -> Iterator[Task]:
        for weights in FORMATS:
            for cell in self._cells():
                yield f"steps, {weights}, {_named(cell)}", partial(self._with_model, weights, measure_steps, cell)
            yield (
                f"prefill of {self.sizes.prompt} tokens, {weights}",
                partial(self._with_model, weights, measure_prefill),
            )
        prompt = self.sizes.config, self.sizes.prompt, self.sizes.runs
        yield f"fp16 kernels of PyTorch, prompt of {self.sizes.prompt} tokens", partial(prompt_attention, *prompt)
        for weights in reversed(FORMATS):  # starts with the model that is still loaded
            for rows in (1, *_SEVERAL_ROWS):
                for name in _MATRICES if rows == 1 else _MATRICES[:-1]:
                    work = partial(self._with_model, weights, measure_matrix, name, rows)
                    yield f"{name} × {rows} rows, {weights}", work
        for weights in FORMATS if self.gpu.open_overlapping else ():
            for cell in self._cells():
                if len(cell) == self.batches[0]:
                    work = partial(self._with_model, weights, measure_steps, cell, overlapped=True)
                    yield f"steps, {weights}, {_named(cell)}, launches overlapped", work
        self._model = None  # frees its memory

    def _cells(self) -> list[Cell]:
        """Batches of equal contexts; and for batches of several, one longest context among shortest ones."""
        contexts = self.sizes.step_contexts
        cells = [(context,) * batch for batch in self.batches for context in contexts]
        cells += [(max(contexts), *(min(contexts),) * (batch - 1)) for batch in self.batches if batch > 1]
        return list(dict.fromkeys(cells))

    def _with_model(
        self, weights: str, measure: Callable[..., Row], *arguments: Any, overlapped: bool = False
    ) -> list[Row]:
        """One measurement of the model, which is created on first use. Raises EngineError if it does not fit."""
        if weights in self._no_model:
            raise EngineError("there is no model")
        if self._model is None or (self._model.weights, self._model.device.overlaps) != (weights, overlapped):
            self._model = None
            self.gpu.clock.free()
            try:
                self._model = RandomModel(self.gpu, self.sizes, self._content, weights, self._cells(), overlapped)
            except (EngineError, MemoryError) as error:
                self._no_model.add(weights)
                layers = len(self.sizes.config.layers)
                raise EngineError(f"no model of {layers} layers ({error}); choose fewer with --layers") from error
        return [measure(self.gpu, self.sizes, self._model, *arguments)]

    def _encoding(self) -> list[Row]:
        key, value = default_type()
        metrics = random_metrics(self.sizes, codecs.get(key), codecs.get(value))
        return [*measure_encoding(self.gpu, self.sizes, self._content, CacheType.read(f"{key}/{value}"), *metrics)]


if __name__ == "__main__":
    sys.exit(main())

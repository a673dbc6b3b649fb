"""The workloads of a speed measurement: threads, prompts, generation after growing contexts, sequences, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from polarlm.bench.result import Result, duration
from polarlm.bench.runner import Workload, WorkloadRunner
from polarlm.bench.speed.child import Child, Failed, OutOfTime, memory
from polarlm.bench.speed.contestants import (
    GENERATION,
    OURS,
    PROMPT,
    RATE,
    SEQUENCES,
    Cell,
    Children,
    Contestant,
    Subject,
    add_sequences,
    best,
    is_far_behind,
    starvation,
    subject_of,
)
from polarlm.engine import EngineConfig
from polarlm.engine.cli.commands import note

# Short generation: from this context to 64 tokens.
SHORT, SHORT_DEPTH, SHORT_STEPS = "generation, depth ≤ 64", 8, 56
# As many steps as a block has tokens, so that each run encodes one block.
DEEP_STEPS = EngineConfig.block_size
MEMORY = "memory"
_TOGETHER = (1, 8, 16)  # numbers of sequences that are asked at the same time, each with its own prompt
# Tokens of a prompt, and with its answer: so few that all sequences have begun long before the first ends.
_TOGETHER_PROMPT, _TOGETHER_DEPTH = 16, 128
_WHOLE = 256  # tokens; llama.cpp rounds its cache size up to a multiple
# Work for the progress bar, in tokens of a prompt, roughly.
_STEP_WORK = 5
_BUFFER = 512 << 20  # bytes, many times the last-level cache
# A library's idle threads may spin for a moment, which would slow down the next run.
_REST_SECONDS = 0.1


class ReadBuffer:
    """A buffer that is read sequentially as a whole: a step takes at least its bytes divided by this rate."""

    def __init__(self, nbytes: int = _BUFFER) -> None:
        self._buffer = np.ones(nbytes // 4, np.int32)  # written, so that its pages exist

    def read_rate(self, threads: int) -> float:
        """Bytes per second that `threads` threads read together.

        They compute the maximum of integers: of NumPy's reductions it comes closest to the hardware, since it keeps
        several vectors in flight.
        """
        parts = np.array_split(self._buffer, threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(np.max, [part[:1] for part in parts]))  # starts the threads
            started = time.perf_counter()
            list(pool.map(np.max, parts))
            return self._buffer.nbytes / (time.perf_counter() - started)


@dataclass(frozen=True)
class Plan:
    """The parameters of the measurement. All tokens fit into the model's context.

    threads: the numbers to try. rates_alone: whether only prompts and generation are measured.
    """

    contestants: Sequence[Contestant]
    prompts: Sequence[int]
    depths: Sequence[int]
    threads: Sequence[int]
    repeat: int
    vocabulary: int
    max_context: int
    rates_alone: bool = False

    @property
    def leader(self) -> Contestant:
        """Our first contestant."""
        return next(contestant for contestant in self.contestants if contestant.is_ours)

    @property
    def context(self) -> int:
        """Tokens of context for prompts and generation."""
        needed = [SHORT_DEPTH + SHORT_STEPS, *self.prompts, *(depth + DEEP_STEPS for depth in self.depths)]
        return self._whole(max(needed) + 1)

    @property
    def memory_context(self) -> int:
        """Tokens of context for measuring memory: little more than are in use."""
        return self._whole(max(self.prompts) + DEEP_STEPS + 1)

    def _whole(self, tokens: int) -> int:
        return min(-(-tokens // _WHOLE) * _WHOLE, self.max_context)


class Measurement:
    """Measures all sections in order, into `result`, which is written after each row."""

    def __init__(self, plan: Plan, subject: Subject, result: Result, runner: WorkloadRunner) -> None:
        self._plan, self._subject, self._result, self._runner = plan, subject, result, runner
        self._children = Children(subject)
        self._rng = np.random.default_rng(0)
        self._deep = self._ids(max([1, *plan.prompts, *plan.depths]))  # prompts and contexts start with these tokens
        self._most = max(plan.threads)
        self._chosen = self._most  # the number of our threads for steps

    def run(self) -> None:
        """Measure everything that there is time for. A contestant that fails is left out up to the end of the
        workload; its rows say why.

        Sequences and memory have processes with settings of their own: what ends one may well not end the next.
        """
        try:
            self._runner.run(self._workloads())
        finally:
            self._children.close()
            self._judge()
            late = (f"There was no time for {name}: give more --minutes" for name in self._runner.left_out)
            self._result["left_out"].extend(late)

    def _workloads(self) -> list[Workload]:
        plan, contestants, runs = self._plan, len(self._plan.contestants), 1 + self._plan.repeat
        short = runs * SHORT_STEPS * _STEP_WORK
        workloads = [
            Workload("threads", short * len(plan.threads), lambda: self._choose_threads(workloads)),
            Workload(SHORT, short * contestants, partial(self._generate, SHORT, SHORT_DEPTH, SHORT_STEPS)),
        ]
        for tokens in plan.prompts:
            name = subject_of(PROMPT, tokens)
            workloads.append(Workload(name, runs * tokens * contestants, partial(self._measure_prompt, name, tokens)))
        for depth in plan.depths:
            name, work = subject_of(GENERATION, depth), (depth / 2 + runs * DEEP_STEPS * _STEP_WORK) * contestants
            workloads.append(Workload(name, work, partial(self._generate, name, depth, DEEP_STEPS)))
        if not plan.rates_alone:
            work = runs * len(_TOGETHER) * _TOGETHER_DEPTH * 3 * _STEP_WORK
            workloads.append(Workload(SEQUENCES, work, self._measure_sequences))
            work = (max(plan.prompts) + DEEP_STEPS * _STEP_WORK) * contestants
            workloads.append(Workload(MEMORY, work, self._measure_memory))
        return workloads

    # -- the machine -----------------------------------------------------------------------------------------------

    def _measure_bandwidth(self) -> None:
        """Add a run with each number of threads. The fastest of all runs counts, since no step can be faster."""
        if self._subject.device == "cpu":
            memory = ReadBuffer()
            for threads in self._plan.threads:
                rates = self._result["bytes_per_second"].setdefault(str(threads), [])
                rates.append(memory.read_rate(threads))

    def _choose_threads(self, workloads: Sequence[Workload]) -> None:
        """Find the number of threads with which our first contestant generates fastest after a short context.

        Prompts use the most threads. A peer's best number is found in each row.
        """
        plan, leader = self._plan, self._plan.leader
        cells = [Cell(leader, threads) for threads in plan.threads]
        note("Loading, and trying the numbers of threads" if len(plan.threads) > 1 else "Loading")
        self._measure_steps("threads", cells, SHORT_DEPTH, SHORT_STEPS, warm_up=True)
        medians = {cell.threads: cell.median for cell in cells if cell.runs}
        self._chosen = max(medians, key=medians.__getitem__, default=self._most)
        tried = {OURS: {str(cell.threads): cell.runs for cell in cells}}
        self._result["threads"].update(chosen={OURS: self._chosen}, tried=tried)
        if leader not in self._children.failures:
            try:
                self._result.about["ours"] = self._child(leader, self._chosen).call("about")
            except Failed as error:
                self._children.fail(leader, str(error))
        self._children.close(lambda contestant, threads: contestant.is_ours and threads != self._chosen)
        if medians:
            self._runner.work_seconds = 1 / (_STEP_WORK * max(max(cell.runs) for cell in cells if cell.runs))
            seconds = sum(one.work for one in workloads) * self._runner.work_seconds
            left = self._runner.seconds_left()
            late = "" if seconds <= left else f"; --minutes leaves {duration(left)}: what takes longer is left out"
            note(f"All of it takes about {duration(seconds)}, and what loading takes{late}")

    # -- sections --------------------------------------------------------------------------------------------------

    def _generate(self, name: str, depth: int, steps: int) -> None:
        """Measure steps after `depth` tokens, which every contestant computes once, in its first run."""
        self._measure_bandwidth()
        cells = self._cells(self._chosen)
        self._measure_steps(name, cells, depth, steps, warm_up=depth == SHORT_DEPTH)  # later contexts need none
        for cell in self._best(cells):
            self._add(GENERATION, name, depth, cell)

    def _cells(self, ours: int) -> list[Cell]:
        """Cells of all contestants in a row: of ours with `ours` threads, of a peer with each number, most first."""
        return [
            Cell(contestant, threads)
            for contestant in self._plan.contestants
            for threads in ([ours] if contestant.is_ours else reversed(self._plan.threads))
        ]

    def _best(self, cells: Sequence[Cell]) -> list[Cell]:
        counting = []
        for contestant in self._plan.contestants:
            candidates = [cell for cell in cells if cell.contestant == contestant]
            counting.append(candidates[0] if contestant.is_ours else best(candidates))
        return counting

    def _measure_steps(self, name: str, cells: Sequence[Cell], depth: int, steps: int, *, warm_up: bool) -> None:
        ids, following = self._deep[:depth], self._ids(steps + 1)

        def rate(cell: Cell, number: int) -> float:
            return float(self._child(cell.contestant, cell.threads).call("generation_rate", ids, following))

        self._alternate(name, cells, rate, warm_up=warm_up)

    def _measure_prompt(self, name: str, tokens: int) -> None:
        """Measure prompts. Each run has its own prompt; the last one is the start of the context for generation."""
        cells = self._cells(self._most)
        prompts = [self._ids(tokens) for _ in range(self._plan.repeat)]
        prompts[-1] = self._deep[:tokens]

        def rate(cell: Cell, number: int) -> float:
            return float(self._child(cell.contestant, cell.threads).call("prompt_rate", prompts[number]))

        self._alternate(name, cells, rate, warm_up=tokens == self._plan.prompts[0])  # longer prompts need no warm-up
        for cell in self._best(cells):
            self._add(PROMPT, name, tokens, cell)

    def _measure_sequences(self) -> None:
        self._children.end_workload()
        leader, prompts = self._plan.leader, [self._ids(_TOGETHER_PROMPT) for _ in range(max(_TOGETHER))]
        cells = {Cell(leader, self._chosen): count for count in _TOGETHER}
        measured: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in cells}
        settings, context = {"parallel": max(_TOGETHER), "kept_sequences": 0}, max(_TOGETHER) * _TOGETHER_DEPTH
        about = {"prompt": _TOGETHER_PROMPT, "answer": _TOGETHER_DEPTH - _TOGETHER_PROMPT, "threads": self._chosen}

        def rate(cell: Cell, number: int) -> float:
            child, count = self._children.child(leader, cell.threads, context, settings), cells[cell]
            times = child.call("together", prompts[:count], about["answer"])
            if not times["steps"]:
                raise Failed("not all sequences ran at the same time")
            times["step"] = statistics.fmean(times["steps"])
            measured[cell] += [times] if number >= 0 else []
            return float(count / times["step"])

        self._alternate(SEQUENCES, [*cells], rate)
        for cell, count in cells.items():
            failure = "" if cell.runs else cell.failure or "not measured"
            runs = {name: [times[name] for times in measured[cell]] for name in ("first", "seconds", "step")}
            add_sequences(self._result, str(leader), count, runs, failure=failure, **about)
            note(f"{count} {SEQUENCES}, {leader}: {failure or f'{cell.median:,.1f} tokens/s'}")
        self._runner.write(False)

    def _measure_memory(self) -> None:
        """Measure fresh processes after the longest prompt and some steps, with a cache for little more than these."""
        self._children.end_workload()
        tokens, context = max(self._plan.prompts), self._plan.memory_context
        ids, following = self._deep[:tokens], self._ids(DEEP_STEPS + 1)
        for contestant in self._plan.contestants:
            about: dict[str, Any] = {"tokens": tokens, "context": context}
            try:
                child = self._children.child(contestant, self._most, context)
                child.call("generation_rate", ids, following)
                sizes: dict[str, float | None] = {**memory(child.pid)}
                sizes["cache"] = self._cache_bytes(contestant, tokens, child)
                self._result.add_all(MEMORY, str(contestant), sizes, **about)
            except Failed as error:
                self._miss(MEMORY, error)
                self._result.add(MEMORY, str(contestant), "peak", failure=str(error), **about)
            self._children.close()
            self._runner.advance(1 / len(self._plan.contestants))
        self._runner.write(False)

    # -- help ------------------------------------------------------------------------------------------------------

    def _alternate(
        self, name: str, cells: Sequence[Cell], rate: Callable[[Cell, int], float], *, warm_up: bool = True
    ) -> None:
        """Run each cell `repeat` times, in turn; fewer times where the same contestant with more threads is far faster.

        warm_up: whether a run −1 comes first, which does not count.
        """

        def run(cell: Cell, number: int) -> None:
            failures = self._children.failures
            if is_far_behind(cell, cells):
                return
            if cell.contestant not in failures:
                time.sleep(_REST_SECONDS)
                try:
                    rated = rate(cell, number)
                    cell.runs += [rated] if number >= 0 else []
                except Failed as error:
                    self._children.fail(cell.contestant, str(error))
                    self._miss(name, error)
                    cell.failure = None if isinstance(error, OutOfTime) else str(error)  # runs before that count
            if cell.contestant in failures and not cell.runs:
                cell.failure = failures[cell.contestant]

        self._runner.in_turn(name, cells, range(-1 if warm_up else 0, self._plan.repeat), run)

    def _miss(self, name: str, error: Failed) -> None:
        """Name a workload that had too little time, if that is the error."""
        if isinstance(error, OutOfTime) and name not in self._runner.left_out:
            self._runner.left_out.append(name)

    def _child(self, contestant: Contestant, threads: int) -> Child:
        return self._children.child(contestant, threads, self._plan.context)

    def _ids(self, count: int) -> list[int]:
        """New random tokens with each call; the same sequence of calls gives the same tokens."""
        return self._rng.integers(self._plan.vocabulary, size=count).tolist()

    def _add(self, section: str, name: str, tokens: int, cell: Cell) -> None:
        """Add the rows of a cell: its rate, and for generation the bytes that a step reads."""
        contestant, failure = cell.contestant, cell.failure
        if failure is None and not cell.runs:
            failure = "not measured"
        more: dict[str, Any] = {"section": section, "tokens": tokens, "threads": cell.threads}
        if cell.tried:
            more["tried"] = {str(threads): list(runs) for threads, runs in cell.tried.items()}
        self._result.add(name, str(contestant), RATE, cell.runs, failure=failure, **more)
        if failure is None and section == GENERATION:
            with suppress(Failed):  # its time was over after some runs
                cache = self._cache_bytes(contestant, tokens)
                if cache is not None:
                    weights = self._weight_bytes(contestant)
                    self._result.add_all(name, str(contestant), {"weights": weights, "cache": cache})
        note(f"{name}, {contestant}: {failure or f'{cell.median:,.1f} tokens/s'}")
        self._runner.write(False)

    def _judge(self) -> None:
        """Add the share of the bandwidth of each generation, and say which peers have lacked a core: those that are
        slower with more threads, or read next to nothing while ours do not."""
        fastest = {threads: max(rates) for threads, rates in self._result["bytes_per_second"].items()}
        most = dict.fromkeys((subject for subject, *_ in self._result.parts()), 0.0)  # of our shares
        for subject, who, figures in self._result.parts():
            if "cache" in figures and RATE in figures and (read := fastest.get(str(figures[RATE].more["threads"]))):
                share = (
                    sum(figures[name].value or 0 for name in ("weights", "cache")) * (figures[RATE].value or 0) / read
                )
                self._result.add(subject, who, "bandwidth", value=share)
                most[subject] = max(most[subject], share if who.startswith(f"{OURS} ") else 0)
        for row in list(self._result.rows(RATE)):
            share = self._result.value(row.subject, row.contestant, "bandwidth")
            if row.value is not None and (why := starvation(row, share, most[row.subject])):
                more = {**row.more, "starvation": why}
                self._result.add(row.subject, row.contestant, RATE, row.runs, **more)

    def _weight_bytes(self, contestant: Contestant) -> int:
        if contestant.is_ours:
            return int(self._child(contestant, self._chosen).call("weight_bytes"))
        return self._subject.peer_weight_bytes()

    def _cache_bytes(self, contestant: Contestant, tokens: int, child: Child | None = None) -> int | None:
        """Bytes of K/V of `tokens` tokens; None for a peer that does not say them."""
        if contestant.is_ours:
            child = child or self._child(contestant, self._chosen)
            return int(child.call("cache_bytes", tokens))
        bits = contestant.peer.caches[contestant.cache]
        return None if bits is None else self._subject.kv_bytes(bits, tokens)

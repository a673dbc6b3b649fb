"""The sections of a speed measurement: threads, prompts, generation after growing contexts, batches, memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from polarlm.bench import report
from polarlm.bench.speed.child import Child, Failed, memory
from polarlm.bench.speed.contestants import OURS, Children, Contestant, Subject
from polarlm.bench.speed.figures import BATCHES, GENERATION, PROMPT, Cell, Row, Speed, best
from polarlm.bench.speed.options import RATES, STARTS
from polarlm.bench.speed.referee import Referee
from polarlm.bench.speed.starts import START_TOKENS, WITH_EMPTY_FOLDER, measure_starts
from polarlm.engine import EngineConfig
from polarlm.engine.cli.commands import note

# Short generation: from this context to 64 tokens.
SHORT, SHORT_DEPTH, SHORT_STEPS = "generation, depth ≤ 64", 8, 56
# As many steps as a block has tokens, so that each run encodes one block.
DEEP_STEPS = EngineConfig.block_size
# Numbers of sequences in steps of several sequences, each with its own prompt.
SEQUENCES = (1, 8, 16)
_BATCH_PROMPT, _BATCH_DEPTH = 16, 128  # prompts so short that all sequences have begun long before the first ends
_WHOLE = 256  # tokens; llama.cpp rounds its cache size up to a multiple
# Work for the progress bar, in tokens of a prompt, roughly.
_STEP_WORK = 5
_START_WORK = 1000
_BUFFER = 512 << 20  # bytes, many times the last-level cache


class Memory:
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

    only: None, or what alone is measured: RATES of prompts and generation, or STARTS. seconds: that there are for all.
    """

    prompts: Sequence[int]
    depths: Sequence[int]
    threads: Sequence[int]
    repeat: int
    vocabulary: int
    max_context: int
    only: str | None = None
    seconds: float = math.inf

    @property
    def context(self) -> int:
        """Tokens of context for prompts and generation."""
        needed = [SHORT_DEPTH + SHORT_STEPS, *self.prompts, *(depth + DEEP_STEPS for depth in self.depths)]
        return self.whole(max(needed) + 1)

    @property
    def memory_context(self) -> int:
        """Tokens of context for measuring memory: little more than are in use."""
        return self.whole(max(self.prompts) + DEEP_STEPS + 1)

    def whole(self, tokens: int) -> int:
        return min(-(-tokens // _WHOLE) * _WHOLE, self.max_context)


class Measurement:
    """Measures all sections in order, into `speed`. on_progress is called after each row."""

    def __init__(
        self, plan: Plan, subject: Subject, speed: Speed, children: Children, on_progress: Callable[[], object]
    ) -> None:
        self._plan, self._subject, self._speed = plan, subject, speed
        self._children, self._on_progress = children, on_progress
        self._referee = Referee(children, plan.repeat)
        self._rng = np.random.default_rng(0)
        self._deep = self._ids(max([1, *plan.prompts, *plan.depths]))  # prompts and contexts start with these tokens

    def run(self) -> bool:
        """Measure everything that there is time for; whether that is all. A contestant that fails is left out up to the
        end of the part; its cells say why.

        Batches, memory and starts have processes with settings of their own: what ends one may well not end the next.
        """
        parts, end, is_whole = self._parts(), time.monotonic() + self._plan.seconds, True
        try:
            self._referee.show(sum(work for _, work, _ in parts))
            for number, (name, work, measure) in enumerate(parts):
                self._referee.begin(work)
                if time.monotonic() + work * self._work_seconds() > end:
                    self._speed.left_out.append(f"There was no time for {name}: give more --minutes")
                    is_whole = False
                    continue
                measure()
                if number == 0 and (seconds := sum(work for _, work, _ in parts) * self._work_seconds()):
                    note(f"All of it takes about {report.duration(seconds)}, and what loading takes")
        finally:
            self._referee.close()
        return is_whole

    def _work_seconds(self) -> float:
        """About the seconds of a unit of work, by the steps when the threads were chosen; 0 before that."""
        runs = self._speed.tried.get(OURS, {}).values()
        return 1 / (_STEP_WORK * max(map(max, filter(None, runs)), default=math.inf))

    def _parts(self) -> list[tuple[str, float, Callable[[], None]]]:
        """(name, work, what measures it) in order."""
        plan, contestants, runs = self._plan, len(self._speed.contestants), 1 + self._plan.repeat
        parts: list[tuple[str, float, Callable[[], None]]] = []
        if plan.only != STARTS:
            short = runs * SHORT_STEPS * _STEP_WORK
            parts.append(("threads", short * len(plan.threads), self._choose_threads))
            parts.append((SHORT, short * contestants, partial(self._generate, SHORT, SHORT_DEPTH, SHORT_STEPS)))
            for tokens in plan.prompts:
                name = f"prompt of {tokens:,}"
                parts.append((name, runs * tokens * contestants, partial(self._measure_prompt, name, tokens)))
            for depth in plan.depths:
                name, work = f"generation at {depth:,}", (depth / 2 + runs * DEEP_STEPS * _STEP_WORK) * contestants
                parts.append((name, work, partial(self._generate, name, depth, DEEP_STEPS)))
        if plan.only is None:
            parts.append(("batches", runs * len(SEQUENCES) * _BATCH_DEPTH * 3 * _STEP_WORK, self._measure_batches))
            work = (max(plan.prompts) + DEEP_STEPS * _STEP_WORK) * contestants
            parts.append(("memory", work, self._measure_memory))
        if plan.only != RATES:
            engines = len({contestant.engine for contestant in self._speed.contestants})
            parts.append(("starts", (runs * engines + WITH_EMPTY_FOLDER) * _START_WORK, self._measure_starts))
        return parts

    # -- the machine -------------------------------------------------------------------------------------------

    def _measure_bandwidth(self) -> None:
        """Add a run with each number of threads. The fastest of all runs counts, since no step can be faster."""
        if self._speed.device == "cpu":
            memory = Memory()
            for threads in self._plan.threads:
                self._speed.bandwidth.setdefault(threads, []).append(memory.read_rate(threads))

    def _choose_threads(self) -> None:
        """Find the number of threads with which our first contestant generates fastest after a short context.

        Prompts use the most threads. A peer's best number is found in each row.
        """
        plan, speed, leader = self._plan, self._speed, self._leader
        cells = {threads: Cell(leader, threads) for threads in plan.threads}
        note("Loading, and trying the numbers of threads" if len(plan.threads) > 1 else "Loading")
        self._measure_steps("threads", [*cells.values()], SHORT_DEPTH, SHORT_STEPS, warm_up=True)
        speed.tried[OURS] = {threads: cell.runs for threads, cell in cells.items()}
        medians = {threads: cell.median for threads, cell in cells.items() if cell.runs}
        speed.chosen[OURS] = max(medians, key=medians.__getitem__, default=speed.most_threads)
        if leader not in self._children.failures:
            try:
                speed.ours = self._child(leader, speed.chosen[OURS]).call("about")
            except Failed as error:
                self._children.fail(leader, str(error))
        self._children.close(lambda contestant, threads: contestant.is_ours and threads != speed.chosen[OURS])

    # -- sections ----------------------------------------------------------------------------------------------

    def _generate(self, name: str, depth: int, steps: int) -> None:
        """Measure steps after `depth` tokens, which every contestant computes once, in its first run."""
        self._measure_bandwidth()
        row = Row(GENERATION, name, depth)
        cells = self._cells(self._speed.chosen[OURS])
        first = depth == SHORT_DEPTH  # later contexts need no warm-up
        self._measure_steps(name, cells, depth, steps, warm_up=first)
        row.cells += self._best(cells)
        for cell in row.cells:
            cache = self._cache_bytes(cell.contestant, depth) if cell.runs else None
            if cache is not None:
                cell.read = {"weights": self._weight_bytes(cell.contestant), "cache": cache}
        self._add(row)

    def _cells(self, ours: int) -> list[Cell]:
        """Cells of all contestants in a row: of ours with `ours` threads, of a peer with each number, most first."""
        return [
            Cell(contestant, threads)
            for contestant in self._speed.contestants
            for threads in ([ours] if contestant.is_ours else reversed(self._plan.threads))
        ]

    def _best(self, cells: Sequence[Cell]) -> list[Cell]:
        counting = []
        for contestant in self._speed.contestants:
            candidates = [cell for cell in cells if cell.contestant == contestant]
            counting.append(candidates[0] if contestant.is_ours else best(candidates))
        return counting

    def _measure_steps(self, name: str, cells: Sequence[Cell], depth: int, steps: int, *, warm_up: bool) -> None:
        ids, following = self._deep[:depth], self._ids(steps + 1)

        def run(cell: Cell, number: int) -> float:
            return float(self._child(cell.contestant, cell.threads).call("generation_rate", ids, following))

        self._referee.measure(name, cells, run, warm_up=warm_up)

    def _measure_prompt(self, name: str, tokens: int) -> None:
        """Measure prompts. Each run has its own prompt; the last one is the start of the context for generation."""
        row = Row(PROMPT, name, tokens)
        cells = self._cells(self._speed.most_threads)
        prompts = [self._ids(tokens) for _ in range(self._plan.repeat)]
        prompts[-1] = self._deep[:tokens]

        def run(cell: Cell, number: int) -> float:
            return float(self._child(cell.contestant, cell.threads).call("prompt_rate", prompts[number]))

        first = tokens == self._plan.prompts[0]  # longer prompts need no warm-up
        self._referee.measure(row.name, cells, run, warm_up=first)
        row.cells += self._best(cells)
        self._add(row)

    def _measure_batches(self) -> None:
        self._children.end_part()
        leader, prompts = self._leader, [self._ids(_BATCH_PROMPT) for _ in range(max(SEQUENCES))]
        sequences = {Cell(leader, self._speed.chosen[OURS]): count for count in SEQUENCES}
        settings, context = {"parallel": max(SEQUENCES), "kept_sequences": 0}, max(SEQUENCES) * _BATCH_DEPTH

        def run(cell: Cell, number: int) -> float:
            child, count = self._children.child(leader, cell.threads, context, settings), sequences[cell]
            steps = child.call("together", prompts[:count], _BATCH_DEPTH - _BATCH_PROMPT)["steps"]
            if not steps:
                raise Failed("not all sequences ran at the same time")
            return count * len(steps) / sum(steps)

        self._referee.measure("batches", [*sequences], run)
        for cell, count in sequences.items():
            self._add(Row(BATCHES, f"steps of {count}, depth ≤ {_BATCH_DEPTH}", count, [cell]))

    @property
    def _leader(self) -> Contestant:
        return next(contestant for contestant in self._speed.contestants if contestant.is_ours)

    def _measure_memory(self) -> None:
        """Measure fresh processes after the longest prompt and some steps, with a cache for little more than these."""
        self._children.end_part()
        tokens = max(self._plan.prompts)
        ids, following = self._deep[:tokens], self._ids(DEEP_STEPS + 1)
        context = self._plan.memory_context
        for contestant in self._speed.contestants:
            about: dict[str, Any] = {"engine": contestant.engine, "cache": contestant.cache}
            try:
                child = self._children.child(contestant, self._speed.most_threads, context)
                child.call("generation_rate", ids, following)
                measured: dict[str, Any] = child.call("memory") if contestant.is_program else memory(child.pid)
                cache = self._cache_bytes(contestant, tokens, child)
                measured |= {} if cache is None else {"cache_bytes": cache}
            except Failed as error:
                measured = {"failure": str(error)}
            self._children.close()
            self._speed.memory.append(about | measured | {"tokens": tokens, "context": context})
            self._referee.advance(1 / len(self._speed.contestants))
        self._on_progress()

    def _measure_starts(self) -> None:
        self._children.end_part()
        context, ids = self._plan.memory_context, self._ids(START_TOKENS)
        measure_starts(self._speed, self._subject, self._referee, context, ids)
        self._on_progress()

    # -- help --------------------------------------------------------------------------------------------------

    def _child(self, contestant: Contestant, threads: int) -> Child:
        return self._children.child(contestant, threads, self._plan.context)

    def _ids(self, count: int) -> list[int]:
        """New random tokens with each call; the same sequence of calls gives the same tokens."""
        return self._rng.integers(self._plan.vocabulary, size=count).tolist()

    def _add(self, row: Row) -> None:
        self._speed.rows.append(row)
        for cell in row.cells:
            rate = f"{cell.median:,.1f} tokens/s" if cell.runs and cell.failure is None else cell.failure
            note(f"{row.name}, {cell.contestant.engine} {cell.contestant.cache}: {rate}")
        self._on_progress()

    def _weight_bytes(self, contestant: Contestant) -> int:
        if contestant.is_ours:
            return int(self._child(contestant, self._speed.chosen[OURS]).call("weight_bytes"))
        return self._subject.peer_weight_bytes()

    def _cache_bytes(self, contestant: Contestant, tokens: int, child: Child | None = None) -> int | None:
        """Bytes of K/V of `tokens` tokens; None for a peer that does not say them."""
        if contestant.is_ours:
            child = child or self._child(contestant, self._speed.chosen[OURS])
            return int(child.call("cache_bytes", tokens))
        bits = contestant.peer.caches[contestant.cache]
        return None if bits is None else self._subject.kv_bytes(bits, tokens)

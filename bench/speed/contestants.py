"""The contestants of a measurement: each engine with each of its caches, in child processes, and which runs count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polarlm.bench.command import CacheType
from polarlm.bench.result import Result, Row
from polarlm.bench.speed import peers
from polarlm.bench.speed.child import Child
from polarlm.engine import EngineConfig

OURS = "polarlm"
_OURS = "polarlm.bench.speed.ours"


@dataclass(frozen=True)
class Contestant:
    """An engine and its cache."""

    engine: str
    cache: str
    types: CacheType | None = field(default=None, compare=False)  # for our engine, as is the next
    input_bits: str | int = field(default=EngineConfig.input_bits, compare=False)
    replayable: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.engine} {self.cache}"

    @property
    def is_ours(self) -> bool:
        return self.engine == OURS

    @property
    def peer(self) -> peers.Peer:
        """What the peer says about itself, for a contestant that is not ours."""
        return peers.every()[self.engine]


@dataclass(frozen=True)
class Subject:
    """The model that all contestants run. end: when their time is over, by `time.monotonic`."""

    path: Path
    device: str
    layers: int
    kv_heads: int
    head_dim: int
    peer_paths: Mapping[str, str] = field(default_factory=dict)  # name of a peer → its Python
    end: float = math.inf

    def kv_bytes(self, bits: float, tokens: int) -> int:
        """Bytes of K/V of `tokens` tokens with `bits` bits a value."""
        return round(2 * self.layers * self.kv_heads * self.head_dim * tokens * bits / 8)

    def peer_weight_bytes(self) -> int:
        """Bytes of the matrices of a .gguf file that a step of one token multiplies by."""
        import gguf

        reader = gguf.GGUFReader(self.path)
        tensors = {tensor.name: tensor for tensor in reader.tensors if len(tensor.shape) > 1}
        if "output.weight" in tensors:  # the embedding is not the head
            tensors.pop("token_embd.weight", None)
        of_experts = [int(tensor.n_bytes) for tensor in tensors.values() if len(tensor.shape) == 3]
        count, used = (_metadata(reader, f"expert_{key}", 1) for key in ("count", "used_count"))
        dense = sum(int(tensor.n_bytes) for tensor in tensors.values() if len(tensor.shape) == 2)
        return dense + sum(of_experts) * used // count


def _metadata(reader: Any, key: str, default: int) -> int:
    field = next((field for name, field in reader.fields.items() if name.partition(".")[2] == key), None)
    return default if field is None else int(field.contents())


def new_child(contestant: Contestant, subject: Subject) -> Child:
    """A new process of the contestant. Raises Failed."""
    if contestant.is_ours:
        return Child(_OURS, end=subject.end)
    return Child(contestant.peer.module, subject.peer_paths[contestant.engine], end=subject.end)


def start(
    child: Child,
    contestant: Contestant,
    subject: Subject,
    threads: int,
    context: int,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Load the model in a process. settings: further fields of EngineConfig for our engine. Raises Failed."""
    arguments: list[Any] = [contestant.cache]
    if contestant.is_ours:
        types = {} if contestant.types is None else contestant.types.settings()
        own = {"device": subject.device, "input_bits": contestant.input_bits, "replayable": contestant.replayable}
        arguments = [{**own, **types, **(settings or {})}]
    child.call("start", str(subject.path), context, threads, *arguments)


class Children:
    """The processes of contestants. failures: why contestants are left out of the workload that is measured."""

    def __init__(self, subject: Subject) -> None:
        self.failures: dict[Contestant, str] = {}
        self._subject = subject
        self._children: dict[tuple[Contestant, int, int], Child] = {}

    def child(
        self, contestant: Contestant, threads: int, context: int, settings: Mapping[str, Any] | None = None
    ) -> Child:
        """The contestant's process with this many threads and room for `context` tokens, started if necessary.

        settings: further fields of EngineConfig for starting our engine. Raises Failed.
        """
        key = contestant, threads, context
        if key not in self._children:
            child = self._children[key] = new_child(contestant, self._subject)
            start(child, contestant, self._subject, threads, context, settings)
        return self._children[key]

    def fail(self, contestant: Contestant, reason: str) -> None:
        """Leave a contestant out of what follows in this workload."""
        self.failures[contestant] = reason
        self.close(lambda other, _: other == contestant)

    def end_workload(self) -> None:
        """End all processes, and forget who has failed."""
        self.close()
        self.failures.clear()

    def close(self, leaves: Callable[[Contestant, int], bool] | None = None) -> None:
        """End the processes for which leaves(contestant, threads) is true; all of them without `leaves`."""
        for key in [key for key in self._children if leaves is None or leaves(key[0], key[1])]:
            self._children.pop(key).close()


PROMPT, GENERATION = "prompt", "generation"  # sections
SEQUENCES = "sequences"  # a subject, with their number before it
RATE = "tokens/s"
FAR_BEHIND = 1.5  # times as fast as with fewer threads a contestant is with more, so that fewer need no further runs
MARGIN = 0.1  # share of the fastest run by which a peer's second fastest may be slower, or its figure does not count
_STARVED = 0.05  # share of the memory's bandwidth below which a peer has lacked a core


def subject_of(section: str, tokens: int) -> str:
    """The subject of a PROMPT of so many tokens, or of GENERATION after them."""
    return f"{section} {'at' if section == GENERATION else 'of'} {tokens:,}"


def add_sequences(result: Result, who: str, count: int, runs: Mapping[str, Sequence[float]], **more: Any) -> None:
    """Add what `count` sequences take that are asked at the same time: the seconds until all have their "first" token,
    the "seconds" until all have ended, and those of a "step" of all, if they ran together. more: the tokens of each
    "prompt" and "answer", and other fields."""
    for quantity, seconds in runs.items():
        if seconds or more.get("failure"):
            result.add(f"{count} {SEQUENCES}", who, quantity, seconds, sequences=count, **more)


@dataclass(eq=False)
class Cell:
    """The runs of one contestant in one row, in tokens per second, or the reason why there are none."""

    contestant: Contestant
    threads: int
    runs: list[float] = field(default_factory=list)
    failure: str | None = None
    tried: Mapping[int, Sequence[float]] = field(default_factory=dict)  # numbers of threads of a peer → their runs

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def is_stable(self) -> bool:
        """Whether the two fastest runs agree."""
        fastest, *slower = sorted(self.runs, reverse=True)
        return bool(slower) and slower[0] >= (1 - MARGIN) * fastest


def is_far_behind(cell: Cell, cells: Sequence[Cell]) -> bool:
    """Whether the same contestant with more threads is stable and so much faster that `cell` cannot be its best."""
    return any(
        cell.runs and more.is_stable and max(more.runs) > FAR_BEHIND * max(cell.runs)
        for more in cells
        if more.contestant == cell.contestant and more.threads > cell.threads
    )


def best(cells: Sequence[Cell]) -> Cell:
    """The cell that counts among a peer's cells in one row: the fastest stable cell; else the fastest, as a failure."""
    measured = [cell for cell in cells if cell.runs and cell.failure is None]
    if not measured:
        return cells[0]
    chosen = max(measured, key=lambda cell: (cell.is_stable, cell.median))
    chosen.tried = {cell.threads: cell.runs for cell in measured}
    if not chosen.is_stable:
        chosen.failure = "unstable"
    return chosen


def starvation(row: Row, share: float | None, ours: float) -> str:
    """How the rate of a peer shows that other processes have had its cores; "" if it does not.

    share, ours: of the memory's bandwidth, the peer's and our largest in the same row: a small model reads little with
    any engine.
    """
    tried = {int(threads): max(runs) for threads, runs in row.more.get("tried", {}).items()}
    few, many = min(tried, default=0), max(tried, default=0)
    if few < many and tried[many] < (1 - MARGIN) * tried[few]:
        return f"slower with {many} threads than with {few}"
    has_core = share is None or share >= _STARVED or ours < _STARVED
    return "" if has_core else f"at {share:.1%} of the memory's bandwidth"

"""The figures of a speed measurement, as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarlm.bench.speed.contestants import Contestant

PROMPT, GENERATION, BATCHES = "prompt", "generation", "batches"
FAR_BEHIND = 1.5  # times as fast as with fewer threads a contestant is with more, so that fewer need no further runs
MARGIN = 0.1  # share of the fastest run by which a peer's second fastest may be slower, or its figure does not count


@dataclass(eq=False)
class Cell:
    """The runs of one contestant in one row, in tokens per second, or the reason why there are none."""

    contestant: Contestant
    threads: int
    runs: list[float] = field(default_factory=list)
    failure: str | None = None
    read: Mapping[str, int] | None = None  # bytes of "weights" and "cache" that a step reads
    tried: Mapping[int, Sequence[float]] = field(default_factory=dict)  # numbers of threads of a peer → their runs

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def is_stable(self) -> bool:
        """Whether the two fastest runs agree."""
        fastest, *slower = sorted(self.runs, reverse=True)
        return bool(slower) and slower[0] >= (1 - MARGIN) * fastest

    def as_json(self, bandwidth: Mapping[int, Sequence[float]]) -> dict[str, Any]:
        """The cell as JSON. bandwidth: number of threads → bytes per second of each measurement."""
        cell: dict[str, Any] = {"engine": self.contestant.engine, "cache": self.contestant.cache}
        if self.tried:
            cell["tried"] = {str(threads): list(runs) for threads, runs in self.tried.items()}
        if self.failure is not None or not self.runs:
            return {**cell, "failure": self.failure or "not measured"}
        cell |= {"threads": self.threads, "median": self.median, "fastest": max(self.runs), "runs": self.runs}
        if self.read is not None:
            cell["bytes_read"] = dict(self.read)
            if self.threads in bandwidth:
                cell["bandwidth_share"] = sum(self.read.values()) * self.median / max(bandwidth[self.threads])
        return cell


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


@dataclass
class Row:
    """The results of all contestants in one task."""

    section: str
    name: str
    tokens: int  # tokens of the prompt or before the steps; for batches, the number of sequences
    cells: list[Cell] = field(default_factory=list)

    def as_json(self, bandwidth: Mapping[int, Sequence[float]]) -> dict[str, Any]:
        cells = [cell.as_json(bandwidth) for cell in self.cells]
        return {"section": self.section, "name": self.name, "tokens": self.tokens, "cells": cells}


@dataclass
class Speed:
    """The results of a measurement."""

    model: str
    weights: str  # the format in which the file stores them
    file_bytes: int  # bytes of all tensors in their files
    device: str
    contestants: Sequence[Contestant]
    # For each peer its "name", its "version_or_absence", and what it was "built_with", which is empty if it is missing.
    peers: list[dict[str, str]] = field(default_factory=list)
    ours: dict[str, Any] = field(default_factory=dict)  # `Ours.about` of our first contestant
    most_threads: int = 1
    peer_threads: Sequence[int] = ()  # numbers of threads; a peer's best one counts in each row
    # Engine → number of threads → steps per second of short generation, by which the number is chosen.
    tried: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    bandwidth: dict[int, list[float]] = field(default_factory=dict)  # threads → bytes per second
    rows: list[Row] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # sentences

    def as_json(self) -> dict[str, Any]:
        same = ("model", "weights", "file_bytes", "device", "ours", "peers", "memory", "starts", "left_out")
        threads = {"most": self.most_threads, "peers": list(self.peer_threads)}
        return {
            **{name: getattr(self, name) for name in same},
            "contestants": [contestant.as_json() for contestant in self.contestants],
            "threads": {**threads, "chosen": self.chosen, "tried": self.tried},
            "bytes_per_second": self.bandwidth,
            "unit": "tokens/s",
            "rows": [row.as_json(self.bandwidth) for row in self.rows],
        }

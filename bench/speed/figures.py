"""The figures of a speed measurement, as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polarlm.bench.speed import peer
from polarlm.bench.speed.contestants import Contestant

PROMPT, GENERATION, BATCHES = "prompt", "generation", "batches"


@dataclass
class Cell:
    """The runs of one contestant in one row, in tokens per second, or the reason why there are none."""

    contestant: Contestant
    threads: int
    runs: list[float] = field(default_factory=list)
    failure: str | None = None
    read: Mapping[str, int] | None = None  # bytes of "weights" and "cache" that a step reads

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    def as_json(self, bandwidth: Mapping[int, Sequence[float]]) -> dict[str, Any]:
        """The cell as JSON. bandwidth: number of threads → bytes per second of each measurement."""
        found: dict[str, Any] = {"engine": self.contestant.engine, "cache": self.contestant.cache}
        if self.failure is not None or not self.runs:
            return {**found, "failure": self.failure or "not measured"}
        found |= {"threads": self.threads, "median": self.median, "fastest": max(self.runs), "runs": self.runs}
        if self.read is not None:
            found["bytes_read"] = dict(self.read)
            if self.threads in bandwidth:
                found["bandwidth_share"] = sum(self.read.values()) * self.median / max(bandwidth[self.threads])
        return found


@dataclass
class Row:
    """The results of all contestants in one task."""

    section: str
    name: str
    tokens: int  # tokens of the prompt or before the steps; for batches, the number of sequences
    cells: list[Cell] = field(default_factory=list)


@dataclass
class Speed:
    """The results of a measurement."""

    model: str
    weights: str  # the format in which the file stores them
    file_bytes: int  # of all tensors in their files
    device: str
    contestants: Sequence[Contestant]
    peer: str  # its version, or the reason why it is missing
    peer_built_with: str = ""
    ours: dict[str, Any] = field(default_factory=dict)  # `Ours.about` of our first contestant
    most_threads: int = 1
    # Engine → number of threads → steps per second of short generation, by which the number is chosen.
    tried: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    chosen: dict[str, int] = field(default_factory=dict)
    bandwidth: dict[int, list[float]] = field(default_factory=dict)  # threads → bytes per second
    rows: list[Row] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # sentences

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "weights": self.weights,
            "file_bytes": self.file_bytes,
            "device": self.device,
            "ours": self.ours,
            "peer": {"name": peer.NAME, "version_or_absence": self.peer, "built_with": self.peer_built_with},
            "contestants": [
                {
                    "engine": contestant.engine,
                    "cache": contestant.cache,
                    **({"types": contestant.types.pair} if contestant.types else {}),
                }
                for contestant in self.contestants
            ],
            "threads": {"most": self.most_threads, "chosen": self.chosen, "tried": self.tried},
            "bytes_per_second": self.bandwidth,
            "unit": "tokens/s",
            "rows": [
                {
                    "section": row.section,
                    "name": row.name,
                    "tokens": row.tokens,
                    "cells": [cell.as_json(self.bandwidth) for cell in row.cells],
                }
                for row in self.rows
            ],
            "memory": self.memory,
            "starts": self.starts,
            "left_out": self.left_out,
        }

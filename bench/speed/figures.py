"""The runs of a contestant in a row of a speed measurement, and which of a peer's count."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polarlm.bench.result import Row
from polarlm.bench.speed.contestants import Contestant

PROMPT, GENERATION, BATCHES = "prompt", "generation", "batches"  # sections
RATE = "tokens/s"
FAR_BEHIND = 1.5  # times as fast as with fewer threads a contestant is with more, so that fewer need no further runs
MARGIN = 0.1  # share of the fastest run by which a peer's second fastest may be slower, or its figure does not count
_STARVED = 0.05  # share of the memory's bandwidth below which a peer has lacked a core


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


def starved(row: Row, share: float | None, ours: float) -> str:
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

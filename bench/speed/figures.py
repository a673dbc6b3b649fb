"""The lines of a speed measurement, as JSON and as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench import report
from bench.speed.peer import NAME as PEER_NAME
from bench.speed.timing import Rates


@dataclass
class Figure:
    """One line of the table: our rate and its comparisons."""

    name: str
    cache_type: str  # label of a CacheType
    ours: Rates = field(default_factory=Rates)
    weights_alone: Rates | None = None
    peer: Rates | str | None = None  # a string is the reason why there is none
    one_stream: Rates | None = None  # for steps of a batch


@dataclass
class Speed:
    """A whole measurement."""

    model: str
    weights: str  # how they are stored
    peer: str  # its version, or the reason why it is missing
    figures: list[Figure]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "weights": self.weights,
            "peer": {"name": PEER_NAME, "version_or_absence": self.peer},
            "unit": "tokens/s",
            "figures": [
                {
                    "name": figure.name,
                    "cache_type": figure.cache_type,
                    "ours": figure.ours.summary(),
                    "weights_alone": figure.weights_alone and figure.weights_alone.summary(),
                    "one_stream": figure.one_stream and figure.one_stream.summary(),
                    "peer": figure.peer.summary() if isinstance(figure.peer, Rates) else figure.peer,
                }
                for figure in self.figures
            ],
        }


def format_table(speed: Speed) -> str:
    """Our rate, then the weights alone, one stream and the peer, each with our share or multiple of it."""
    header = (
        "",
        "cache",
        "tokens/s",
        "threads",
        "fastest",
        "weights alone",
        "share",
        "one stream",
        "times",
        PEER_NAME,
        "ratio",
    )
    rows = []
    for figure in speed.figures:
        ours, floor, one, peer = figure.ours, figure.weights_alone, figure.one_stream, figure.peer
        rows.append(
            (
                figure.name,
                figure.cache_type,
                f"{ours.median:,.1f}",
                str(ours.threads),
                f"{ours.fastest:,.1f}",
                f"{floor.median:,.1f}" if floor else "—",
                f"{100 * ours.median / floor.median:.0f} %" if floor else "—",
                f"{one.median:,.1f}" if one else "—",
                f"{ours.median / one.median:.2f}" if one else "—",
                f"{peer.median:,.1f}" if isinstance(peer, Rates) else peer or "—",
                f"{ours.median / peer.median:.2f}" if isinstance(peer, Rates) else "—",
            )
        )
    return report.table(header, rows)

"""The picture of a simulation: hit rates by the number of machines, and machines by routing and tiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polarlm.bench.plot_style import NO_PICTURES, STYLE, can_draw, panels, save

_ROUTING = {
    "random": ("random", "#4b5563"),
    "least": ("fewest requests", "#1d4ed8"),
    "affinity": ("affinity", "#c2410c"),
}
_CACHES = ("#c2410c", "#111827", "#1d4ed8", "#0d9488")


def draw(result: Mapping[str, Any], output: Path) -> str:
    """Draw next to the JSON file `output`; returns a sentence about it. Raises EngineError."""
    if not can_draw():
        return NO_PICTURES
    from matplotlib import rc_context

    file = output.with_suffix(".png")
    with rc_context(STYLE):
        figure, ((rates, waits, fleets),) = panels(3, 1, (4.6, 4.2))
        for routing, (label, colour) in _ROUTING.items():
            rows = [row for row in result["by_machines"] if row["routing"] == routing]
            counts = [row["machines"] for row in rows]
            rates.plot(counts, [100 * row["hits"]["store"] for row in rows], "o-", color=colour, label=label)
            p95 = [1e3 * row["first_token_seconds"]["95"] for row in rows]
            waits.plot(counts, p95, "o-", color=colour)
        for ax in (rates, waits):
            ax.set_xscale("log")
            ax.set_xlabel("machines")
        rates.set_ylim(0, 100)
        rates.set_ylabel("percent of the prompts' tokens in the store")
        waits.set_ylim(0)
        waits.set_ylabel("ms to the first token, 95 %")
        rates.legend()
        _draw_needed(fleets, result)
        predicted = any("PREDICTED" in cost["source"] for cost in result["costs"])
        figure.suptitle(f"Simulation, costs {'predicted' if predicted else 'measured'}", fontweight="bold")
        save(figure, file)
    return f"Picture: {file.name}"


def _draw_needed(ax: Any, result: Mapping[str, Any]) -> None:
    caches = [cost["cache"] for cost in result["costs"]]
    fleets = list(dict.fromkeys((row["routing"], tuple(row["tiers"])) for row in result["needed"]))
    height = 0.8 / len(caches)
    for number, cache in enumerate(caches):
        machines = {(r["routing"], tuple(r["tiers"])): r["machines"] for r in result["needed"] if r["cache"] == cache}
        at = np.arange(len(fleets)) + number * height
        ax.barh(
            at, [machines[fleet] or 0 for fleet in fleets], height, color=_CACHES[number % len(_CACHES)], label=cache
        )
    labels = [f"{_ROUTING[routing][0]}{', ' if tiers else ''}{', '.join(tiers)}" for routing, tiers in fleets]
    ax.set_yticks(np.arange(len(fleets)) + 0.4 - height / 2, labels, fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel(f"machines for {result['load']['load']:g} requests/s")
    ax.legend()

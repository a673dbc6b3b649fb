"""The picture of a speed measurement: generated tokens per second against the context."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polarlm.bench.plots import NO_PICTURES, STYLE, can_draw, panels, save, spread
from polarlm.bench.speed.contestants import OURS
from polarlm.bench.speed.figures import GENERATION
from polarlm.bench.speed.tables import label

# Our lines are solid and coloured; lines of peers are dashed and grey. The colours also differ in lightness.
_OURS = ("#c2410c", "#7c3aed", "#0d9488", "#1d4ed8", "#a16207", "#be123c")
_PEER = ("#111827", "#6b7280", "#8d929c")


def draw(measured: Mapping[str, Any], output: Path) -> str:
    """Draw next to the JSON file `output`; returns a sentence about it. Raises EngineError."""
    lines = _lines(measured)
    if not any(len(points) > 1 for points in lines.values()):
        return "No picture: generation was measured after fewer than two contexts"
    if not can_draw():
        return NO_PICTURES
    from matplotlib import rc_context
    from matplotlib.ticker import StrMethodFormatter

    file = output.with_suffix(".png")
    ours, theirs = iter(2 * _OURS), iter(2 * _PEER)
    with rc_context(STYLE):
        figure, (ax,) = panels(1, (7.2, 4.2))
        ends, labels, colours = [], [], []
        for (engine, cache), points in lines.items():
            is_ours = engine == OURS
            colour = next(ours) if is_ours else next(theirs)
            contexts, rates = zip(*points, strict=True)
            ax.plot(contexts, rates, marker="o", ms=4, lw=1.8, ls="-" if is_ours else "--", color=colour)
            ends.append(rates[-1])
            labels.append(cache if is_ours else f"{label(engine)} {cache}")
            colours.append(colour)
        ax.set_ylim(0)
        ax.set_xlim(0)
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.set_xlabel("tokens of context")
        ax.set_ylabel("generated tokens/s")
        ax.set_title(f"{measured['model']} ({measured['weights']}), one request", loc="left")
        spread(ax, ends, labels, colours)
        save(figure, file)
    return f"Picture: {file.name}"


def _lines(measured: Mapping[str, Any]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in measured["rows"]:
        for cell in row["cells"]:
            if row["section"] == GENERATION and "median" in cell:
                lines.setdefault((cell["engine"], cell["cache"]), []).append((row["tokens"], cell["median"]))
    return lines

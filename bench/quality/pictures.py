"""Pictures of a measurement: SVG for the page, and PNG by `python -m polarlm.bench.quality.pictures FILE`."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm.bench import plots
from polarlm.bench.plots import (
    NO_PICTURES,
    STYLE,
    can_draw,
    colour_of,
    label_points,
    panels,
    plain_log,
    save,
    spread,
)
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]

_PLAIN = ":plain"
_BEYOND = 12.0  # bits/value above which a type is left out of pictures of what compression costs
_SIZE = (4.4, 3.3)  # inches of a panel
_DASHES = ("-", "--", "-.", ":")  # for lines of one colour
# Colour in the drawing → (name of the page's CSS variable, colour on a light page, colour on a dark page).
_INK, _FAINT, _GRID = "#010101", "#020202", "#030303"
COLOURS = {
    _INK: ("ink", "#1c1f26", "#e7e9ee"),
    _FAINT: ("faint", "#5a606b", "#a3a9b5"),
    _GRID: ("grid", "#e3e5ea", "#333842"),
    **{light: (start or "other", light, dark) for start, (light, dark) in plots.COLOURS.items()},
}
_PAGE_STYLE = {
    **STYLE,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "grid.color": _GRID,
    "svg.fonttype": "path",
}


def draw(result: Result) -> list[tuple[str, str]] | None:
    """(title, SVG) of each picture that there are figures for; None without matplotlib."""
    if not can_draw():
        return None
    from matplotlib import rc_context

    with rc_context(_PAGE_STYLE):
        drawn = [(title, figure_of(result)) for title, figure_of in _PICTURES.values()]
        return [(title, _svg(figure)) for title, figure in drawn if figure is not None]


def _colour(row: Result) -> str:
    return colour_of(row.get("pair", row["type"]))


def _panels(rows: Sequence[Result], **shared: Any) -> tuple[Figure, list[tuple[Axes, list[Result]]]]:
    """A figure with a panel for each way of scoring, and the rows of each panel."""
    scorings = list(dict.fromkeys(row["scored_as"] for row in rows))
    figure, axes = panels(len(scorings), _SIZE, **shared)
    filled = []
    for ax, scoring in zip(axes, scorings, strict=True):
        filled.append((ax, [row for row in rows if row["scored_as"] == scoring]))
        if len(scorings) > 1:
            ax.set_title(scoring)
    axes[0].set_ylabel("KL divergence, nats (mean)")
    return figure, filled


def divergence(result: Result) -> Figure | None:
    """A figure of KL over bits/value: a point for each type, hollow for types as published."""
    rows = [row for row in result["rows"] if row["kl_mean"] > 0 and row["bits_per_value"] < _BEYOND]
    if not rows:
        return None
    figure, filled = _panels(rows, sharex=True, sharey=True)
    bits, kl = ([row[name] for row in rows] for name in ("bits_per_value", "kl_mean"))
    for ax, points in filled:
        for row in points:
            fill = "none" if row["type"].endswith(_PLAIN) else _colour(row)
            at = row["bits_per_value"], row["kl_mean"]
            ax.plot(*at, "o", ms=7, mew=1.5, mec=_colour(row), mfc=fill, clip_on=False)
        plain_log(ax)
        ax.set_ylim(min(kl) / 2, max(kl) * 2)
        ax.set_xlim(min(2.0, *bits), max(6.0, *bits) + 1)
        ax.set_xlabel("bits per value")
    for ax, points in filled:  # labels last, since everything else moves the axes
        places = [(row["bits_per_value"], row["kl_mean"]) for row in points]
        label_points(ax, places, [row["type"] for row in points], [_colour(row) for row in points])
    return figure


def positions(result: Result) -> Figure | None:
    """A figure of KL over positions: a line for each type."""
    rows = [row for row in result["rows"] if len(_reached(row)) > 1 and row["bits_per_value"] < _BEYOND]
    if not rows:
        return None
    figure, filled = _panels(rows, sharey=True)
    for ax, lines in filled:
        _draw_lines(ax, lines)
    for ax, lines in filled:  # names last: each panel changes the axis of all
        ends = [_reached(row)[-1]["kl_mean"] for row in lines]
        spread(ax, ends, [row["type"] for row in lines], [_colour(row) for row in lines])
    return figure


def _reached(row: Result) -> list[Mapping[str, Any]]:
    """The stretches of positions of a row at which codes are read: not the first; none in an older measurement."""
    return [stretch for stretch in row.get("by_position", ()) if stretch["start"] and stretch["kl_mean"] > 0]


def _draw_lines(ax: Axes, rows: Sequence[Result]) -> None:
    colours = [_colour(row) for row in rows]
    for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        stretches, dashes = _reached(row), _DASHES[colours[:i].count(colour) % len(_DASHES)]
        middle = [np.sqrt(stretch["start"] * stretch["end"]) for stretch in stretches]
        kl = [stretch["kl_mean"] for stretch in stretches]
        ax.plot(middle, kl, dashes, marker="o", ms=3.5, color=colour, lw=1.2)
    plain_log(ax)
    edges = sorted({edge for row in rows for stretch in _reached(row) for edge in (stretch["start"], stretch["end"])})
    ax.set_xscale("log")
    ax.set_xticks(edges, [f"{edge:,}" for edge in edges])
    ax.minorticks_off()
    ax.set_xlabel("position")


def speed(result: Result) -> Figure | None:
    """A figure of tokens a second: a bar for each type, for generation and for a prompt."""
    rows = [row for row in result["rows"] if (row.get("speed") or {}).get("generation")]
    if not rows:
        return None
    figure, axes = panels(2, (_SIZE[0] / 2, 0.9 + 0.32 * len(rows)), sharey=True)
    labels = [row["type"] for row in rows]
    for ax, kind in zip(axes, ("generation", "prompt"), strict=True):
        rates = [row["speed"][kind] for row in rows]
        bars = ax.barh(labels, rates, height=0.62, color=[_colour(row) for row in rows])
        ax.bar_label(bars, [f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}" for rate in rates], padding=3, fontsize=8)
        ax.set_xlim(0, 1.25 * max(rates))
        ax.set_title(kind)
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.locator_params(axis="x", nbins=4)
    axes[0].invert_yaxis()
    figure.supxlabel("tokens/s", fontsize=9)
    return figure


# Suffix of a file's name → title, and the function that draws the figure, or returns None if there is no data for it.
_PICTURES: dict[str, tuple[str, Callable[[Result], Figure | None]]] = {
    "divergence": ("Divergence from full precision against bits", divergence),
    "positions": ("Divergence by position in the text", positions),
    "speed": ("Tokens a second", speed),
}


def _svg(figure: Any) -> str:
    """The figure as an SVG element whose colours are the page's CSS variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda colour: f"var(--{COLOURS[colour[0]][0]})" if colour[0] in COLOURS else colour[0],
        text,
    )


@command
def main(argv: Sequence[str]) -> None:
    """Draw the pictures of a result as PNG files next to it."""
    flags = argparse.ArgumentParser("python -m polarlm.bench.quality.pictures", description="Draw a result's pictures.")
    flags.add_argument("file", metavar="FILE", type=Path, help="JSON of polarlm quality; pictures go next to it")
    file = flags.parse_args(argv).file
    if not can_draw():
        raise EngineError(NO_PICTURES)
    from matplotlib import rc_context

    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        with rc_context(STYLE):
            figures = {kind: figure_of(result) for kind, (_, figure_of) in _PICTURES.items()}
    except (OSError, ValueError, KeyError) as error:
        raise EngineError(f"{file} cannot be read as the JSON of polarlm quality ({error})") from None
    for kind, figure in figures.items():
        if figure is not None:
            picture = file.with_name(f"{file.stem}-{kind}.png")
            save(figure, picture)
            note(f"Written to {picture}")


if __name__ == "__main__":
    sys.exit(main())

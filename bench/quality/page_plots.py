"""The pictures of the page of `polarlm quality`, as SVG that follows the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

from polarlm.bench.plot_labels import label_points
from polarlm.bench.plot_style import STYLE, can_draw, colour_of, panels, plain_log
from polarlm.bench.quality.plots import draw_positions, name_lines, reached

Result = Mapping[str, Any]

_PLAIN = ":plain"
# Colour in the drawing → (name of the page's CSS variable, colour on a light page, colour on a dark page).
_INK, _FAINT, _GRID = "#010101", "#020202", "#030303"
COLOURS = {
    _INK: ("ink", "#1c1f26", "#e7e9ee"),
    _FAINT: ("faint", "#5a606b", "#a3a9b5"),
    _GRID: ("grid", "#e3e5ea", "#333842"),
    "#c2410c": ("ring", "#c2410c", "#fb923c"),
    "#be123c": ("trellis", "#be123c", "#fb7185"),
    "#1d4ed8": ("polarquant", "#1d4ed8", "#7ea6ff"),
    "#0d9488": ("polarpair", "#0d9488", "#2dd4bf"),
    "#7c3aed": ("turbo", "#7c3aed", "#b794ff"),
    "#a16207": ("kivi", "#a16207", "#eab308"),
    "#4b5563": ("q", "#4b5563", "#b6bcc8"),
    "#111827": ("f16", "#111827", "#e7e9ee"),
    "#db2777": ("other", "#db2777", "#f472b6"),
}
_STYLE = {
    **STYLE,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "grid.color": _GRID,
    "svg.fonttype": "path",
}
_BEYOND = 12.0  # bits/value above which a type is left out of pictures of what compression costs
_SIZE = (4.4, 3.3)  # inches


def draw(result: Result) -> list[tuple[str, str]] | None:
    """(title, SVG) of each picture that there are figures for; None without matplotlib."""
    if not can_draw():
        return None
    from matplotlib import rc_context

    with rc_context(_STYLE):
        drawn = {
            "Divergence from full precision against bits": _divergence(result),
            "Divergence by position in the text": _positions(result),
            "Tokens a second": _speed(result),
        }
    return [(title, svg) for title, svg in drawn.items() if svg]


def _colour(row: Result) -> str:
    return colour_of(row["pair"])


def _divergence(result: Result) -> str:
    rows = [row for row in result["rows"] if row["kl_mean"] > 0 and row["bits_per_value"] < _BEYOND]
    if not rows:
        return ""
    figure, ((ax,),) = panels(1, 1, _SIZE)
    places = [(row["bits_per_value"], row["kl_mean"]) for row in rows]
    for row, at in zip(rows, places, strict=True):
        fill = "none" if row["type"].endswith(_PLAIN) else _colour(row)
        ax.plot(*at, "o", ms=7, mew=1.5, mec=_colour(row), mfc=fill, clip_on=False)
    plain_log(ax)
    lowest, highest = min(kl for _, kl in places), max(kl for _, kl in places)
    ax.set_ylim(lowest / 2, highest * 2)
    ax.set_xlim(min(2.0, *(bits for bits, _ in places)), max(6.0, *(bits for bits, _ in places)) + 1)
    ax.set_xlabel("bits per value")
    ax.set_ylabel("KL divergence, nats (mean)")
    label_points(ax, places, [row["type"] for row in rows], [_colour(row) for row in rows])
    return _svg(figure)


def _positions(result: Result) -> str:
    rows = [row for row in result["rows"] if len(reached(row)) > 1 and row["bits_per_value"] < _BEYOND]
    if not rows:
        return ""
    figure, ((ax,),) = panels(1, 1, _SIZE)
    for draw in (draw_positions, name_lines):
        draw(ax, rows, [_colour(row) for row in rows])
    ax.set_ylabel("KL divergence, nats (mean)")
    return _svg(figure)


def _speed(result: Result) -> str:
    rows = [row for row in result["rows"] if row["speed"] and row["speed"]["generation"]]
    if not rows:
        return ""
    figure, (axes,) = panels(2, 1, (_SIZE[0] / 2, 0.9 + 0.32 * len(rows)), sharey=True)
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
    return _svg(figure)


def _svg(figure: Any) -> str:
    """The figure as an SVG element whose colours are the page's CSS variables."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda found: f"var(--{COLOURS[found[0]][0]})" if found[0] in COLOURS else found[0],
        text,
    )

"""Pictures of results, in SVG for a page and as PNG: lines, and points over bits."""

from __future__ import annotations

import importlib.util
import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polarlm.engine import EngineError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#2b2f36",
    "xtick.color": "#5a606b",
    "ytick.color": "#5a606b",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8ec",
    "legend.frameon": False,
    "savefig.dpi": 160,
}
# Prefix of a codec's name → its colour on a light page, and on a dark one. They also differ in lightness.
COLOURS = {
    "ring": ("#c2410c", "#fb923c"),
    "trellis": ("#be123c", "#fb7185"),
    "polarquant": ("#1d4ed8", "#7ea6ff"),
    "polarpair": ("#0d9488", "#2dd4bf"),
    "turbo": ("#7c3aed", "#b794ff"),
    "kivi": ("#a16207", "#eab308"),
    "q": ("#4b5563", "#b6bcc8"),
    "f16": ("#111827", "#e7e9ee"),
    "": ("#db2777", "#f472b6"),  # any other
}
# Ours are solid and coloured, in this order; peers are dashed and grey. The colours also differ in lightness.
OURS = ("#c2410c", "#7c3aed", "#0d9488", "#1d4ed8", "#a16207", "#be123c")
PEERS = ("#111827", "#6b7280", "#8d929c")
# Colour in the drawing → (name of the page's CSS variable, colour on a light page, colour on a dark page).
_INK, _FAINT, _GRID = "#010101", "#020202", "#030303"
PAGE_COLOURS = {
    _INK: ("ink", "#1c1f26", "#e7e9ee"),
    _FAINT: ("faint", "#5a606b", "#a3a9b5"),
    _GRID: ("grid", "#e3e5ea", "#333842"),
    **{light: (start or "other", light, dark) for start, (light, dark) in COLOURS.items()},
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
_MARKS = "osD^v<>pPX"  # of points, since types of a codec have one colour

NO_PICTURES = "No pictures: matplotlib is not installed; pip install 'polarlm[bench]' adds it"


def can_draw() -> bool:
    """Whether matplotlib is installed; NO_PICTURES is the message if it is not."""
    return importlib.util.find_spec("matplotlib") is not None


class Picture(NamedTuple):
    """draw: makes the figure."""

    title: str
    draw: Callable[[], Figure]


class Series(NamedTuple):
    """What belongs to a label: a line, or a point, which is hollow for a type as published."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dashes: str = "-"
    is_hollow: bool = False


def colour_of(label: str) -> str:
    """The colour of a cache type on a light page, by its codec."""
    return next(light for start, (light, _) in COLOURS.items() if label.startswith(start))


def as_svg(pictures: Sequence[Picture]) -> list[tuple[str, str]] | None:
    """Title and SVG of each picture, whose colours are a page's CSS variables; None without matplotlib."""
    if pictures and not can_draw():
        return None
    return [(picture.title, _draw(picture, _PAGE_STYLE, _svg)) for picture in pictures]


def write_png(picture: Picture, json: Path) -> Path:
    """Write the picture of a result next to its JSON. Raises EngineError."""
    file = json.with_suffix(".png")
    try:
        _draw(picture, STYLE, partial(_save, file=file, title=picture.title))
    except OSError as error:
        raise EngineError(f"{file} cannot be written: {error.strerror}") from None
    return file


def _draw(picture: Picture, style: Any, write: Callable[[Figure], Any]) -> Any:
    from matplotlib import rc_context

    with rc_context(style):
        return write(picture.draw())


def _save(figure: Figure, file: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10, fontweight="bold")  # a page has it beside the picture
    figure.savefig(file, bbox_inches="tight", facecolor="white")


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda colour: f"var(--{PAGE_COLOURS[colour[0]][0]})" if colour[0] in PAGE_COLOURS else colour[0],
        text,
    )


# -- kinds of pictures -----------------------------------------------------------------------------------------------


def lines(series: Sequence[Series], x: str, y: str) -> Figure:
    """Lines with their names. x, y: names of the axes, which begin at 0."""
    from matplotlib.ticker import StrMethodFormatter

    figure, (ax,) = _panels([""], (7.2, 4.2), y)
    for one in series:
        ax.plot(one.x, one.y, one.dashes, marker="o", ms=3.5, color=one.colour, lw=1.5, label=one.label)
    ax.set_xlabel(x)
    ax.set_ylim(0)
    ax.set_xlim(0)
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.legend(loc="outside right center")
    return figure


def points(panels: Mapping[str, Sequence[Series]], x: str, y: str) -> Figure:
    """Points over bits, with their names; the y axis is logarithmic. panels: title → its points; a single panel has
    none."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure, axes = _panels([*panels], (4.4, 3.3), y, sharex=True, sharey=True)
    everything = [one for series in panels.values() for one in series]
    across, up = [at for one in everything for at in one.x], [at for one in everything for at in one.y]
    for ax, series in zip(axes, panels.values(), strict=True):
        for one, mark in zip(series, itertools.cycle(_MARKS), strict=False):
            fill, colour = "none" if one.is_hollow else one.colour, one.colour
            ax.plot(one.x, one.y, mark, ms=7, mew=1.5, mec=colour, mfc=fill, clip_on=False, label=one.label)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(min(up) / 2, max(up) * 2)
        ax.set_xlim(min(2.0, *across), max(6.0, *across) + 1)
        ax.set_xlabel(x)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


def _panels(titles: Sequence[str], size: tuple[float, float], y: str, **shared: Any) -> tuple[Figure, np.ndarray]:
    """A figure, and its axes (panels,) beside each other, of `size` inches each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((size[0] * len(titles), size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(titles), squeeze=False, **shared)[0]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title if len(titles) > 1 else "")
    axes[0].set_ylabel(y)
    return figure, axes

"""Pictures of results, in SVG for a page and as PNG: lines, points with labels that do not overlap, and bars."""

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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

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
DASHES = ("-", "--", "-.", ":")  # for lines of one colour
_LABEL_SIZE = 7.5  # points
_LABEL_ROUNDS = 300  # rounds of moving adjacent labels apart; enough for dozens of labels
# Offsets of a label from its point, in points, with their alignment; the first free one is used.
_PLACES = [(7, 0, "left"), (-7, 0, "right"), (5, 7, "left"), (5, -7, "left"), (-5, 7, "right"), (-5, -7, "right")]
_PLACES += [(0, 11, "center"), (0, -11, "center"), (8, 14, "left"), (8, -14, "left"), (-8, 14, "right")]
_PLACES += [(-8, -14, "right"), (10, 21, "left"), (10, -21, "left"), (-10, 21, "right"), (-10, -21, "right")]
_LEADER: dict[str, Any] = {"arrowstyle": "-", "lw": 0.6, "shrinkA": 0, "shrinkB": 3}  # line to a distant label

NO_PICTURES = "No pictures: matplotlib is not installed; pip install 'polarlm[bench]' adds it"


def can_draw() -> bool:
    """Whether matplotlib is installed; NO_PICTURES is the message if it is not."""
    return importlib.util.find_spec("matplotlib") is not None


class Picture(NamedTuple):
    """name: the end of its file's name, or "". draw: makes the figure."""

    name: str
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


Panels = Mapping[str, Sequence[Series]]
"""Title of a panel → its series; a single panel has no title."""


def colour_of(label: str) -> str:
    """The colour of a cache type on a light page, by its codec."""
    return next(light for start, (light, _) in COLOURS.items() if label.startswith(start))


def as_svg(pictures: Sequence[Picture]) -> list[tuple[str, str]] | None:
    """Title and SVG of each picture, whose colours are a page's CSS variables; None without matplotlib."""
    if pictures and not can_draw():
        return None
    return [(picture.title, _draw(picture, _PAGE_STYLE, _svg)) for picture in pictures]


def write_png(pictures: Sequence[Picture], json: Path) -> list[Path]:
    """Write the pictures of a result next to its JSON. Raises EngineError."""
    if pictures and not can_draw():
        raise EngineError(NO_PICTURES)
    files = []
    for picture in pictures:
        file = json.with_name(f"{json.stem}-{picture.name}".rstrip("-") + ".png")
        try:
            _draw(picture, STYLE, partial(_save, file=file, title=picture.title))
        except OSError as error:
            raise EngineError(f"{file} cannot be written: {error.strerror}") from None
        files.append(file)
    return files


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


def lines(
    panels: Panels, x: str, y: str, *, ticks: Sequence[int] = (), size: tuple[float, float] = (4.4, 3.3)
) -> Figure:
    """Lines with their names at their ends. x, y: names of the axes. ticks: of logarithmic axes; others begin at 0."""
    from matplotlib.ticker import StrMethodFormatter

    figure, axes = _panels(panels, size, y, sharey=True)
    for ax, series in zip(axes, panels.values(), strict=True):
        for one in series:
            ax.plot(one.x, one.y, one.dashes, marker="o", ms=3.5, color=one.colour, lw=1.5)
        ax.set_xlabel(x)
        if ticks:
            _plain_log(ax)
            ax.set_xscale("log")
            ax.set_xticks(ticks, [f"{at:,}" for at in ticks])
            ax.minorticks_off()
        else:
            ax.set_ylim(0)
            ax.set_xlim(0)
            ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for ax, series in zip(axes, panels.values(), strict=True):  # names last: each panel changes the axis of all
        _spread(ax, series)
    return figure


def points(panels: Panels, x: str, y: str, size: tuple[float, float] = (4.4, 3.3)) -> Figure:
    """Labelled points over bits; the y axis is logarithmic."""
    figure, axes = _panels(panels, size, y, sharex=True, sharey=True)
    everything = [one for series in panels.values() for one in series]
    across, up = [at for one in everything for at in one.x], [at for one in everything for at in one.y]
    for ax, series in zip(axes, panels.values(), strict=True):
        for one in series:
            fill = "none" if one.is_hollow else one.colour
            ax.plot(one.x, one.y, "o", ms=7, mew=1.5, mec=one.colour, mfc=fill, clip_on=False)
        _plain_log(ax)
        ax.set_ylim(min(up) / 2, max(up) * 2)
        ax.set_xlim(min(2.0, *across), max(6.0, *across) + 1)
        ax.set_xlabel(x)
    for ax, series in zip(axes, panels.values(), strict=True):  # labels last, since everything else moves the axes
        _label_points(ax, series)
    return figure


def bars(panels: Panels, x: str, width: float = 2.2) -> Figure:
    """A bar for the first x of each series."""
    count = max(map(len, panels.values()))
    figure, axes = _panels(panels, (width, 0.9 + 0.32 * count), "", sharey=True)
    for ax, series in zip(axes, panels.values(), strict=True):
        values = [one.x[0] for one in series]
        bars_ = ax.barh([one.label for one in series], values, height=0.62, color=[one.colour for one in series])
        ax.bar_label(bars_, [f"{value:,.0f}" if value >= 10 else f"{value:.1f}" for value in values], padding=3, size=8)
        ax.set_xlim(0, 1.25 * max(values))
        ax.grid(axis="y", visible=False)
        ax.tick_params(axis="y", length=0)
        ax.locator_params(axis="x", nbins=4)
    axes[0].invert_yaxis()
    figure.supxlabel(x, fontsize=9)
    return figure


def _panels(panels: Panels, size: tuple[float, float], y: str, **shared: Any) -> tuple[Figure, np.ndarray]:
    """A figure, and its axes (panels,) beside each other, of `size` inches each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((size[0] * len(panels), size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False, **shared)[0]
    for ax, title in zip(axes, panels, strict=True):
        ax.set_title(title if len(panels) > 1 else "")
    axes[0].set_ylabel(y)
    return figure, axes


def _plain_log(ax: Axes) -> None:
    """Set a logarithmic y axis with plain numbers such as 0.01."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _label_points(ax: Axes, series: Sequence[Series]) -> None:
    """Draw a label for each point that covers no point and no earlier label, if there is room."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure: Any = ax.figure
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    spots = ax.transData.transform([(one.x[0], one.y[0]) for one in series])
    taken: list[Bbox] = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in spots]
    inside = ax.get_window_extent(renderer)
    for one in series:
        best, fewest = None, float("inf")
        for dx, dy, side in _PLACES:
            text = ax.annotate(
                one.label,
                (one.x[0], one.y[0]),
                (dx, dy),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=_LABEL_SIZE,
                color=one.colour,
                arrowprops=_LEADER | {"color": one.colour} if abs(dy) > 10 else None,
            )
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the leader line
            clashes = box.count_overlaps(taken) + (box.x1 > inside.x1 + 4 or box.x0 < inside.x0)
            if clashes < fewest:
                best, fewest = (text, box), clashes
            text.set_visible(False)
            if clashes == 0:
                break
        assert best is not None
        best[0].set_visible(True)
        taken.append(best[1])


def _spread(ax: Axes, series: Sequence[Series]) -> None:
    """Draw labels to the right of `ax` at the values where lines end, moved apart where they would touch."""
    figure: Any = ax.figure
    figure.draw_without_rendering()
    apart = 1.35 * _LABEL_SIZE * figure.dpi / 72
    ordered = sorted(series, key=lambda one: one.y[-1])
    heights = [ax.transData.transform((1, one.y[-1]))[1] for one in ordered]
    for _ in range(_LABEL_ROUNDS):
        for low, high in itertools.pairwise(range(len(heights))):
            push = max(0.0, apart - (heights[high] - heights[low])) / 2
            heights[low] -= push
            heights[high] += push
    for one, height in zip(ordered, heights, strict=True):
        at = ax.transAxes.inverted().transform((0, height))[1]
        ax.annotate(
            one.label,
            (1.01, at),
            xycoords="axes fraction",
            va="center",
            fontsize=_LABEL_SIZE,
            color=one.colour,
            annotation_clip=False,
        )

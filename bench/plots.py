"""What all pictures share: fonts, colours, axes, and labels that do not overlap."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def save(figure: Figure, file: Path) -> None:
    """Write a figure. Raises EngineError."""
    try:
        figure.savefig(file, bbox_inches="tight", facecolor="white")
    except OSError as error:
        raise EngineError(f"{file} cannot be written: {error.strerror}") from None


def panels(count: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, np.ndarray]:
    """A figure, and its axes (count,) beside each other, of `size` inches each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((size[0] * count, size[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, count, squeeze=False, **shared)[0]


def colour_of(label: str) -> str:
    """The colour of a cache type on a light page, by its codec."""
    return next(light for start, (light, _) in COLOURS.items() if label.startswith(start))


def plain_log(ax: Axes) -> None:
    """Set a logarithmic y axis with plain numbers such as 0.01."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def label_points(
    ax: Axes, points: Sequence[tuple[float, float]], labels: Sequence[str], colours: Sequence[str]
) -> None:
    """Draw a label for each point (data coordinates) that covers no point and no earlier label, if there is room."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure: Any = ax.figure
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    spots = ax.transData.transform(points)
    taken: list[Bbox] = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in spots]
    legend = ax.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent(renderer))
    inside = ax.get_window_extent(renderer)
    for point, label, colour in zip(points, labels, colours, strict=True):
        best, fewest = None, float("inf")
        for dx, dy, side in _PLACES:
            text = ax.annotate(
                label,
                point,
                (dx, dy),
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=_LABEL_SIZE,
                color=colour,
                arrowprops=_LEADER | {"color": colour} if abs(dy) > 10 else None,
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


def spread(ax: Axes, ends: Sequence[float], labels: Sequence[str], colours: Sequence[str]) -> None:
    """Draw labels to the right of `ax` at the values where lines end, moved apart where they would touch."""
    figure: Any = ax.figure
    figure.draw_without_rendering()
    apart = 1.35 * _LABEL_SIZE * figure.dpi / 72
    order = sorted(range(len(ends)), key=lambda i: ends[i])
    heights = [ax.transData.transform((0, ends[i]))[1] for i in order]
    for _ in range(_LABEL_ROUNDS):
        for low, high in itertools.pairwise(range(len(heights))):
            push = max(0.0, apart - (heights[high] - heights[low])) / 2
            heights[low] -= push
            heights[high] += push
    for i, height in zip(order, heights, strict=True):
        at = ax.transAxes.inverted().transform((0, height))[1]
        ax.annotate(
            labels[i],
            (1.01, at),
            xycoords="axes fraction",
            va="center",
            fontsize=_LABEL_SIZE,
            color=colours[i],
            annotation_clip=False,
        )

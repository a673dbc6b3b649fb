"""Labels for points and lines, placed so that they do not overlap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_SIZE = 7.5  # points
_ROUNDS = 300  # rounds of moving adjacent labels apart; enough for dozens of labels
# Offsets of a label from its point, in points, with their alignment; the first free one is used.
_PLACES = [(7, 0, "left"), (-7, 0, "right"), (5, 7, "left"), (5, -7, "left"), (-5, 7, "right"), (-5, -7, "right")]
_PLACES += [(0, 11, "center"), (0, -11, "center"), (8, 14, "left"), (8, -14, "left"), (-8, 14, "right")]
_PLACES += [(-8, -14, "right"), (10, 21, "left"), (10, -21, "left"), (-10, 21, "right"), (-10, -21, "right")]
_LEADER: dict[str, Any] = {"arrowstyle": "-", "lw": 0.6, "shrinkA": 0, "shrinkB": 3}  # line to a distant label


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
                fontsize=_SIZE,
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
    apart = 1.35 * _SIZE * figure.dpi / 72
    order = sorted(range(len(ends)), key=lambda i: ends[i])
    heights = [ax.transData.transform((0, ends[i]))[1] for i in order]
    for _ in range(_ROUNDS):
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
            fontsize=_SIZE,
            color=colours[i],
            annotation_clip=False,
        )

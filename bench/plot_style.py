"""The common style of pictures: fonts, colours, axes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm.engine import EngineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
# Prefix of a codec's name → its colour; the colours also differ in lightness.
_COLOURS = {
    "ring": "#c2410c",
    "trellis": "#be123c",
    "polarquant": "#1d4ed8",
    "polarpair": "#0d9488",
    "turbo": "#7c3aed",
}
_COLOURS |= {"kivi": "#a16207", "q": "#4b5563", "f16": "#111827"}
_OTHER = "#db2777"


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


def panels(columns: int, rows: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, np.ndarray]:
    """A figure, and its axes (rows, columns) of `size` inches each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((size[0] * columns, size[1] * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **shared)


def colour_of(label: str) -> str:
    """The colour of a cache type, by its codec."""
    return next((colour for start, colour in _COLOURS.items() if label.startswith(start)), _OTHER)


def plain_log(ax: Axes) -> None:
    """Set a logarithmic y axis with plain numbers such as 0.01."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:.4g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())

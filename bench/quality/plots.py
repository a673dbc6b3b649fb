"""Pictures of a quality measurement. `python -m polarlm.bench.quality.plots FILE` draws them again from its JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from polarlm.bench.plot_labels import label_points, spread
from polarlm.bench.plot_style import NO_PICTURES, STYLE, can_draw, colour_of, panels, plain_log, save
from polarlm.bench.quality.angles import gaussian_density
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]

_PLAIN = ":plain"
_BEYOND = 12.0  # bits/value above which a type is left out of pictures of what compression costs


def draw_all(result: Result, name: str, output: Path) -> str:
    """Draw every picture that `result` has figures for, next to the JSON file `output`; returns a message."""
    if not can_draw():
        return NO_PICTURES
    from matplotlib import rc_context

    # A type with parts switched off has a label of several words and nearly the whole type's point: only the table
    # shows it.
    result = {**result, "rows": [row for row in result["rows"] if " " not in row["type"]]}
    drawn = []
    with rc_context(STYLE):
        for kind, draw in _PICTURES.items():
            figure = draw(result, name)
            if figure is not None:
                file = output.with_name(f"{output.stem}-{kind}.png")
                save(figure, file)
                drawn.append(file.name)
    if not drawn:
        return "No pictures: full precision alone, or parts of a type, are for the table"
    return f"Pictures: {', '.join(drawn)}"


def _by_scoring(rows: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for row in rows:
        found.setdefault(row["scored_as"], []).append(row)
    return found


# -- divergence against bits ---------------------------------------------------------------------------------------


def divergence(result: Result, name: str) -> Figure | None:
    """A figure of KL over bits/value: a panel for each scoring, a point for each type."""
    rows = [row for row in result["rows"] if row["bits_per_value"] < _BEYOND and row["kl_mean"] > 0]
    if not rows:
        return None
    by_scoring = _by_scoring(rows)
    figure, (axes,) = panels(len(by_scoring), 1, (6.4, 5.6), sharex=True, sharey=True)
    for ax, (scoring, points) in zip(axes, by_scoring.items(), strict=True):
        for row in points:
            colour, plain = colour_of(row["type"]), row["type"].endswith(_PLAIN)
            at = row["bits_per_value"], row["kl_mean"]
            ax.plot(*at, "o", ms=6.5, mew=1.4, mec=colour, mfc="white" if plain else colour, clip_on=False)
        plain_log(ax)
        ax.set_title(scoring)
        ax.set_xlabel("bits per value")
    axes[0].set_ylabel("KL divergence from full precision, nats (mean)")
    axes[0].set_ylim(min(row["kl_mean"] for row in rows) / 2, max(row["kl_mean"] for row in rows) * 2)
    for ax, points in zip(axes, by_scoring.values(), strict=True):
        _frontier(ax, points)
    for label, fill in (("conditioned", "#6b7280"), ("as published", "white")):
        axes[0].plot([], [], "o", ms=6.5, mec="#6b7280", mfc=fill, label=label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"What a cache type costs: {name}", fontweight="bold")
    # Last, since everything else moves the axes.
    for ax, points in zip(axes, by_scoring.values(), strict=True):
        places = [(row["bits_per_value"], row["kl_mean"]) for row in points]
        labels = [row["type"].removesuffix(_PLAIN) for row in points]
        label_points(ax, places, labels, [colour_of(row["type"]) for row in points])
    return figure


def _frontier(ax: Axes, points: Sequence[Result]) -> None:
    """Draw a quarter of the divergence for every further bit, through the type that is best by that measure."""
    best = min(points, key=lambda row: row["kl_mean"] * 4 ** row["bits_per_value"])
    bits = np.linspace(*ax.get_xlim(), 50)
    kl = best["kl_mean"] * 4.0 ** (best["bits_per_value"] - bits)
    ax.set_xlim(bits[0], bits[-1])
    ax.plot(
        bits, kl, "--", lw=1, color="#9ca3af", zorder=0, label="∝ 2^(−2 · bits), as Shannon's bound, through the best"
    )


# -- divergence by position ----------------------------------------------------------------------------------------


def positions(result: Result, name: str) -> Figure | None:
    """A figure of KL over positions: a panel for each scoring, a line for each type."""
    rows = [row for row in _conditioned(result["rows"]) if row["bits_per_value"] < _BEYOND]
    rows = [row for row in rows if len(reached(row)) > 1]
    if not rows:
        return None
    by_scoring = _by_scoring(rows)
    figure, (axes,) = panels(len(by_scoring), 1, (5.6, 4.4), sharey=True)
    for draw in (draw_positions, name_lines):  # names last: each panel changes the axis of all
        for ax, (scoring, lines) in zip(axes, by_scoring.items(), strict=True):
            ax.set_title(scoring)
            draw(ax, lines, [colour_of(row["type"]) for row in lines])
    axes[0].set_ylabel("KL divergence from full precision, nats (mean)")
    figure.suptitle(f"What a cache type costs, by position in the text: {name}", fontweight="bold")
    return figure


def reached(row: Result) -> list[Mapping[str, Any]]:
    """The ranges of positions of a row at which codes are read: not the first; none in an older measurement."""
    return [one for one in row.get("by_position", ()) if one["start"] and one["kl_mean"] > 0]


def draw_positions(ax: Axes, rows: Sequence[Result], colours: Sequence[str]) -> None:
    """Draw a line over positions for each row."""
    for i, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        stretches, earlier = reached(row), colours[:i].count(colour)
        middle = [np.sqrt(one["start"] * one["end"]) for one in stretches]
        kl = [one["kl_mean"] for one in stretches]
        ax.plot(middle, kl, _DASHES[earlier % len(_DASHES)], marker="o", ms=3.5, color=colour, lw=1.2)
    plain_log(ax)
    edges = sorted({edge for row in rows for one in reached(row) for edge in (one["start"], one["end"])})
    ax.set_xscale("log")
    ax.set_xticks(edges, [f"{edge:,}" for edge in edges])
    ax.minorticks_off()
    ax.set_xlabel("position")


def name_lines(ax: Axes, rows: Sequence[Result], colours: Sequence[str]) -> None:
    """Draw the types of the rows at the ends of their lines over positions."""
    spread(ax, [reached(row)[-1]["kl_mean"] for row in rows], [row["type"] for row in rows], colours)


# -- attention error -----------------------------------------------------------------------------------------------


def attention(result: Result, name: str) -> Figure | None:
    """A figure of attention error over layers: a panel for each scoring, a line for each type."""
    rows = _conditioned(result["rows"])
    rows = [row for row in rows if max(row["attention_error"], default=0) > 1e-5 and row["bits_per_value"] < _BEYOND]
    if not rows:
        return None
    from matplotlib.ticker import MaxNLocator

    by_scoring = _by_scoring(rows)
    figure, (axes,) = panels(len(by_scoring), 1, (5.6, 4.4))
    for ax, (scoring, lines) in zip(axes, by_scoring.items(), strict=True):
        used: dict[str, int] = {}  # colour → number of its earlier lines
        for row in lines:
            error, colour = row["attention_error"], colour_of(row["type"])
            used[colour] = used.get(colour, -1) + 1
            ax.plot(range(len(error)), error, _DASHES[used[colour] % len(_DASHES)], color=colour, lw=1.2)
        plain_log(ax)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_title(scoring)
        ax.set_xlabel("layer")
        ax.margins(x=0.02)
    axes[0].set_ylabel("relative error of the attention output")
    figure.suptitle(f"Attention of each layer, given the reference's input: {name}", fontweight="bold")
    for ax, lines in zip(axes, by_scoring.values(), strict=True):
        ends = [row["attention_error"][-1] for row in lines]
        spread(ax, ends, [row["type"] for row in lines], [colour_of(row["type"]) for row in lines])
    return figure


_DASHES = ("-", "--", "-.", ":")


def _conditioned(rows: Sequence[Result]) -> list[Result]:
    """The rows without plain types that were also measured with conditioning."""
    types = {row["type"] for row in rows}
    return [row for row in rows if not row["type"].endswith(_PLAIN) or row["type"].removesuffix(_PLAIN) not in types]


# -- needles -------------------------------------------------------------------------------------------------------


def needles(result: Result, name: str) -> Figure | None:
    """A figure with a heat map for each type and scoring; each scoring starts a new row."""
    cells = _conditioned(result.get("needle") or ())
    if not cells:
        return None
    types, scorings = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("type", "scored_as"))
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    columns = min(len(types), _MOST_COLUMNS)
    rows = [(scoring, types[i : i + columns]) for scoring in scorings for i in range(0, len(types), columns)]
    size = max(1.5, 0.5 + 0.36 * len(lengths)), 0.7 + 0.26 * len(depths)
    figure, axes = panels(columns, len(rows), size, sharex=True, sharey=True)
    for row_axes, (scoring, row) in zip(axes, rows, strict=True):
        for ax in row_axes[len(row) :]:
            ax.set_axis_off()
        for ax, label in zip(row_axes, row, strict=False):
            mine = [cell for cell in cells if (cell["type"], cell["scored_as"]) == (label, scoring)]
            image = _heat_map(ax, mine, lengths, depths)
            ax.set_title(label, fontsize=8, fontweight="normal")
        row_axes[0].set_ylabel(f"{scoring}\n\ndepth, %")
    figure.supxlabel("length of the prompt, tokens", fontsize=9)
    figure.colorbar(image, ax=axes, fraction=0.03, label="probability of the answer, per token")
    figure.suptitle(f"A number in a haystack: {name}", fontweight="bold")
    figure.text(0.5, -0.02, "× the answer is not the most likely one", ha="center", va="top", fontsize=8)
    return figure


_MOST_COLUMNS = 7


def _heat_map(ax: Axes, cells: Sequence[Result], lengths: Sequence[int], depths: Sequence[int]) -> Any:
    grid = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        at = depths.index(cell["depth"]), lengths.index(cell["length"])
        grid[at] = np.exp(cell["logprob"] / cell["tokens"])
        if not cell["correct"]:
            ax.plot(at[1], at[0], "x", ms=5, mew=1.4, color="white" if grid[at] < 0.6 else "#111827")
    ax.grid(False)
    ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
    ax.set_yticks(range(len(depths)), [str(depth) for depth in depths])
    return ax.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")


# -- angles --------------------------------------------------------------------------------------------------------


def angles(result: Result, name: str) -> Figure | None:
    """A figure of the densities of angles: a panel for each level of the polar transform."""
    levels = result.get("angles")
    if not levels:
        return None
    figure, (axes,) = panels(len(levels), 1, (2.9, 2.9))
    for ax, level in zip(axes, levels, strict=True):
        edges = np.array(level["edges"])
        ax.stairs(level["as they are"], edges, fill=True, color="#fdba74", alpha=0.7, label="keys as they are")
        ax.stairs(level["preconditioned"], edges, color="#1d4ed8", lw=1.4, label="preconditioned")
        fine = np.linspace(edges[0], edges[-1], 400)
        ax.plot(
            fine,
            gaussian_density(level["level"], fine),
            "--",
            color="#111827",
            lw=1,
            label="of Gaussian vectors, analytic",
        )
        quarters = 2 if level["level"] > 1 else 8
        ticks = range(0, quarters + 1, quarters // 2)
        ax.set_xticks([tick * np.pi / 4 for tick in ticks], [_PI[tick] for tick in ticks])
        ax.set_title(f"level {level['level']}")
        ax.set_xlabel("angle, rad")
        ax.set_xlim(edges[0], edges[-1])
        ax.set_ylim(0)
    axes[0].set_ylabel("density, 1/rad")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(f"Angles of the polar transform of keys: {name}", fontweight="bold")
    return figure


_PI = {0: "0", 1: "π/4", 2: "π/2", 4: "π", 8: "2π"}

# Suffix of the file's name → function that draws the figure, or returns None if the measurement has no data for it.
_PICTURES: dict[str, Callable[[Result, str], Figure | None]] = {
    "divergence": divergence,
    "positions": positions,
    "attention": attention,
    "needle": needles,
    "angles": angles,
}


@command
def main(argv: Sequence[str]) -> None:
    """Draw the pictures of the JSON files."""
    flags = argparse.ArgumentParser("python -m polarlm.bench.quality.plots", description="Draw results again.")
    flags.add_argument("files", nargs="+", metavar="FILE", help="JSON of bench.quality; pictures go next to it")
    for file in map(Path, flags.parse_args(argv).files):
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            note(draw_all(result, result["model"], file))
        except (OSError, ValueError, KeyError) as error:
            raise EngineError(f"{file} cannot be read as the JSON of bench.quality ({error})") from None


if __name__ == "__main__":
    sys.exit(main())

"""Figures as text, and their tables: for the page, for a terminal and for docs/quality.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polarlm.bench.quality.scores import SERVED

Table = tuple[list[str], list[list[str]]]
"""The header and the rows."""
Figures = Mapping[str, Any]
"""Figures of a measurement as in its JSON."""

NONE = "—"
_KL_FIGURES = ("kl_mean", "kl_median", "kl_90th_percentile", "kl_99th_percentile", "kl_999th_percentile", "kl_max")

# Column → its explanation, for the page and docs/quality.md.
KL_COLUMNS = {
    "KL median": "half of the positions are further off than this, in nats",
    "KL 90 %": "one position in ten is further off than this, in nats",
    "KL 99 %": "one position in a hundred is further off than this, in nats",
    "KL 99.9 %": "one position in a thousand is further off than this, in nats",
    "KL max": "the position that is furthest off, in nats",
    "drafts accepted": "tokens that full precision drafts and the type accepts, in speculative sampling",
}
ANSWER_COLUMNS = {
    "own tokens": "tokens that the model wrote with the type, drawn at temperature 1",
    "KL there": "how far the distributions that they were drawn from are from full precision's, in nats",
    "accepted there": "drafts accepted at these tokens",
}


def small(figure: float) -> str:
    """A divergence: 1.2e-04 or 0.0012."""
    return f"{figure:.1e}" if figure < 1e-3 else f"{figure:.4f}"


def two_digits(share: float) -> str:
    """A share in percent with two digits after the point."""
    return f"{100 * share:.2f} %"


def with_error(figure: float, error: float | None, text: Callable[[float], str]) -> str:
    """A figure and its standard error, both written by `text`."""
    return text(figure) if error is None else f"{text(figure)} ± {text(error)}"


def kl_cells(figures: Figures) -> list[str]:
    """The mean, the quantiles and the maximum of KL, each with its error."""
    cells, errors = [], figures["errors"] or {}
    for name in _KL_FIGURES:
        figure = figures[name]
        cells.append(NONE if figure is None else with_error(figure, errors.get(name), small) if figure else "0")
    return cells


def label(row: Figures) -> str:
    """The type of a row, with its scoring unless it is as served."""
    return row["type"] if row["scored_as"] == SERVED else f"{row['type']}, {row['scored_as']}"


def divergences(rows: Sequence[Figures]) -> Table:
    """All figures of KL, with their errors."""
    cells = []
    for row in rows:
        errors = row["errors"] or {}
        shares = (with_error(row[name], errors.get(name), two_digits) for name in ("same_top1", "draft_acceptance"))
        cells.append([label(row), *kl_cells(row), *shares])
    *of_kl, accepted = KL_COLUMNS
    return ["cache type", "KL mean", *of_kl, "same top-1", accepted], cells


def kl_by_position(rows: Sequence[Figures]) -> Table:
    """KL by position; all rows are of the same windows."""
    return _by_position("KL at positions", rows, lambda one: with_error(one["kl_mean"], one["kl_error"], small))


def top1_by_position(rows: Sequence[Figures]) -> Table:
    """The same top-1 by position; all rows are of the same windows."""
    return _by_position(
        "same top-1 at positions", rows, lambda one: with_error(one["same_top1"], one["top1_error"], two_digits)
    )


def _by_position(title: str, rows: Sequence[Figures], cell: Callable[[Figures], str]) -> Table:
    header = [title, *(f"{stretch['start']:,} to {stretch['end'] - 1:,}" for stretch in rows[0]["by_position"])]
    return header, [[label(row), *map(cell, row["by_position"])] for row in rows]


def answers(rows: Sequence[Figures]) -> Table:
    """What full precision says of the texts that types wrote; nothing of a text too short for errors."""
    cells = []
    for row in rows:
        if (answer := row["answer"]) is not None and (errors := answer["errors"] or {}):
            cells.append(
                [
                    row["type"],
                    f"{answer['tokens']:,}",
                    with_error(answer["kl_mean"], errors.get("kl_mean"), small),
                    with_error(answer["draft_acceptance"], errors.get("draft_acceptance"), two_digits),
                ]
            )
    return ["cache type", *ANSWER_COLUMNS], cells

"""`python -m polarlm.bench.lab.compare A B`: how two results of `polarlm quality` differ in each cache type, with the
uncertainty of the difference.

Both have scored windows of the same text: the first ones that both have are compared, one by one, since windows differ
from each other by more than types do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polarlm.bench.quality.scores import TEXT
from polarlm.bench.quality.tables import TYPE, small
from polarlm.bench.report import Column, Table
from polarlm.bench.result import Result, Row, read
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import command

_SAME = ("text", "text_sha256", "window")  # equal in results of the same windows
_COLUMNS = [
    Column.of("windows", "windows", "{:.0f}".format),
    Column.of("KL, A", "a", small),
    Column.of("KL, B", "b", small),
    Column.of("KL, B − A", "kl_mean", lambda kl: f"{kl:+.1e}"),
    Column.of("nats/token, B − A", "nll_per_token", lambda nats: f"{nats:+.1e}"),
]


@command
def main(argv: Sequence[str]) -> None:
    """Prints the table. Raises EngineError."""
    flags = argparse.ArgumentParser("python -m polarlm.bench.lab.compare", description="The difference of two results.")
    for name in "AB":
        flags.add_argument(name, metavar=name, type=Path, help="JSON of polarlm quality")
    files = flags.parse_args(argv)
    try:
        a, b = read(files.A), read(files.B)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"One of the files cannot be read as the JSON of polarlm quality ({error})") from None
    if unequal := [name for name in _SAME if a.about.get(name) != b.about.get(name)]:
        raise EngineError(f"The results cannot be compared: their windows differ ({', '.join(unequal)})")
    lines = [(row.contestant, differences(a, b, row.contestant)) for row in a.rows("kl_mean") if row.subject == TEXT]
    if not (lines := [(who, figures) for who, figures in lines if figures]):
        raise EngineError("The results cannot be compared: no type has figures of windows in both")
    print(Table.of(TYPE, _COLUMNS, lines).markdown())
    print("\n± is the standard error of the mean difference of a window; a single window has none.")


def differences(a: Result, b: Result, who: str) -> dict[str, Row]:
    """What the columns have of a type; nothing without windows in both results."""
    figures: dict[str, Row] = {}
    for name in ("kl_mean", "nll_per_token"):
        runs = [one.figures(TEXT, who)[name].runs if name in one.figures(TEXT, who) else () for one in (a, b)]
        count = min(map(len, runs))
        if not count:
            return {}
        first, second = (np.array(each[:count]) for each in runs)
        difference = second - first
        error = float(difference.std(ddof=1) / np.sqrt(count)) if count > 1 else None
        figures[name] = Row(TEXT, who, name, value=float(difference.mean()), error=error)
        figures["windows"] = Row(TEXT, who, "windows", value=count)
        if name == "kl_mean":
            figures |= {key: Row(TEXT, who, key, value=float(x.mean())) for key, x in (("a", first), ("b", second))}
    return figures


if __name__ == "__main__":
    sys.exit(main())

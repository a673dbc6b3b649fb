"""Writes the newest simulation of bench/results into docs/many-machines.md, between its marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from polarlm.bench.serving.simulate import tables
from scripts.make_quality_table import RESULTS, ROOT, newest, with_tables

DOCUMENT = ROOT / "docs" / "many-machines.md"
_NAME = "simulate-8b-*"


def by_machines() -> str:
    """The picture, and hit rates and waiting times of more and more machines."""
    picture = max(RESULTS.glob(f"{_NAME}.png")).relative_to(ROOT).as_posix()
    simulated = newest(_NAME)
    rate, cache = simulated["load"]["rate"], simulated["costs"][0]["cache"]
    return (
        f"![Hit rates, waiting times and numbers of machines](../{picture})\n\n"
        f"With {rate:g} requests/s for each machine, `{cache}` and the store alone:\n\n{tables.by_machines(simulated)}"
    )


def needed() -> str:
    """How many machines a load needs, and the command that said so."""
    simulated = newest(_NAME)
    load, first = simulated["load"], simulated["costs"][0]["cache"]
    return (
        f"How many machines {load['load']:g} requests/s need, so that 95 % have their first token within "
        f"{load['target']:g} s; hit rates and\nwaiting times are those of `{first}`:\n\n{tables.needed(simulated)}\n\n"
        f"Simulated on {simulated['date']} in {simulated['cpu_seconds']:.0f} s of one core with\n"
        f"`{simulated['command']}`."
    )


# Document → the name of a mark → the text between `<!-- name -->` and `<!-- /name -->`.
TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    DOCUMENT: {"by-machines": by_machines, "needed": needed},
}


if __name__ == "__main__":
    for document, found in TABLES.items():
        document.write_text(with_tables(document.read_text(encoding="utf-8"), found), encoding="utf-8")

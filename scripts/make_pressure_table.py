"""Writes the newest measurement under memory pressure of bench/results into docs/prefix-tiers.md, between its marks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from polarlm.bench.serving import pressure
from scripts.make_quality_table import ROOT, newest, with_tables

DOCUMENT = ROOT / "docs" / "prefix-tiers.md"


def pressure_table() -> str:
    """First tokens of the last round by type and number of conversations, and the command that measured them."""
    measured = newest("pressure-demo-*")
    machine = measured["machine"]
    return (
        f"{pressure.format_result(measured)}\n\n"
        f"{machine['cores']} cores of an {machine['cpu']}, {machine['system']}, {measured['options']['kv_memory']} for "
        f"keys and values; measured on {measured['date']} with\n`{measured['command']}`."
    )


# Document → the name of a mark → the text between `<!-- name -->` and `<!-- /name -->`.
TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {DOCUMENT: {"pressure": pressure_table}}


if __name__ == "__main__":
    for document, found in TABLES.items():
        document.write_text(with_tables(document.read_text(encoding="utf-8"), found), encoding="utf-8")

"""Writes the table of what llama-server's documentation promises into docs/api.md, and how this server keeps it."""

from __future__ import annotations

from pathlib import Path

from scripts.make_quality_table import with_tables
from scripts.promises.other_endpoints import ALL, STANDARD
from scripts.promises.own_endpoints import OWN

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "api.md"
PROMISES = [(endpoint, promise) for part in (ALL, OWN, STANDARD) for endpoint, own in part.items() for promise in own]


def table() -> str:
    """One Markdown table with a line for each promise."""
    lines = ["| Endpoint | What llama-server's documentation says | Here |", "|---|---|---|"]
    for endpoint, promise in PROMISES:
        names = ", ".join(f"`{test.rpartition('::')[2]}`" for test in promise.tests)
        here = f"*{promise.standing}*" + (f": {promise.why}" if promise.why else "")
        here += f" ({names})" if names and promise.why else f": {names}" if names else ""
        lines.append(f"| {endpoint} | {promise.says} | {here} |")
    return "\n".join(lines)


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_tables(text, {"conformance": table}), encoding="utf-8")

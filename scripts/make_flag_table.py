"""Writes the tables of settings into docs/flags.md and docs/embedding.md, between their marks, from the dataclasses."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path

from polarlm.engine.chat.config import GROUPS
from polarlm.engine.cli.flags import IGNORED, describe
from polarlm.engine.config import EngineConfig
from polarlm.engine.params import SamplingParams
from polarlm.server.config import ServerConfig
from scripts.make_quality_table import with_tables

DOCS = Path(__file__).resolve().parents[1] / "docs"


def flag_table() -> str:
    """One Markdown table with a line per flag, in the order and the groups of `--help`."""
    lines = ["| Flag | Meaning |", "|---|---|"]
    for title, cls in {**GROUPS, "Server (`make serve`)": ServerConfig}.items():
        lines.append(f"| **{title}** | |")
        lines += [f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in describe(cls)]
    lines.append("| **Flags of llama.cpp, without effect** | |")
    lines += [
        f"| `{' '.join([', '.join(names), value]).strip()}` | {reason} |" for names, (value, reason) in IGNORED.items()
    ]
    return "\n".join(lines)


def field_table(cls: type, *left_out: str) -> str:
    """One Markdown table with a line per field of a dataclass: its name in Python, its default, its meaning."""
    lines = ["| Field | Default | Meaning |", "|---|---|---|"]
    for field in fields(cls):
        if field.name in left_out:
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        prefix = "`False`: " if default is True else ""  # the help is that of a flag that switches the field off
        meaning = re.sub(
            "(, as in 42.*)?; may be repeated", "", _cell(field.metadata["help"])
        )  # applies to the command line only
        meaning = re.sub("--([a-z-]+)", lambda flag: f"`{flag[1].replace('-', '_')}`", meaning)
        lines.append(f"| `{field.name}` | `{default!r}` | {prefix}{meaning} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """The text of a cell: vertical bars are escaped, which would end the cell even inside a code span."""
    return text.replace("|", "\\|")


# Document → the name of a mark → the text between `<!-- name -->` and `<!-- /name -->`.
TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    DOCS / "flags.md": {"flags": flag_table},
    DOCS / "embedding.md": {
        "settings": lambda: field_table(EngineConfig, "weights"),
        "sampling": lambda: field_table(SamplingParams),
    },
}


if __name__ == "__main__":
    for document, tables in TABLES.items():
        document.write_text(with_tables(document.read_text(encoding="utf-8"), tables), encoding="utf-8")

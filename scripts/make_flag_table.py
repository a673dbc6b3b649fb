"""Writes the table of docs/flags.md, between its `<!-- flags -->` marks, from the dataclasses of the command line."""

from pathlib import Path

from engine.chat.config import GROUPS
from engine.flags import describe
from server.config import ServerConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "flags.md"
BEGIN, END = "<!-- flags -->", "<!-- /flags -->"


def flag_table() -> str:
    """One Markdown table with a line per flag, in the order and the groups of `--help`."""
    lines = ["| Flag | Meaning |", "|---|---|"]
    for title, cls in {**GROUPS, "Server (`make serve`)": ServerConfig}.items():
        lines.append(f"| **{title}** | |")
        lines += [f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in describe(cls)]
    return "\n".join(lines)


def with_table(text: str) -> str:
    """`text` with the current table between its marks. Raises SystemExit with a sentence where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT.name} needs the lines {BEGIN} and {END} around its table of flags")
    return f"{before}{BEGIN}\n{flag_table()}\n{END}{after}"


def _cell(text: str) -> str:
    """A vertical bar would end the cell, also inside a code span."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")

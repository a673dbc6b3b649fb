"""Reports of results: tables made of columns, for a terminal, for documents as Markdown, and on a page of HTML.

A column says how it is called, what it means, and what a contestant's figures become in it. Columns and lines without a
figure are left out.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from polarlm.bench.result import Figures, Result, Row, load_in_words, origin
from polarlm.engine import EngineError
from polarlm.engine.cli.commands import note
from polarlm.engine.config import format_bytes

NOTHING = "—"


@dataclass(frozen=True)
class Column:
    """cell: the text of a contestant's figures. says: what the column means, for pages and documents."""

    name: str
    cell: Callable[[Figures], str]
    says: str = ""

    @classmethod
    def of(cls, name: str, quantity: str, text: Callable[[float], str], says: str = "") -> Column:
        """The column of a quantity, whose figures and standard errors are written by `text`."""
        return cls(name, lambda figures: cell_of(figures.get(quantity), text), says)


def rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:,.1f}"


def size_text(size: float) -> str:
    """Bytes; a dash for fewer than none: pages that nobody has touched."""
    return NOTHING if size < 0 else format_bytes(round(size))


def cell_of(row: Row | None, text: Callable[[float], str]) -> str:
    """A figure with its standard error, or why there is none."""
    if row is None or row.value is None:
        return NOTHING if row is None else row.failure or NOTHING
    return text(row.value) if row.error is None else f"{text(row.value)} ± {text(row.error)}"


@dataclass(frozen=True)
class Table:
    """left: how many columns are of words, aligned to the left."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    @classmethod
    def of(cls, first: str, columns: Sequence[Column], lines: Iterable[tuple[str, Figures]]) -> Table:
        """A line for each name and its figures. first: the name of the column of names."""
        rows = [[name, *(column.cell(figures) for column in columns)] for name, figures in lines]
        return cls([first, *(column.name for column in columns)], rows)

    @classmethod
    def cross(
        cls, first: str, lines: Iterable[str], columns: Mapping[str, str], cell: Callable[[str, str], str]
    ) -> Table:
        """A line for each subject and a column for each contestant. columns: contestant → name."""
        rows = [[line, *(cell(line, column) for column in columns)] for line in lines]
        return cls([first, *columns.values()], rows)

    def without_empty_columns(self) -> Table:
        """The table without columns in which nothing was measured."""
        kept = [0, *(i for i in range(1, len(self.header)) if any(row[i] not in ("", NOTHING) for row in self.rows))]
        return replace(self, header=[self.header[i] for i in kept], rows=[[row[i] for i in kept] for row in self.rows])

    def markdown(self, width: int = sys.maxsize) -> str:
        """Markdown with aligned columns, without the last ones where they take more than `width` characters.

        >>> print(Table(["type", "KL"], [["f16", "0.1"]]).markdown())
        | type |  KL |
        |:-----|----:|
        | f16  | 0.1 |
        """
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        while len(widths) > 2 and sum(widths) + 3 * len(widths) + 1 > width:
            widths.pop()

        def line(cells: Sequence[str]) -> str:
            words = [cell.ljust(width) for cell, width in zip(cells[: self.left], widths, strict=False)]
            numbers = (cell.rjust(width) for cell, width in zip(cells[self.left :], widths[self.left :], strict=False))
            return f"| {' | '.join([*words, *numbers])} |"

        rules = [f":{'-' * (width + 1)}" for width in widths[: self.left]]
        rule = "|".join([*rules, *(f"{'-' * (width + 1)}:" for width in widths[self.left :])])
        return "\n".join([line(self.header), f"|{rule}|", *map(line, self.rows)])


@dataclass(frozen=True)
class Section:
    """A heading, tables, and sentences after them."""

    heading: str
    tables: Sequence[Table] = ()
    text: str = ""

    def markdown(self, width: int = sys.maxsize) -> str:
        parts = [self.heading, *(table.markdown(width) for table in self.tables), self.text]
        return "\n\n".join(filter(None, parts))


@dataclass
class Report:
    """What is said of a result.

    about: what was measured, and how: name and text. notes: sentences, such as what is missing. columns: what columns
    mean. bold: first cells of lines in bold type. pictures: title → SVG. brief: how many sections a terminal has.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    about: Sequence[tuple[str, str]]
    notes: Sequence[str] = ()
    partial: str = ""  # what is missing; empty if the measurement has ended
    columns: Mapping[str, str] = field(default_factory=dict)
    bold: frozenset[str] = frozenset()
    pictures: Mapping[str, str] = field(default_factory=dict)
    brief: int | None = None

    def __post_init__(self) -> None:
        sections = []
        for one in self.sections:
            tables = [table.without_empty_columns() for table in one.tables if table.rows]
            if tables := [table for table in tables if len(table.header) > 1]:
                sections.append(Section(one.heading, tables, one.text))
        self.sections = sections
        shown = {name for section in self.sections for table in section.tables for name in table.header}
        self.columns = {name: says for name, says in self.columns.items() if name in shown}

    def terminal(self, width: int = sys.maxsize) -> str:
        """The report as Markdown."""
        if self.brief is not None:
            about = dict(self.about)
            tables = [table.markdown(width) for one in self.sections[: self.brief] for table in one.tables]
            return "\n\n".join([*tables, *self.notes, f"{about['origin']}\nload: {about['load']}"])
        head = "\n".join([self.title, *(f"{name}: {text}" for name, text in self.about if text)])
        return "\n\n".join([head, *(section.markdown(width) for section in self.sections), *self.notes])

    def write_page(self, file: Path) -> None:
        """Raises EngineError."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
        from markupsafe import Markup

        environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        values = {
            **vars(self),
            "pictures": {title: Markup(svg) for title, svg in self.pictures.items()},
            "plain": lambda cell: cell.replace("**", "").replace("`", ""),
        }
        try:
            file.write_text(environment.get_template("page.html").render(values), encoding="utf-8")
        except OSError as error:
            raise EngineError(f"{file} cannot be written: {error.strerror}") from None

    def show(self, json: Path) -> None:
        """Write the page next to the JSON and print the report."""
        page = json.with_suffix(".html")
        self.write_page(page)
        is_narrow = self.brief is not None and sys.stdout.isatty()  # the page has the other columns
        print(self.terminal(shutil.get_terminal_size().columns if is_narrow else sys.maxsize))
        where = "The page:" if self.brief is None else "More is on the page"
        note(f"{where} {page}, all figures in {json}")


def provenance(result: Result, *, is_timed: bool = True) -> list[tuple[str, str]]:
    """What is said of every result: date, command, machine, load, and what it is of."""
    machine = result["machine"]
    gpu = f"{machine['gpu']['name']}, " if "gpu" in machine else ""
    return [
        ("machine", f"{gpu}{machine['cpu']}, {machine['cores']} cores, {machine['system']}"),
        ("load", load_in_words(result, is_timed=is_timed)),
        ("origin", origin(result.about)),
        ("date", result["date"]),
        ("command", result["command"]),
    ]

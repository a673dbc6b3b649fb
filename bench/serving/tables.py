"""The reports of servers, made from their rows for the terminal, the page and the documents."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from polarlm.bench.report import NOTHING, Column, Report, Section, Table, provenance
from polarlm.bench.result import Figures, Result, Row
from polarlm.bench.serving.options import BETWEEN_TOKENS, FIRST_TOKEN
from polarlm.bench.speed.contestants import OURS, RATE

LOAD = "load"  # a subject
EMPTIED = "all but three results", "the oldest results"  # subjects
PROMPTS, LEAST, READ = "tokens of prompts", "behind the first change", "read"  # quantities
RATIO = "read / behind"
WHOLE, FREE = "whole answer", "until a client was free"  # quantities in seconds, as FIRST_TOKEN and BETWEEN_TOKENS


def report_of(result: Result) -> Report:
    """The report of a load, or of conversations."""
    load = "load_options" in result.about
    if load:
        servers = [servers_table(result)] if len(list(result.parts(LOAD))) > 1 else []
        sections = [Section("Latencies", [latencies_table(result)]), Section("Servers", servers)]
    else:
        edits = [edits_table(result)] if any(result.rows(READ)) else []
        sections = [Section("", edits) if edits else Section("First tokens", [conversations_table(result)])]
    return Report(
        title=f"A server of {result['model']}",
        lead="Requests of many clients" if load else "Conversations that come back",
        sections=sections,
        about=[*(_about(result) if load else ()), *provenance(result)],
        partial="" if result["complete"] else "This page is partial: the measurement was interrupted.",
    )


# -- a load ------------------------------------------------------------------------------------------------------------


def _about(result: Result) -> list[tuple[str, str]]:
    load, ours = result["load_options"], result.figures(LOAD, OURS)
    value = Counter({name: row.value or 0 for name, row in ours.items()})
    failed = ", ".join(f"{count} × {kind}" for kind, count in ours["errors"].more["kinds"].items()) or "none"
    return [
        (
            "clients",
            f"{load['clients']}, {load['rate']:g} requests/s (Poisson), prompts of {load['shared_prefix']} shared and "
            f"{load['prompt_tokens']} own tokens, answers of {load['max_tokens']}",
        ),
        (
            "requests",
            f"{value['requests']:.0f} in {value['seconds']:.1f} s: {value[RATE]:,.1f} tokens/s, "
            f"{value['requests/s']:.2f} requests/s. Errors: {failed}",
        ),
        (
            "found in the cache",
            f"{100 * value['cached']:.1f} % of the prompts' tokens. At most {value['held']:.0f} of "
            f"{value['blocks']:.0f} blocks held, {value['running']:.0f} requests in a step",
        ),
    ]


def _milliseconds(quantity: str, percent: int) -> Callable[[Figures], str]:
    return lambda figures: f"{1e3 * figures[quantity].runs[percent]:,.1f}" if figures[quantity].runs else NOTHING


def latencies_table(result: Result) -> Table:
    columns = [Column(f"p{percent}", _milliseconds("", percent)) for percent in (50, 95, 99)]
    waits = (result.figures(LOAD, OURS)[name] for name in (FIRST_TOKEN, BETWEEN_TOKENS, WHOLE, FREE))
    return Table.of("milliseconds", columns, ((row.quantity, {"": row}) for row in waits))


def servers_table(result: Result) -> Table:
    """A table with a line for our server, and one for each number of threads of another engine's."""

    def unless_failed(cell: Callable[[Figures], str]) -> Callable[[Figures], str]:
        return lambda figures: NOTHING if figures[RATE].failure else cell(figures)

    columns = [
        Column.of("tokens/s", RATE, "{:,.1f}".format),
        Column("first token ms, p50", unless_failed(_milliseconds(FIRST_TOKEN, 50))),
        Column("p95", unless_failed(_milliseconds(FIRST_TOKEN, 95))),
        Column("between two, p50", unless_failed(_milliseconds(BETWEEN_TOKENS, 50))),
        Column("p95", unless_failed(_milliseconds(BETWEEN_TOKENS, 95))),
        Column.of("errors", "errors", "{:.0f}".format),
    ]
    ours = f"{OURS} {result.about.get('version', '')}".rstrip()
    lines = ((ours if who == OURS else who, figures) for _, who, figures in result.parts(LOAD))
    return Table.of("server", columns, lines)


# -- conversations -----------------------------------------------------------------------------------------------------


def conversations_table(result: Result) -> Table:
    """First tokens of conversations that come back: by place, or by cache type and number of conversations."""
    rows = list(result.rows(FIRST_TOKEN))
    types = dict.fromkeys(row.contestant for row in rows)
    if list(types) == [OURS]:
        header = ["", "prompt tokens", "of them found", "first token s, median", "slowest"]
        return Table(header, [[row.subject, *_cells(result, row)] for row in rows])
    columns = {subject: subject for subject in dict.fromkeys(row.subject for row in rows)}

    def cell(who: str, subject: str) -> str:
        row = result.figures(subject, who).get(FIRST_TOKEN)
        return "" if row is None else f"{row.value:.2f} s, {places(result, row)}"

    return Table.cross("", types, columns, cell)


def edits_table(result: Result) -> Table:
    """What agents have read again: a line for each way to empty results of tools."""
    columns = [Column.of(name, name, "{:,.0f}".format) for name in (PROMPTS, LEAST, READ)]
    columns.append(Column.of(RATIO, RATIO, "{:.2f}".format))
    return Table.of("emptied", columns, ((subject, figures) for subject, _, figures in result.parts()))


def _cells(result: Result, row: Row) -> list[str]:
    average = statistics.mean(result.figures(row.subject, row.contestant)["prompt tokens"].runs)
    return [f"{average:,.0f}", places(result, row), f"{row.value:.2f}", f"{max(row.runs):.2f}"]


def places(result: Result, row: Row) -> str:
    """Which tiers had how much of the turns' prompts, as in "91 % disk"; a dash if none had anything."""
    cached, turns = Counter[str](), list[Mapping[str, int]](row.more["cached_from"])
    for turn in turns:
        cached.update(turn)
    tokens = sum(result.figures(row.subject, row.contestant)["prompt tokens"].runs)
    shares: Iterable[str] = (f"{100 * count / tokens:.0f} % {place}" for place, count in cached.items() if count)
    return ", ".join(shares) or NOTHING

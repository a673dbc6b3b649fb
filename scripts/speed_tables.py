"""The parts of docs/results that measurements of speed in bench/results decide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from polarlm.bench.report import Table
from polarlm.bench.result import Result, Row, origin, provenance, read
from polarlm.bench.serving.tables import LOAD, conversations_table, servers_table
from polarlm.bench.speed.contestants import OURS, RATE
from polarlm.bench.speed.measure import MEMORY
from polarlm.bench.speed.starts import START
from polarlm.bench.speed.tables import peers_in_words, place, report_of, source, starts_of_models
from scripts.quality_tables import RESULTS, ROOT, newest

DEMO = "SmolLM2-135M-Instruct"


def published_results(kind: str = "speed") -> dict[Path, Result]:
    """The newest complete measurement of each model on each CPU and level of instructions; also one that lacks starts
    alone, which come last. The demonstration model comes first, then by name.

    kind: "speed", or "starts" for measurements of starts alone.
    """
    newest_of: dict[tuple[str, str], tuple[Path, Result]] = {}
    results = [(path, read(path)) for path in RESULTS.glob(f"{kind}-*.json")]
    for path, result in sorted(results, key=lambda item: (item[1]["date"], item[0].name)):
        if (result["complete"] or any(result.parts(MEMORY))) and result["device"] == "cpu":
            newest_of[_title(result), place(result)] = path, result
    return dict(sorted(newest_of.values(), key=lambda item: (item[1]["model"] != DEMO, item[0].name)))


def all_tables() -> str:
    """The reports of all models, for docs/results/speed.md."""
    parts = []
    everything = published_results()
    titles = Counter(map(_title, everything.values()))
    for path, result in everything.items():
        where = f", on {place(result)}" if titles[_title(result)] > 1 else ""
        tables = (section.markdown() for section in report_of(result).sections)
        parts += [f"### {_title(result)}{where}", *_picture(path), *tables, source(result)]
    notes = dict.fromkeys(f"{sentence}." for result in everything.values() for sentence in result["left_out"])
    return "\n\n".join([*parts, *notes])


def starts() -> str:
    """A table of starts for each machine that measured them, for docs/speed.md."""
    parts = []
    for where, group in _starts_by_machine().items():
        one = next((result for result in group if len(_starts_of(result)) > 1), group[0])  # with the peer
        runs = max(len(row.runs) for row in _starts_of(one))
        dates = " to ".join(sorted({min(m["date"] for m in group), max(m["date"] for m in group)}))
        line = origin(one.about)
        parts += [
            starts_of_models(group).markdown(),
            f"On {where}, {one['threads']['most']} threads; {peers_in_words(one)}; "
            f"medians of {runs} starts; measured on {dates} with commands such as\n"
            f"`{one['command']}`." + (f"\n{line}" if line else ""),
        ]
    return "\n\n".join(parts)


def _starts_of(result: Result) -> list[Row]:
    return [row for row in result.rows("seconds") if row.subject == START]


def _starts_by_machine() -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in [*published_results("starts").values(), *published_results().values()]:
        if _starts_of(result):
            level = _restricted_to(result)
            groups.setdefault(place(result) + (f" with {level} alone" if level else ""), []).append(result)
    return groups


def _with_source(table: Callable[[Result], Table], results: Iterable[Result]) -> str:
    """A table of each result, and where it is from."""
    return "\n\n".join(f"{table(one).markdown()}\n\nOn {place(one)}; {provenance(one)}" for one in results)


def server_results() -> list[Result]:
    """The newest measurement of our server beside others, if there is one."""
    everything = map(read, RESULTS.glob("serving-*.json"))
    others = [one for one in everything if any(who != OURS and row.value for _, who, row in rates_of(one))]
    return sorted(others, key=lambda one: str(one["date"]))[-1:]


def rates_of(result: Result) -> Iterator[tuple[str, str, Row]]:
    """The rates of servers under load."""
    for subject, who, figures in result.parts(LOAD):
        yield subject, who, figures[RATE]


def _title(measured: Result) -> str:
    level = _restricted_to(measured)
    return f"{measured['model']}, {measured['weights']}" + (f", with {level} alone" if level else "")


def _restricted_to(measured: Result) -> str | None:
    level: str | None = measured["machine"].get("restricted_to")
    return level


def _picture(path: Path) -> list[str]:
    picture = path.with_suffix(".png")
    link = f"![Generated tokens/s against the context](../../{picture.relative_to(ROOT).as_posix()})"
    return [link] if picture.exists() else []


PARTS: Mapping[str, Callable[[], str]] = {
    "speed": all_tables,
    "starts": starts,
    "conversations": lambda: _with_source(conversations_table, [newest("agents-qwen3.5-0.8b-random-q4-0-*")]),
    "pressure": lambda: _with_source(conversations_table, [newest("pressure-demo-*")]),
    "servers": lambda: _with_source(servers_table, server_results()),
}
"""Name of a mark → what writes the text between it and its end."""

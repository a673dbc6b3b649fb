"""The report of a speed measurement, and its tables, made from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polarlm.bench.report import NOTHING, Column, Report, Section, Table, cell_of, provenance, rate_text, size_text
from polarlm.bench.result import Figures, Result, Row, value_of
from polarlm.bench.speed import peers
from polarlm.bench.speed.contestants import GENERATION, OURS, PROMPT, RATE, SEQUENCES
from polarlm.bench.speed.measure import MEMORY
from polarlm.engine.config import EngineConfig


def report_of(result: Result) -> Report:
    read = "Bytes that a step reads, and share of the memory's bandwidth"
    return Report(
        title=f"{_model_name(result)} on {_where(result)}",
        lead="Medians ± half the spread; × is the ratio to the strongest peer",
        sections=[
            Section("Tokens/s", [rates_table(result, [PROMPT, GENERATION])]),
            Section(read, [bandwidth_table(result)]),
            Section("Sequences that are asked at the same time", [sequences_table(result)]),
            Section("Memory of the process", [memory_table(result)]),
        ],
        about=[*_about(result), *provenance(result)],
        notes=[*_starvation_notes(result), *result["left_out"]],
        partial="" if result["complete"] else "This page is partial: see its last sentences.",
    )


# -- rates -----------------------------------------------------------------------------------------------------------


def rates(result: Result, *sections: str) -> dict[str, dict[str, Row]]:
    """Subject → contestant → its rate, section by section, short contexts first."""
    subjects: dict[str, dict[str, Row]] = {}
    for row in sorted(
        (row for row in result.rows(RATE) if row.more.get("section") in sections),
        key=lambda row: (sections.index(row.more["section"]), row.more["tokens"]),
    ):
        subjects.setdefault(row.subject, {})[row.contestant] = row
    return subjects


def rates_table(result: Result, sections: Sequence[str]) -> Table:
    """A table with a line per prompt or context and a column per contestant; ours with the ratio to the strongest peer,
    which is the fastest cache of any peer, in bold if we are slower. With several peers, the last column names it.
    """
    subjects, has_ratios = rates(result, *sections), not _starvation_notes(result)

    def cell(subject: str, contestant: str) -> str:
        row, peer = subjects[subject].get(contestant), strongest(subjects[subject].values())
        return _rate_cell(row, peer.value if peer and has_ratios else None)

    columns = _columns(result)
    table = Table.cross("", subjects, columns, cell)
    if len({engine(one) for one in columns if not is_ours(one)}) < 2:
        return table
    best = (strongest(rows.values()) for rows in subjects.values())
    names = [NOTHING if peer is None else name(peer.contestant) for peer in best]
    return Table([*table.header, "strongest peer"], [[*row, who] for row, who in zip(table.rows, names, strict=True)])


def strongest(rows: Iterable[Row]) -> Row | None:
    """The rate of the fastest cache of any peer; None without one."""
    theirs = [row for row in rows if row.value is not None and not is_ours(row.contestant)]
    return max(theirs, key=lambda row: row.value or 0, default=None)


def _rate_cell(row: Row | None, best: float | None) -> str:
    if row is None or row.value is None:
        runs = () if row is None else max(row.more.get("tried", {}).values(), key=max, default=())
        return f"{row.failure if row else NOTHING}{': ' if runs else ''}{', '.join(map(rate_text, runs))}"
    half = (max(row.runs) - min(row.runs)) / 2
    text = f"{rate_text(row.value)} ± {half:,.1f}" if row.value < 100 else f"{rate_text(row.value)} ± {half:,.0f}"
    if not is_ours(row.contestant) or best is None:
        return text
    ratio = f"{row.value / best:.2f}×"
    return f"{text} (**{ratio}**)" if float(ratio[:-1]) < 1 else f"{text} ({ratio})"


def _starvation_notes(result: Result) -> list[str]:
    """A sentence about each peer that has lacked a core: no ratio is of such a measurement."""
    rows = {name(row.contestant): row for row in result.rows(RATE) if "starvation" in row.more}
    return [
        f"No ratios, since {peer} lacked a core: {row.subject}, it is {row.more['starvation']}. Measure again when the "
        "machine has no other work, or with fewer --threads"
        for peer, row in rows.items()
    ]


def bandwidth_table(result: Result) -> Table:
    """A table of the bytes of weights and cache that a step reads, and of the share of memory bandwidth."""

    def cell(subject: str, contestant: str) -> str:
        figures = result.figures(subject, contestant)
        if "cache" not in figures:
            return figures[RATE].failure or NOTHING if RATE in figures else NOTHING
        sizes = " + ".join(f"{_figure(figures, part) / 1e6:,.0f}" for part in ("weights", "cache"))
        return f"{sizes} MB" + (f", {_figure(figures, 'bandwidth'):.0%}" if "bandwidth" in figures else "")

    return Table.cross("", rates(result, GENERATION), _columns(result), cell)


def sequences_table(result: Result) -> Table:
    """A line for each number of sequences that are asked at the same time, and contestant: tokens/s of prompts, of
    answers, all included, and of steps, and these over the steps of one sequence alone."""

    def rate(row: Row | None, tokens: int) -> str:
        return cell_of(row, lambda seconds: rate_text(tokens / seconds))

    lines = []
    parts = [(who, figures) for subject, who, figures in result.parts() if subject.endswith(f" {SEQUENCES}")]
    for who, figures in parts:
        more, step = next(iter(figures.values())).more, figures.get("step")
        count, one = more["sequences"], result.value(f"1 {SEQUENCES}", who, "step")
        tokens = {"first": count * more.get("prompt", 1), "seconds": count * more.get("answer", 1), "step": count}
        rates = [rate(figures.get(quantity), number) for quantity, number in tokens.items()]
        times = f"{count * one / step.value:.2f}" if one and step and step.value else NOTHING
        lines.append((count, [str(count), name(who), *rates, cell_of(step, lambda s: f"{1e3 * s:,.2f}"), times]))
    header = SEQUENCES, "", "prompts, tokens/s", "answers, tokens/s", "steps, tokens/s", "ms a step", "times one"
    return Table(header, [line for _, line in sorted(lines, key=lambda line: line[0])])


# -- memory ----------------------------------------------------------------------------------------------------------


def memory_table(result: Result) -> Table:
    """A table of each contestant's memory: the peak, and the parts after the steps."""
    names = {"peak": "peak", "after steps": "now", "private": "private", "files": "file", "cache": "cache"}
    columns = [Column.of(title, quantity, size_text) for title, quantity in names.items()]
    return Table.of("", columns, ((_columns(result)[who], figures) for _, who, figures in result.parts(MEMORY)))


# -- words -----------------------------------------------------------------------------------------------------------


def place(result: Result) -> str:
    """The machine of a measurement."""
    machine = result["machine"]
    return f"{machine['cores']} cores of an {machine['cpu']}, {machine['system']}"


def engine(contestant: str) -> str:
    return contestant.partition(" ")[0]


def cache(contestant: str) -> str:
    return contestant.partition(" ")[2]


def is_ours(contestant: str) -> bool:
    return engine(contestant) == OURS


def label(engine: str) -> str:
    """The name of an engine in tables."""
    return "here" if engine == OURS else peers.every()[engine].label if engine in peers.every() else engine


def name(contestant: str) -> str:
    """A contestant with the engine's name in tables."""
    return f"{label(engine(contestant))} {cache(contestant)}"


def _columns(result: Result) -> Mapping[str, str]:
    """Contestant → its name: of ours the cache, the default one in bold. Those of a result that does not list them are
    in order, ours first."""
    measured = sorted(
        {row.contestant for row in result.rows(RATE) if "section" in row.more}, key=lambda who: (not is_ours(who), who)
    )
    bold = {f"{OURS} {EngineConfig.cache_type}": f"**{EngineConfig.cache_type}**"}
    contestants = result.about.get("contestants", measured)
    return {one: bold.get(one, cache(one)) if is_ours(one) else name(one) for one in contestants}


def _threads(result: Result) -> str:
    threads = result["threads"]
    chosen = ", ".join(f"{label(engine)} {n}" for engine, n in threads["chosen"].items())
    words = f"{threads['most']} for prompts, for steps {chosen}"
    if "peers" in threads and not all(map(is_ours, result["contestants"])):
        words += f"; a peer's best of {' and '.join(map(str, threads['peers']))} in each row"
    return words


def _about(result: Result) -> list[tuple[str, str]]:
    about = []
    if ours := result.about.get("ours"):
        about.append((f"polarlm, backend {ours['backend']}", str(ours["loaded"])))
    for peer in result["peers"]:
        built = f" ({peer['built_with']})" if peer["built_with"] else ""
        about.append((peer["name"], f"{peer['version_or_absence']}{built}"))
    if result["threads"]["chosen"] and result["device"] == "cpu":
        about.append(("threads", _threads(result)))
    read = [f"{n}: {max(rates) / 1e9:.1f} GB/s" for n, rates in result["bytes_per_second"].items()]
    return [*about, *([("bandwidth of the memory by threads that read", ", ".join(read))] if read else [])]


def _model_name(result: Result) -> str:
    return f"{result['model']} ({result['weights']})"


def _where(result: Result) -> str:
    machine: Mapping[str, Any] = result["machine"]
    return str(machine["gpu"]["name"]) if "gpu" in machine else f"{machine['cpu']}, {machine['cores']} cores"


def _figure(figures: Figures, quantity: str) -> float:
    return value_of(figures, quantity) or 0.0

"""The parts of docs/results/quality.md that measurements in bench/results decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from polarlm.bench.quality import snapshots
from polarlm.bench.quality import tables as quality
from polarlm.bench.quality.scores import CODED, SERVED, TEXT
from polarlm.bench.quality.tables import small
from polarlm.bench.report import Column, Table
from polarlm.bench.result import Figures, Result, Row, provenance, read, value_of
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS_BY_NAME

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DEMO = "smollm2-135m-instruct-????-??-??*"  # a second measurement of a day has a number at the end
_SAME = "model", "weights", "text", "windows", "window"  # equal in measurements of one table
EXACT = "exact_perplexity"  # a field of results: the perplexity in full precision
PLAIN = ":plain"  # a type as published, without conditioning


def newest(name: str) -> Result:
    """The latest measurement whose file name matches the pattern `name`."""
    return read(max(RESULTS.glob(f"{name}.json")))


def quality_table() -> str:
    """The costs of all cache types in perplexity and KL."""

    def cost(coded: str) -> Callable[[Figures], str]:
        def cell(figures: Figures) -> str:
            change = 100 * (of(figures, f"{coded}perplexity") / of(figures, EXACT) - 1)
            return f"{change:+.1f} %, {of(figures, f'{coded}kl_mean'):.2g}"

        return cell

    columns = Column("perplexity, KL as served", cost("")), Column("perplexity, KL, every token coded", cost(CODED))
    return _by_bits(f"quality-{DEMO}", columns)


def peers_table() -> str:
    """Cache types of other projects beside ours, with errors."""

    def change(figures: Figures) -> str:
        exact, ours = of(figures, EXACT), figures["perplexity"]
        return f"{100 * (of(figures, 'perplexity') / exact - 1):+.1f} ± {100 * (ours.error or 0) / exact:.1f} %"

    columns = (
        Column("perplexity", change),
        Column.of("KL", "kl_mean", small),
        Column.of("KL 99 %", "kl_99th_percentile", small),
        Column.of("drafts accepted", "draft_acceptance", lambda share: f"{100 * share:.1f} %"),
        Column.of("KL, every token coded", f"{CODED}kl_mean", small),
    )
    return _by_bits(f"peers-{DEMO}", columns)


def _by_bits(name: str, columns: Sequence[Column]) -> str:
    """A table with a line per cache type, fewest bits first, of its newest measurement, and the commands.

    columns: of figures as served, of those with every token coded, whose names begin with CODED, and EXACT.
    """
    measurements, lines = newest_of_each(name), list[tuple[str, Figures]]()
    for result, types in measurements:
        exact = {EXACT: Row(TEXT, "", EXACT, value=result[EXACT])}
        for label, row in types.items():
            coded = {f"{CODED}{quantity}": one for quantity, one in row[CODED].items()}
            lines.append((_label(label), {**row[SERVED], **coded, **exact}))
    lines.sort(key=lambda line: of(line[1], "bits_per_value"))
    bits = Column.of("bits/value", "bits_per_value", "{:.3f}".format)
    table = Table.of("Keys/values", [bits, *columns], lines).markdown()
    return "\n".join([table, "", _sources([(result, [*types]) for result, types in measurements])])


def newest_of_each(name: str) -> list[tuple[Result, dict[str, dict[str, Figures]]]]:
    """The measurements with the windows of the newest, newest first, each with the types that no newer one has."""
    files = sorted(RESULTS.glob(f"{name}.json"), reverse=True)
    latest, *older = map(read, files)
    measurements: list[tuple[Result, dict[str, dict[str, Figures]]]] = []
    shown: set[str] = set()
    for measured in [latest, *(one for one in older if all(one[key] == latest[key] for key in _SAME))]:
        rows = {label: row for label, row in _by_type(measured).items() if label not in shown}
        measurements.append((measured, rows))
        shown |= {*rows}
    return measurements


def _sources(measurements: Sequence[tuple[Result, Sequence[str]]]) -> str:
    """What was measured when, and by which commands. measurements: as of `newest_of_each`, with the types shown."""
    (first, _), *others = (one for one in measurements if one[1])
    more = (f"Other rows ({'; '.join(map(_label, types))}), {provenance(measured)}" for measured, types in others)
    return "\n".join([_source(first), *more])


def _tables(results: Iterable[Result], *tables: Callable[[Result], Table]) -> str:
    """Tables of results as their reports have them, each result with what it is of."""
    parts = []
    for result in results:
        made = (table(result).without_empty_columns() for table in tables)
        parts += [*(table.markdown() for table in made if table.rows), _source(result)]
    return "\n\n".join(parts)


def _models() -> list[Result]:
    """Measurements of several models and texts."""
    return [read(file) for file in [*sorted(RESULTS.glob("models-*.json")), *RESULTS.glob(f"positions-{DEMO}.json")]]


def of(figures: Figures, quantity: str) -> float:
    """A figure of a measurement."""
    return value_of(figures, quantity) or 0.0


def _by_type(result: Result) -> dict[str, dict[str, Figures]]:
    """Type → way of scoring → its figures of the text."""
    rows: dict[str, dict[str, Figures]] = {}
    for who, one in result["types"].items():
        rows.setdefault(one["type"], {})[one["scored_as"]] = result.figures(TEXT, who)
    return rows


def _label(name: str) -> str:
    """A type for a table, with its preset, and "as published" if it is."""
    preset = ""
    if name in PRESETS_BY_NAME:
        preset, name = (
            f" = **{name}**",
            " → ".join("/".join(dict.fromkeys(types)) for types in PRESETS_BY_NAME[name][:2]),
        )
    published = name.removesuffix(PLAIN)
    return f"`{published}`{preset}" + (", as published" if published != name else "")


def _source(result: Result) -> str:
    if "snapshots" in result.about:
        return f"{result['model']} on {result['text']}, {result['snapshots']} snapshots; {provenance(result)}"
    windows = f"{counted(result['windows'], 'window')} of {result['window']:,} tokens"
    kernels = ", with compiled kernels" if result.about.get("arithmetic") == "compiled kernels" else ""
    return (
        f"{result['model']} on {result['text']}, {windows}, perplexity {result['exact_perplexity']:.2f} in full "
        f"precision{kernels}; {provenance(result)}"
    )


PARTS: Mapping[str, Callable[[], str]] = {
    "quality": quality_table,
    "positions": lambda: _tables([newest(f"positions-{DEMO}")], quality.kl_by_position),
    "models": lambda: _tables(_models(), quality.divergences),
    "snapshots": lambda: _tables([newest("state-trained-hybrid-*")], snapshots.table_of),
    "figures": lambda: _tables([newest(f"cost-{DEMO}")], quality.divergences, quality.answers),
    "peers": peers_table,
}
"""Name of a mark → what writes the text between it and its end."""

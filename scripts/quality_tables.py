"""The parts of docs/quality.md that measurements in bench/results decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polarlm.bench.quality import tables as quality
from polarlm.bench.quality.scores import CODED, POSITIONS, SERVED, TEXT
from polarlm.bench.quality.snapshots import AFTER, DISTANCES, SNAPSHOT
from polarlm.bench.quality.tables import small, two_digits
from polarlm.bench.report import Table, cell_of
from polarlm.bench.result import Figures, Result, provenance, read, value_of
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS_BY_NAME
from polarlm.engine.state.plan import format_bytes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DEMO = "smollm2-135m-instruct-????-??-??*"  # a second measurement of a day has a number at the end
_SAME = "model", "weights", "text", "windows", "window"  # equal in measurements of one table
PLAIN = ":plain"  # a type as published, without conditioning


def newest(name: str) -> Result:
    """The latest measurement whose file name matches the pattern `name`."""
    return read(max(RESULTS.glob(f"{name}.json")))


def quality_table() -> str:
    """The costs of all cache types in perplexity and KL."""
    header = ["perplexity, KL as served", "perplexity, KL, every token coded"]
    return _by_bits(f"quality-{DEMO}", header, lambda served, coded, full: [_cost(served, full), _cost(coded, full)])


def _by_bits(name: str, header: Sequence[str], cells: Callable[[Figures, Figures, float], list[str]]) -> str:
    """A table with a line per cache type, fewest bits first, of its newest measurement, and the commands.

    cells: figures as served, with every token coded, and the perplexity in full precision → cells of the header.
    """
    measurements, rows = newest_of_each(name), []
    for result, types in measurements:
        for label, row in types.items():
            bits = of(row[SERVED], "bits_per_value")
            rows.append(
                (bits, [_label(label), f"{bits:.3f}", *cells(row[SERVED], row[CODED], result["exact_perplexity"])])
            )
    lines = [line for _, line in sorted(rows, key=lambda row: row[0])]
    table = Table(["Keys/values", "bits/value", *header], lines).markdown()
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


def positions_table() -> str:
    """KL by position in a long text, by type and way of scoring."""
    result = newest(f"positions-{DEMO}")
    return _figures(result, [quality.kl_by_position(result)])


def models_table() -> str:
    """KL on several models and texts, with its tail, as served and with every token coded."""
    names = "kl_mean", "kl_median", "kl_999th_percentile"
    header = [name for words in ("served", "coded") for name in (f"KL {words}", "median", "99.9 %", "same top-1")]
    parts = []
    for result in map(read, [*sorted(RESULTS.glob("models-*.json")), *RESULTS.glob(f"positions-{DEMO}.json")]):
        lines = []
        for name, by_scoring in _by_type(result).items():
            cells = [_label(name), f"{of(by_scoring[SERVED], 'bits_per_value'):.2f}"]
            for figures in by_scoring[SERVED], by_scoring[CODED]:
                cells += [*(small(of(figures, name)) for name in names), f"{100 * of(figures, 'same_top1'):.1f} %"]
            lines.append(cells)
        parts += [Table(["Keys/values", "bits/value", *header], lines).markdown(), _source(result)]
    return "\n\n".join(parts)


def snapshots_table() -> str:
    """KL after snapshots by state type and tokens since, and the cost of coded keys and values at these positions."""
    measured, presets = (newest(f"{kind}-trained-hybrid-????-??-??") for kind in ("state", "quality"))
    header = ["State type", "one snapshot", *(f"KL, first {n}" if n > 1 else "KL, first token" for n in DISTANCES)]
    lines = []
    for _, name, size in measured.parts(SNAPSHOT):
        after = [measured.figures(f"{AFTER} {tokens}", name) for tokens in DISTANCES]
        cells = [f"`{name}`", format_bytes(int(of(size, "bytes")))]
        cells += [cell_of(one["kl_mean"], lambda kl: f"{kl:.2g}") if of(one, "kl_mean") else "0" for one in after]
        tail = f"{of(after[-1], 'kl_99th_percentile'):.2g}, {of(after[-1], 'kl_max'):.2g}"
        lines.append([*cells, tail, two_digits(of(after[-1], "same_top1"))])
    last = [row for row in presets.rows("kl_mean") if row.subject.startswith(POSITIONS)]
    end = max(row.more["end"] for row in last)
    rows = [row for row in last if row.more["end"] == end and row.contestant in _by_type(presets)]
    costs = [f"{row.value:.2g} as {_label(row.contestant)}" for row in rows]
    source = (
        f"{measured['model']} on {measured['text']}: {measured['snapshots']} snapshots, KL in nats ± its standard "
        "error over these; 99 %, the largest "
        f"and the same top-1 are of the first {DISTANCES[-1]} tokens; {provenance(measured)}\n"
        f"At positions {rows[0].more['start']} to {end - 1} of the same text the model's keys and values cost a "
        f"KL of {', '.join(costs)}; measured with\n`{presets['command']}`."
    )
    return "\n".join([Table([*header, "KL 99 %, max", "same top-1"], lines).markdown(), "", source])


def figures_table() -> str:
    """KL of the cache types, and figures of texts that the model writes with them."""
    result = newest(f"cost-{DEMO}")
    return _figures(result, [part for part in (quality.divergences(result), quality.answers(result)) if part.rows])


def _figures(result: Result, parts: Sequence[Table]) -> str:
    return "\n\n".join([*(_named(part).markdown() for part in parts), _source(result)])


def _named(table: Table) -> Table:
    """A table of a page, with types as they are named here."""
    named = []
    for label, *cells in table.rows:
        name, *scoring = label.split(", ")
        named.append([", ".join([_label(name), *scoring]), *cells])
    return Table(table.header, named)


def peers_table() -> str:
    """Cache types of other projects beside ours, with errors."""

    def cells(served: Figures, coded: Figures, full: float) -> list[str]:
        change, error = 100 * (of(served, "perplexity") / full - 1), 100 * (served["perplexity"].error or 0) / full
        return [
            f"{change:+.1f} ± {error:.1f} %",
            *(cell_of(served[figure], small) for figure in ("kl_mean", "kl_99th_percentile")),
            cell_of(served["draft_acceptance"], lambda share: f"{100 * share:.1f} %"),
            cell_of(coded["kl_mean"], small),
        ]

    header = ["perplexity", "KL", "KL 99 %", "drafts accepted", "KL, every token coded"]
    return _by_bits(f"peers-{DEMO}", header, cells)


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


def _cost(figures: Figures, full: float) -> str:
    return f"{100 * (of(figures, 'perplexity') / full - 1):+.1f} %, {of(figures, 'kl_mean'):.2g}"


def _source(result: Result) -> str:
    windows = f"{counted(result['windows'], 'window')} of {result['window']:,} tokens"
    kernels = ", with compiled kernels" if result.about.get("arithmetic") == "compiled kernels" else ""
    return (
        f"{result['model']} on {result['text']}, {windows}, perplexity {result['exact_perplexity']:.2f} in full "
        f"precision{kernels}; {provenance(result)}"
    )


PARTS: Mapping[str, Callable[[], str]] = {
    "quality": quality_table,
    "positions": positions_table,
    "models": models_table,
    "snapshots": snapshots_table,
    "figures": figures_table,
    "peers": peers_table,
}
"""Name of a mark → what writes the text between it and its end."""

"""The parts of docs/quality.md that measurements in bench/results decide."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polarlm.bench import report
from polarlm.bench.quality import tables as quality
from polarlm.bench.quality.scores import CODED, SERVED
from polarlm.bench.quality.tables import Table, small, two_digits, with_error
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS, PRESETS_BY_NAME
from polarlm.engine.state.plan import format_bytes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DEMO = "smollm2-135m-instruct-????-??-??*"  # a second measurement of a day has a number at the end
_SAME = "model", "weights", "text", "windows", "window"  # equal in measurements of one table
_BY_AGE_SINCE = "2026-11-27"
PLAIN = ":plain"  # a type as published, without conditioning

Measured = Mapping[str, Any]


def newest(name: str) -> Measured:
    """The latest measurement whose file name matches the pattern `name`."""
    return _read(max(RESULTS.glob(f"{name}.json")))


def _read(file: Path) -> Measured:
    """A measurement. The presets of older ones were of blocks that are all alike; newer ones name the model's file."""
    measured = json.loads(file.read_text(encoding="utf-8"))
    if weights := measured.get("weights"):
        measured["model"] = measured["model"].removesuffix(f".{weights}")
    if measured["date"] < _BY_AGE_SINCE:
        for row in measured.get("rows", ()):
            if row.get("type") in PRESETS:
                row["type"] = "/".join(PRESETS[row["type"]].uniform)
    return measured


def quality_table() -> str:
    """The costs of all cache types in perplexity and KL."""
    header = ["perplexity, KL as served", "perplexity, KL, every token coded"]
    return _by_bits(f"quality-{DEMO}", header, lambda served, coded, full: [_cost(served, full), _cost(coded, full)])


def _by_bits(name: str, header: Sequence[str], cells: Callable[[Measured, Measured, float], list[str]]) -> str:
    """A table with a line per cache type, fewest bits first, of its newest measurement, and the commands.

    cells: figures as served, with every token coded, and the perplexity in full precision → cells of the header.
    """
    measurements, rows = newest_of_each(name), []
    for measured, types in measurements:
        for label, row in types.items():
            served, bits = row[SERVED], row[SERVED]["bits_per_value"]
            more = cells(served, row[CODED], measured["exact_perplexity"])
            rows.append((bits, [_label(label), f"{bits:.3f}", *more]))
    table = report.table(
        ["Keys/values", "bits/value", *header], [line for _, line in sorted(rows, key=lambda row: row[0])]
    )
    return "\n".join([table, "", _sources([(measured, [*types]) for measured, types in measurements])])


def newest_of_each(name: str) -> list[tuple[Measured, dict[str, dict[str, dict]]]]:
    """The measurements with the windows of the newest, newest first, each with the types that no newer one has."""
    files = sorted(RESULTS.glob(f"{name}.json"), reverse=True)
    latest, *older = map(_read, files)
    measurements: list[tuple[Measured, dict[str, dict[str, dict]]]] = []
    shown: set[str] = set()
    for measured in [latest, *(one for one in older if all(one[key] == latest[key] for key in _SAME))]:
        rows = {label: row for label, row in _by_type(measured).items() if label not in shown}
        measurements.append((measured, rows))
        shown |= {*rows}
    return measurements


def _sources(measurements: Sequence[tuple[Measured, Sequence[str]]]) -> str:
    """What was measured when, and by which commands. measurements: as of `newest_of_each`, with the types shown."""
    (first, _), *others = (one for one in measurements if one[1])
    more = (
        f"Other rows ({'; '.join(map(_label, types))}), {report.measured_with(measured)}" for measured, types in others
    )
    return "\n".join([_source(first), *more])


def positions_table() -> str:
    """KL by position in a long text, by type and way of scoring."""
    measured = newest(f"positions-{DEMO}")
    return _figures(measured, [quality.kl_by_position(measured["rows"])])


def models_table() -> str:
    """KL on several models and texts, with its tail, as served and with every token coded."""
    figures = "kl_mean", "kl_median", "kl_999th_percentile"
    header = [name for words in ("served", "coded") for name in (f"KL {words}", "median", "99.9 %", "same top-1")]
    parts = []
    for measured in map(_read, [*sorted(RESULTS.glob("models-*.json")), *RESULTS.glob(f"positions-{DEMO}.json")]):
        lines = []
        for name, by_scoring in _by_type(measured).items():
            cells = [_label(name), f"{by_scoring[SERVED]['bits_per_value']:.2f}"]
            for row in by_scoring[SERVED], by_scoring[CODED]:
                cells += [*(small(row[figure]) for figure in figures), f"{100 * row['same_top1']:.1f} %"]
            lines.append(cells)
        parts += [report.table(["Keys/values", "bits/value", *header], lines), _source(measured)]
    return "\n\n".join(parts)


def snapshots_table() -> str:
    """KL after snapshots by state type and tokens since, and the cost of coded keys and values at these positions."""
    measured, presets = (newest(f"{kind}-trained-hybrid-????-??-??") for kind in ("state", "quality"))
    distances = [one["tokens"] for one in measured["rows"][0]["distances"]]
    header = ["State type", "one snapshot", *(f"KL, first {n}" if n > 1 else "KL, first token" for n in distances)]
    lines = []
    for row in measured["rows"]:
        last = row["distances"][-1]
        cells = [f"`{row['type']}`", format_bytes(row["bytes"])]
        cells += [_with_error(one, "kl_mean", "{:.2g}".format) if one["kl_mean"] else "0" for one in row["distances"]]
        lines.append([*cells, f"{last['kl_99th_percentile']:.2g}, {last['kl_max']:.2g}", two_digits(last["same_top1"])])
    stretch = presets["rows"][0]["by_position"][-1]
    costs = [
        f"{row['by_position'][-1]['kl_mean']:.2g} as {_label(row['type'])}"
        for row in presets["rows"]
        if row["scored_as"] == SERVED
    ]
    source = (
        f"{measured['model']} on {measured['text']}: {measured['snapshots']} snapshots, KL in nats ± its standard "
        "error over these; 99 %, the largest "
        f"and the same top-1 are of the first {distances[-1]} tokens; {report.measured_with(measured)}\n"
        f"At positions {stretch['start']} to {stretch['end'] - 1} of the same text the model's keys and values cost a "
        f"KL of {', '.join(costs)}; measured with\n`{presets['command']}`."
    )
    return "\n".join([report.table([*header, "KL 99 %, max", "same top-1"], lines), "", source])


def figures_table() -> str:
    """KL of the cache types, and figures of texts that the model writes with them."""
    measured = newest(f"cost-{DEMO}")
    rows = measured["rows"]
    return _figures(measured, [part for part in (quality.divergences(rows), quality.answers(rows)) if part[1]])


def _figures(measured: Measured, parts: Sequence[Table]) -> str:
    tables = [report.table(*_named(*part)) for part in parts]
    return "\n\n".join([*tables, _source(measured)])


def _named(header: list[str], rows: list[list[str]]) -> Table:
    """A table of a page, with types as they are named here."""
    named = []
    for label, *cells in rows:
        name, *scoring = label.split(", ")
        named.append([", ".join([_label(name), *scoring]), *cells])
    return header, named


def peers_table() -> str:
    """Cache types of other projects beside ours, with errors."""

    def cells(served: Measured, coded: Measured, full: float) -> list[str]:
        change, error = 100 * (served["perplexity"] / full - 1), 100 * served["perplexity_error"] / full
        return [
            f"{change:+.1f} ± {error:.1f} %",
            *(_with_error(served, figure, small) for figure in ("kl_mean", "kl_99th_percentile")),
            _with_error(served, "draft_acceptance", lambda share: f"{100 * share:.1f} %"),
            _with_error(coded, "kl_mean", small),
        ]

    header = ["perplexity", "KL", "KL 99 %", "drafts accepted", "KL, every token coded"]
    return _by_bits(f"peers-{DEMO}", header, cells)


def _with_error(row: Measured, figure: str, text: Callable[[float], str]) -> str:
    return with_error(row[figure], row["errors"][figure], text)


def _by_type(measured: Measured) -> dict[str, dict[str, dict]]:
    rows: dict[str, dict[str, dict]] = {}
    for row in measured["rows"]:
        rows.setdefault(row["type"], {})[row["scored_as"]] = row
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


def _cost(row: Measured, full: float) -> str:
    return f"{100 * (row['perplexity'] / full - 1):+.1f} %, {row['kl_mean']:.2g}"


def _source(measured: Measured) -> str:
    windows = f"{counted(measured['windows'], 'window')} of {measured['window']:,} tokens"
    kernels = ", with compiled kernels" if measured.get("arithmetic") == "compiled kernels" else ""
    return (
        f"{measured['model']} on {measured['text']}, {windows}, perplexity {measured['exact_perplexity']:.2f} in full "
        f"precision{kernels}; {report.measured_with(measured)}"
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

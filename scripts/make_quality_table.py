"""Writes the tables of measurements into README.md and docs/quality.md, between their marks, from bench/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polarlm.bench import report
from polarlm.bench.quality import page
from polarlm.bench.quality.causes import format_table
from polarlm.bench.quality.scores import kl_by_position, small, with_error
from polarlm.engine.state.cache_types import PRESETS, TWO_KINDS
from polarlm.engine.state.plan import format_bytes

ROOT = Path(__file__).resolve().parents[1]
README, DOCUMENT = ROOT / "README.md", ROOT / "docs" / "quality.md"
RESULTS = ROOT / "bench" / "results"
SERVED, CODED = "as served", "every token coded"
DEMO = "smollm2-135m-instruct-????-??-??"
_SAME = "model", "weights", "text", "windows", "window"  # of measurements that may stand in one table
PLAIN = ":plain"  # a type as published, without conditioning

# The types in the README: the presets, and types to compare them with.
_SHORT = ["q8_0:plain", "ring5/ring4", "kivi4:plain", "q4_0:plain", "turbo4:plain", "ring4/ring3.5", "polarquant:plain"]
_SHORT += ["ring3/ring3.5", "turbo3:plain"]

Measured = Mapping[str, Any]


def newest(name: str) -> Measured:
    """The latest measurement whose file name matches the pattern `name`."""
    return json.loads(max(RESULTS.glob(f"{name}.json")).read_text(encoding="utf-8"))


def quality_table(types: Sequence[str] | None = None) -> str:
    """A Markdown table with a line per cache type, fewest bits first, and the commands that measured them: of each type
    the newest measurement on the same text.

    types: those of the table; None takes all.
    """
    lines: list[tuple[float, str]] = []
    sources: list[tuple[Measured, list[str]]] = []
    for measured, rows in newest_of_each(f"quality-{DEMO}"):
        full = measured["exact_perplexity"]
        own = [name for name in rows if types is None or name in types]
        for name in own:
            served, coded = rows[name][SERVED], rows[name][CODED]
            cells = f"{served['bits_per_value']:.3f} | {_cost(served, full)} | {_cost(coded, full)}"
            lines.append((served["bits_per_value"], f"| {_label(name)} | {cells} |"))
        sources.append((measured, own))
    header = (
        "| Keys/values | bits/value | perplexity, KL as served | perplexity, KL, every token coded |\n|---|---|---|---|"
    )
    return "\n".join([header, *(line for _, line in sorted(lines, key=lambda line: line[0])), "", _sources(sources)])


def newest_of_each(name: str) -> list[tuple[Measured, dict[str, dict[str, dict]]]]:
    """The measurements whose file names match the pattern `name` and which have the windows of the newest, newest
    first, each with the rows of those types that no newer one has."""
    files = sorted(RESULTS.glob(f"{name}.json"), reverse=True)
    latest, *older = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    found: list[tuple[Measured, dict[str, dict[str, dict]]]] = []
    shown: set[str] = set()
    for measured in [latest, *(one for one in older if all(one[key] == latest[key] for key in _SAME))]:
        rows = {label: row for label, row in _by_type(measured).items() if label not in shown}
        found.append((measured, rows))
        shown |= {*rows}
    return found


def _sources(measurements: Sequence[tuple[Measured, Sequence[str]]]) -> str:
    """What was measured when, and by which commands. measurements: as of `newest_of_each`, with the types shown."""
    (first, _), *others = ((measured, own) for measured, own in measurements if own)
    of_others = (
        f"Other rows ({'; '.join(map(_label, own))}) on {measured['date']} with\n`{measured['command']}`."
        for measured, own in others
    )
    return "\n".join([_source(first, first["exact_perplexity"]), *of_others])


def ablation_table() -> str:
    """A Markdown table of the encoding without each of its parts: what it costs in quality, and in work."""
    measured, work = newest(f"ablation-{DEMO}"), newest(f"encoding-{DEMO}")
    full, works = measured["exact_perplexity"], {one["type"]: one for one in work["encoding"]}
    time = work["encoding"][0]["microseconds"]
    header = "| | bits/value | perplexity, KL as served | perplexity, KL, every token coded"
    lines = [f"{header} | encode time | decode instructions |", "|---" * 6 + "|"]
    for name, row in _by_type(measured).items():
        own = works[name]
        costs = " | ".join(_cost(row[scored], full) for scored in (SERVED, CODED))
        instructions = f"{own['keys']} keys, {own['values']} values, {own['kernel']:,} in all"
        bits = row[SERVED]["bits_per_value"]
        lines.append(f"| {name} | {bits:.3f} | {costs} | {own['microseconds'] / time:.2f} | {instructions} |")
    level = work["encoding"][0]["level"]
    of_work = (
        f"Encode time, over {time:.0f} µs, is a thread's for the keys and values of a head's block. Instructions are\n"
        f"those on vectors, at the CPU level `{level}`. Both were measured on {work['date']} on an\n"
        f"{work['machine']['cpu']} with\n`{work['command']}`."
    )
    return "\n".join([*lines, "", _source(measured, full), of_work])


def key_bias_table() -> str:
    """Perplexity and KL of a model whose keys have a large constant part."""
    measured = newest(f"key-bias-{DEMO}")
    lines = ["| Keys/values | perplexity, KL as served | perplexity, KL, every token coded |", "|---|---|---|"]
    for name, row in sorted(_by_type(measured).items(), key=lambda item: -item[1][SERVED]["kl_mean"]):
        cells = [f"{row[scored]['perplexity']:.2f}, {row[scored]['kl_mean']:.2g}" for scored in (SERVED, CODED)]
        lines.append(f"| {_label(name)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _source(measured, measured["exact_perplexity"])])


def causes_table() -> str:
    """KL of the default type's codes, of all and of parts of them, by the tokens before."""
    measured = newest("causes-smollm2-135m-instruct-balanced-????-??-??")
    source = (
        f"{measured['model']} on {measured['text']}, {measured['windows']} windows of {measured['window']:,} tokens; "
        f"KL ± its standard error, of 128 positions of each window; measured on {measured['date']} with\n"
        f"`{measured['command']}`."
    )
    return "\n".join([format_table(measured["depths"]), "", source])


def positions_table() -> str:
    """KL by position in a long text, by type and way of scoring."""
    measured = newest(f"positions-{DEMO}")
    rows = [(f"{_label(row['type'])}, {row['scored_as']}", row["by_position"]) for row in measured["rows"]]
    return "\n".join([report.table(*kl_by_position(rows)), "", _source(measured, measured["exact_perplexity"])])


def weights_table() -> str:
    """Perplexity and KL of a model whose matrices were converted, from the matrices as stored."""
    measured = newest(f"weights-{DEMO}")
    full = measured["exact_perplexity"]
    lines = ["| Weights | bits/weight | perplexity, KL |", "|---|---|---|"]
    lines.append(f"| as stored ({measured['weights']}) | {measured['stored_bits']:.2f} | |")
    for row in sorted(measured["weight_rows"], key=lambda row: -row["bits_per_weight"]):
        lines.append(f"| `{row['type']}` | {row['bits_per_weight']:.2f} | {_cost(row, full)} |")
    return "\n".join([*lines, "", _source(measured, full, "with the weights as stored")])


def arithmetic_table() -> str:
    """KL of steps with each cache type, in float32 and with a CPU's compiled kernels."""
    measured = newest(f"arithmetic-{DEMO}")
    lines = ["| Keys/values | KL in float32 | KL with kernels | kernels from float32 |", "|---|---|---|---|"]
    for row in measured["arithmetic"]:
        figures = (f"{row[name]:.3g}" for name in ("kl_float32", "kl_compiled", "kl_between"))
        lines.append(f"| {_label(row['type'])} | {' | '.join(figures)} |")
    windows = f"{measured['windows']} windows of {measured['window']:,} tokens, half of each a prompt"
    source = (
        f"{measured['model']} ({measured['weights']}) on {measured['text']}, {windows} and half steps; measured on "
        f"{measured['date']} with\n`{measured['command']}`."
    )
    return "\n".join([*lines, "", source])


def snapshots_table() -> str:
    """KL after snapshots by the way in which they keep a recurrent state, and by the tokens since; and what coded keys
    and values cost the same model at these positions."""
    measured, presets = (newest(f"{kind}-trained-hybrid-????-??-??") for kind in ("state", "quality"))
    distances = [one["tokens"] for one in measured["rows"][0]["distances"]]
    header = ["State type", "one snapshot", *(f"KL, first {n}" if n > 1 else "KL, first token" for n in distances)]
    lines = [f"| {' | '.join([*header, 'KL 99 %, max', 'same top-1'])} |", "|---" * (len(header) + 2) + "|"]
    for row in measured["rows"]:
        last = row["distances"][-1]
        cells = [f"`{row['type']}`", format_bytes(row["bytes"])]
        cells += [_with_error(one, "kl_mean", "{:.2g}".format) if one["kl_mean"] else "0" for one in row["distances"]]
        cells += [f"{last['kl_99th_percentile']:.2g}, {last['kl_max']:.2g}", f"{100 * last['same_top1']:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    stretch = presets["rows"][0]["by_position"][-1]
    costs = [
        f"{row['by_position'][-1]['kl_mean']:.2g} as {_label(row['type'])}"
        for row in presets["rows"]
        if row["scored_as"] == SERVED
    ]
    source = (
        f"{measured['model']} on {measured['text']}: {measured['snapshots']} snapshots, KL in nats ± its standard "
        "error over these; 99 %, the largest "
        f"and the same top-1 are of the first {distances[-1]} tokens; measured on {measured['date']} with\n"
        f"`{measured['command']}`.\n"
        f"At positions {stretch['start']} to {stretch['end'] - 1} of the same text the model's keys and values cost a "
        f"KL of {', '.join(costs)}; measured with\n`{presets['command']}`."
    )
    return "\n".join([*lines, "", source])


def figures_table() -> str:
    """All figures of the cache types, by position, too, and those of texts that the model writes with them."""
    measured = newest(f"cost-{DEMO}")
    parts = [page.divergences(measured), *page.by_position(measured), page.answers(measured)]
    return _figures(measured, parts)


def hybrid_figures_table() -> str:
    """The same on a small model with a layer of attention; its windows are too short for positions to differ."""
    measured = newest("cost-trained-hybrid-????-??-??")
    return _figures(measured, [page.divergences(measured), page.answers(measured)])


def _figures(measured: Measured, parts: Sequence[tuple[list[str], list[list[str]]]]) -> str:
    tables = [report.table(*_named(*part)) for part in parts]
    return "\n\n".join([*tables, _source(measured, measured["exact_perplexity"])])


def _named(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A table of a page, with types as they are named here."""
    return header, [[_label(name), *cells] for name, *cells in rows]


def peers_table() -> str:
    """Cache types of other projects next to ours, with errors, fewest bits first."""
    return _peers(f"peers-{DEMO}")


def hybrid_peers_table() -> str:
    """The same of the model that the tests have."""
    return _peers("peers-trained-hybrid-????-??-??")


def _peers(name: str) -> str:
    """Of each type the newest measurement on the same windows. name: a pattern of file names."""
    measurements = newest_of_each(name)
    header = ["Keys/values", "bits/value", "perplexity", "KL", "KL 99 %", "drafts accepted", "KL, every token coded"]
    rows = []
    for measured, found in measurements:
        full = measured["exact_perplexity"]
        for label, row in found.items():
            served, coded = row[SERVED], row[CODED]
            change, error = 100 * (served["perplexity"] / full - 1), 100 * served["perplexity_error"] / full
            cells = [
                _label(label),
                f"{served['bits_per_value']:.3f}",
                f"{change:+.1f} ± {error:.1f} %",
                *(_with_error(served, figure, small) for figure in ("kl_mean", "kl_99th_percentile")),
                _with_error(served, "draft_acceptance", lambda share: f"{100 * share:.1f} %"),
                _with_error(coded, "kl_mean", small),
            ]
            rows.append((served["bits_per_value"], cells))
    table = report.table(header, [cells for _, cells in sorted(rows, key=lambda row: row[0])])
    return "\n".join([table, "", _sources([(measured, [*found]) for measured, found in measurements])])


def _with_error(row: Measured, figure: str, text: Callable[[float], str]) -> str:
    return with_error(row[figure], row["errors"][figure], text)


def needle_table() -> str:
    """How many needles were found, as served, by type and length of the prompt."""
    files = [newest(f"needle-{DEMO}"), newest(f"needle-{DEMO}-more")]
    cells: dict[str, dict[int, dict[int, bool]]] = {}  # type → length → depth → found
    for measured in files:
        for cell in measured["needle"]:
            if cell["scored_as"] == SERVED:
                cells.setdefault(cell["type"], {}).setdefault(cell["length"], {})[cell["depth"]] = cell["correct"]
    lengths = sorted({length for found in cells.values() for length in found})
    header = " | ".join(f"{length:,} tokens" for length in lengths)
    lines = [f"| Keys/values | {header} |", "|---" * (len(lengths) + 1) + "|"]
    for name, found in cells.items():
        counts = [f"{sum(found[n].values())} of {len(found[n])}" if n in found else "" for n in lengths]
        lines.append(f"| {_label(name)} | {' | '.join(counts)} |")
    commands = " and\n".join(f"`{measured['command']}`" for measured in files)
    return "\n".join([*lines, "", f"Measured on {files[0]['date']} with\n{commands}."])


def _by_type(measured: Measured) -> dict[str, dict[str, dict]]:
    rows: dict[str, dict[str, dict]] = {}
    for row in measured["rows"]:
        rows.setdefault(row["type"], {})[row["scored_as"]] = row
    return rows


def _label(name: str) -> str:
    """A type for a table, with its preset, and "as published" if it is."""
    presets = {"/".join(dict.fromkeys(types)): preset for preset, types in PRESETS.items()}
    preset = f" = **{presets[name]}**" if name in presets else ""
    if name in TWO_KINDS:
        preset, name = f" = **{name}**", " → ".join("/".join(dict.fromkeys(types)) for types in TWO_KINDS[name][:2])
    published = name.removesuffix(PLAIN)
    return f"`{published}`{preset}" + (", as published" if published != name else "")


def _cost(row: Measured, full: float) -> str:
    return f"{100 * (row['perplexity'] / full - 1):+.1f} %, {row['kl_mean']:.2g}"


def _source(measured: Measured, full: float, of_what: str = "in full precision") -> str:
    windows = "1 window" if measured["windows"] == 1 else f"{measured['windows']} windows"
    return (
        f"{measured['model']} on {measured['text']}, {windows} of {measured['window']:,} tokens, "
        f"perplexity {full:.2f} {of_what}; measured on {measured['date']} with\n`{measured['command']}`."
    )


# Document → the name of a mark → the text between `<!-- name -->` and `<!-- /name -->`.
TABLES: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    DOCUMENT: {
        "quality": quality_table,
        "positions": positions_table,
        "causes": causes_table,
        "ablation": ablation_table,
        "key bias": key_bias_table,
        "weights": weights_table,
        "arithmetic": arithmetic_table,
        "snapshots": snapshots_table,
        "needle": needle_table,
        "figures": figures_table,
        "hybrid figures": hybrid_figures_table,
        "peers": peers_table,
        "hybrid peers": hybrid_peers_table,
    },
}


def with_tables(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """`text` with current tables between their marks. Raises SystemExit with a message if a mark is missing."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"The document needs the lines {begin} and {end} around its table")
        text = f"{before}{begin}\n{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for document, tables in TABLES.items():
        document.write_text(with_tables(document.read_text(encoding="utf-8"), tables), encoding="utf-8")

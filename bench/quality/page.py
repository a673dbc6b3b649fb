"""The page of `polarlm quality`: its figures as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from polarlm.bench import report
from polarlm.bench.plots import NO_PICTURES
from polarlm.bench.quality import pictures, tables
from polarlm.bench.quality.scores import SERVED
from polarlm.bench.quality.tables import NONE, Table, small
from polarlm.engine import EngineError
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.plan import format_bytes

Result = Mapping[str, Any]

# Column → its explanation, for the page and docs/quality.md.
COLUMNS = {
    "cache type": "how keys and values are stored; :plain is without our conditioning of keys, as others publish it",
    "bits/value": "bits of complete blocks over their values: codes, norms and means; f16 has 16",
    "perplexity": "of the text, and its change from full precision; lower is better, and small changes are chance",
    "KL mean": "how far the next token's distribution is from full precision's on average, in nats; 0 is the same",
    "same top-1": "positions where the most likely next token is the same as in full precision",
    "prompt": "tokens a second of a prompt, on this machine",
    "generation": "tokens a second after that prompt, one request alone",
    "1,000 tokens": "bytes of the KV cache for 1,000 tokens in complete blocks",
    "longest context": "tokens that fit in the memory that the weights leave, up to the model's own",
}


@dataclass(frozen=True)
class Section:
    """A heading, tables under it by their names for screen readers, and a sentence after them."""

    heading: str
    tables: dict[str, Table]
    text: str = ""


@dataclass(frozen=True)
class Page:
    """What a page says. presets: the statements under each name; pictures: (title, SVG), None without matplotlib."""

    title: str
    lead: str
    partial: str  # a sentence about what is missing; empty if the measurement is complete
    sections: Sequence[Section]
    about: Sequence[tuple[str, str]]
    columns: Mapping[str, str]  # column → its explanation
    presets: Sequence[tuple[str, list[str]]] = ()
    missing: Sequence[str] = ()
    pictures: Sequence[tuple[str, str]] | None = ()
    origin: str = ""  # a line below every table
    bold: frozenset[str] = field(default_factory=frozenset)  # first cells of rows in bold type


def render(file: Path, page: Page) -> None:
    """Write a page. Raises EngineError."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = page.pictures and [(title, Markup(svg)) for title, svg in page.pictures]
    values = {**vars(page), "pictures": drawn, "no_pictures": NO_PICTURES, "colours": pictures.COLOURS}
    try:
        file.write_text(environment.get_template("page.html").render(values), encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{file} cannot be written: {error.strerror}") from None


def write(file: Path, result: Result) -> None:
    """Write the page of cache types. Raises EngineError."""
    kl, same = tables.kl_by_position(result["rows"]), tables.top1_by_position(result["rows"])
    sections = [
        Section("All types", {"Table of all types": overview(result)}),
        Section(
            "How far from full precision",
            {"Table of divergences": tables.divergences(result["rows"])},
            "± is a standard error, bootstrapped over the windows of the text."
            if result["windows"] > 1
            else "A single window has no ±: give a longer text, or more --minutes.",
        ),
        Section(
            "By position in the text",
            {"Table of KL by position": kl, "Table of the same top-1 by position": same},
            "A token that comes later has more codes before it, so it shows more of what a type costs. The first "
            "stretch has few codes: the first block and the current one are in full precision.",
        ),
    ]
    if (answers := tables.answers(result["rows"]))[1]:
        text = (
            "Each type continues the text with the same random numbers, and full precision reads what it wrote. Errors "
            "of codes that add up while a model reads its own tokens show here."
        )
        sections.append(Section("Texts of their own", {"Table of texts that the model wrote": answers}, text))
    tokens = f"{result['scored_tokens']:,} tokens"
    page = Page(
        title=f"What a cache type costs: {result['model']}",
        lead=f"Measured on {result['text']}, {tokens}, on {result['date']}",
        partial=_partial(result),
        presets=sentences(result),
        sections=sections,
        missing=_missing(result),
        pictures=pictures.draw(result),
        about=_about(result),
        origin=report.origin(result),
        columns={**COLUMNS, **tables.KL_COLUMNS, **tables.ANSWER_COLUMNS},
        bold=frozenset(PRESETS),
    )
    render(file, page)


def terminal(result: Result, width: int) -> str:
    """The first table as Markdown, without its last columns where a terminal has fewer than `width` characters."""
    header, rows = overview(result)
    for columns in range(len(header), 1, -1):
        table = report.table(header[:columns], [cells[:columns] for cells in rows])
        if table.index("\n") <= width:
            break
    return report.with_origin(table, result)


def overview(result: Result) -> Table:
    """Full precision, then a row for each type and way of scoring."""
    exact = result["exact_perplexity"]
    first = ["full precision", NONE, f"{exact:.3f}", "0", "100 %", *[NONE] * 4]
    return list(COLUMNS), [first, *(_row_cells(row, exact) for row in result["rows"])]


def _row_cells(row: Result, exact: float) -> list[str]:
    speed, fit = row["speed"] or {}, row["fit"]
    return [
        tables.label(row),
        f"{row['bits_per_value']:.2f}",
        f"{row['perplexity']:.3f}{_change(row, exact)}",
        small(row["kl_mean"]),
        f"{100 * row['same_top1']:.1f} %",
        _rate(speed.get("prompt")),
        _rate(speed.get("generation")),
        NONE if fit["problem"] else format_bytes(1000 * fit["bytes_per_token"]),
        NONE if fit["problem"] else f"{fit['tokens']:,}",
    ]


def _change(row: Result, exact: float) -> str:
    """The change of perplexity from full precision's; nothing of a single window, where it may be chance."""
    if (error := row["perplexity_error"]) is None:
        return ""
    return f" ({100 * (row['perplexity'] / exact - 1):+.2f} ± {100 * error / exact:.2f} %)"


def _rate(rate: float | None) -> str:
    if rate is None:
        return NONE
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def sentences(result: Result) -> list[tuple[str, list[str]]]:
    """(preset, statements of what it costs) for each preset that was measured."""
    served = [row for row in result["rows"] if row["scored_as"] == SERVED]
    f16 = next((row for row in served if row["type"] == "f16"), None)
    return [(row["type"], _points(row, f16, result)) for row in served if row["type"] in PRESETS]


def _points(row: Result, f16: Result | None, result: Result) -> list[str]:
    smaller = f"the KV cache is {16 / row['bits_per_value']:.1f} times smaller than in half precision"
    same = f"{100 * row['same_top1']:.1f} % of the most likely next tokens stay the same"
    parts = [smaller, same]
    if change := _change(row, result["exact_perplexity"]):
        parts.append(f"perplexity changes by {change[2:-1]}")
    if f16 is not None and 0 < f16["fit"]["tokens"] < row["fit"]["tokens"]:
        parts.append(f"{row['fit']['tokens']:,} tokens of context fit here, {f16['fit']['tokens']:,} with f16")
    if f16 is not None and row["speed"] and f16["speed"] and row["speed"]["generation"] and f16["speed"]["generation"]:
        ratio = row["speed"]["generation"] / f16["speed"]["generation"]
        parts.append(f"generation runs at {_rate(row['speed']['generation'])} tokens/s, {ratio:.2f} times f16's speed")
    return parts


def _partial(result: Result) -> str:
    """A sentence about what the page lacks because the measurement was interrupted; empty if it is complete."""
    if result["complete"]:
        return ""
    windows = f"{result['windows']} of {result['planned_windows']} windows were scored"
    served = [row for row in result["rows"] if row["scored_as"] == SERVED]
    timed = sum(row["speed"] is not None for row in served)
    return f"This page is partial: {windows}, and the speed of {timed} of {len(served)} types was measured."


def _missing(result: Result) -> list[str]:
    sentences = []
    if any(row["kl_999th_percentile"] is None for row in result["rows"]):
        sentences.append("KL 99.9 % needs 1,000 scored tokens at least: give a longer text, or more minutes.")
    problems: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["scored_as"] != SERVED:
            continue
        for problem in {row["fit"]["problem"], (row["speed"] or {}).get("problem", "")} - {""}:
            problems.setdefault(problem, []).append(row["type"])
    return sentences + [f"{', '.join(types)}: {problem}" for problem, types in problems.items()]


def _about(result: Result) -> Sequence[tuple[str, str]]:
    machine = result["machine"]
    arithmetic = {
        "float32": "float32",
        "compiled kernels": "compiled kernels, keys and values in float32 (the weights as float32 do not fit)",
    }
    exact = f"a prefill in {arithmetic[result['arithmetic']]}"
    if result["full_precision"] == "file":
        exact = "the log-probabilities of the file, of the second half of each window"
    coded = any(row["scored_as"] != SERVED for row in result["rows"])
    speed = "CPU" if result["device"] == "cpu" else "GPU"
    if result.get("speed_context"):
        rounds = max(row["speed"]["rounds"] for row in result["rows"] if row["speed"])
        speed += f", a prompt of {result['speed_context']:,} tokens and 32 steps, medians of {rounds} rounds"
    return [
        ("model", f"{result['model']}, {result['weights']} weights"),
        (
            "text",
            f"{result['text']}: {counted(result['windows'], 'window')} of up to {result['window']:,} tokens, "
            f"{result['scored_tokens']:,} tokens scored",
        ),
        ("full precision", f"{exact}; its perplexity is {result['exact_perplexity']:.3f}"),
        (
            "types",
            "as generation reads them: complete blocks as codes, the first and the current one in full precision"
            + ("; with every token coded, the current block is read as codes, too" if coded else ""),
        ),
        *([("speed", speed)] if result.get("speed_context") else []),
        ("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"),
        ("date", f"{result['date']}, {report.duration(result['seconds'])}"),
        ("command", result["command"]),
    ]

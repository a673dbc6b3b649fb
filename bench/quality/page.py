"""The page of `polarlm quality`: its figures as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from polarlm.bench import report
from polarlm.bench.plot_style import NO_PICTURES
from polarlm.bench.quality import page_plots
from polarlm.bench.quality.scores import kl_by_position, kl_cells, small, top1_by_position, two_digits, with_error
from polarlm.engine import EngineError
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.plan import format_bytes

Result = Mapping[str, Any]

_NONE = "—"
_PLAIN = ":plain"
# Column → its explanation, for the page and docs/quality.md.
COLUMNS = {
    "cache type": "how keys and values are stored; :plain is without our conditioning of keys, as others publish it",
    "bits/value": "of complete blocks: codes, norms and means; f16 has 16",
    "perplexity": "of the text, and its change from full precision; lower is better, and small changes are chance",
    "KL mean": "how far the next token's distribution is from full precision's on average, in nats; 0 is the same",
    "same top-1": "positions where the most likely next token is that of full precision",
    "prompt": "tokens a second of a prompt, on this machine",
    "generation": "tokens a second after that prompt, one request alone",
    "1,000 tokens": "bytes of the KV cache for 1,000 tokens in complete blocks",
    "longest context": "tokens that fit in the memory that the weights leave, up to the model's own",
}


# The same of the two tables after it, but for columns that the first one has, too.
KL_COLUMNS = {
    "KL median": "half of the positions are further off than this, in nats",
    "KL 90 %": "one position in ten is further off than this, in nats",
    "KL 99 %": "one position in a hundred is further off than this, in nats",
    "KL 99.9 %": "one position in a thousand is further off than this, in nats",
    "KL max": "the position that is furthest off, in nats",
    "drafts accepted": "tokens that full precision drafts and the type accepts, in speculative sampling",
}
ANSWER_COLUMNS = {
    "own tokens": "tokens that the model wrote with the type, drawn at temperature 1",
    "their perplexity": "of these tokens, in full precision: how likely the text is for a model that codes nothing",
    "KL there": "how far the distributions that they were drawn from are from full precision's, in nats",
    "accepted there": "drafts accepted at these tokens",
}


def write(file: Path, result: Result) -> None:
    """Write the page. Raises EngineError."""
    pictures = page_plots.draw(result)
    render(
        file,
        "page.html",
        result=result,
        sentences=sentences(result),
        columns={**COLUMNS, **KL_COLUMNS, **ANSWER_COLUMNS},
        header=list(COLUMNS),
        rows=_cells(result),
        divergences=divergences(result),
        answers=answers(result),
        by_position=by_position(result),
        pictures=[(title, Markup(svg)) for title, svg in pictures or ()],
        no_pictures="" if pictures is not None else NO_PICTURES,
        about=_about(result),
        partial=_partial(result),
        missing=_missing(result),
    )


def render(file: Path, template: str, **values: Any) -> None:
    """Write a page of the template. Raises EngineError."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(template).render(colours=page_plots.COLOURS, **values)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EngineError(f"{file} cannot be written: {error.strerror}") from None


def table(result: Result) -> str:
    """The tables as Markdown, for a terminal."""
    whole = report.table(list(COLUMNS), [cells for _, cells in _cells(result)])
    more = [divergences(result), *by_position(result), answers(result)]
    return "\n\n".join([whole, *(report.table(header, rows) for header, rows in more if rows)])


def by_position(result: Result) -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of KL by position, and of the same top-1."""
    rows = [(row["type"], row["by_position"]) for row in result["rows"]]
    return [kl_by_position(rows), top1_by_position(rows)]


def divergences(result: Result) -> tuple[list[str], list[list[str]]]:
    """Header and rows of all figures of KL, with their errors."""
    rows = []
    for row in result["rows"]:
        errors = row["errors"] or {}
        shares = (with_error(row[name], errors.get(name), two_digits) for name in ("same_top1", "draft_acceptance"))
        rows.append([row["type"], *kl_cells(row), *shares])
    *of_kl, accepted = KL_COLUMNS
    return ["cache type", "KL mean", *of_kl, "same top-1", accepted], rows


def answers(result: Result) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the types that wrote a text."""
    rows = []
    for row in result["rows"]:
        if (answer := row["answer"]) is not None:
            errors = answer["errors"] or {}
            rows.append(
                [
                    row["type"],
                    f"{answer['tokens']:,}",
                    with_error(answer["perplexity"], answer["perplexity_error"], "{:.2f}".format),
                    with_error(answer["kl_mean"], errors.get("kl_mean"), small),
                    with_error(answer["draft_acceptance"], errors.get("draft_acceptance"), two_digits),
                ]
            )
    return ["cache type", *ANSWER_COLUMNS], rows


def _cells(result: Result) -> list[tuple[bool, list[str]]]:
    """(whether it is a preset, its cells) for full precision, then for each type."""
    exact = result["exact_perplexity"]
    first = ["full precision", _NONE, f"{exact:.3f}", "0", "100 %", *[_NONE] * 4]
    return [(False, first), *((row["type"] in PRESETS, _row_cells(row, exact)) for row in result["rows"])]


def _row_cells(row: Result, exact: float) -> list[str]:
    speed, fit = row["speed"] or {}, row["fit"]
    return [
        row["type"],
        f"{row['bits_per_value']:.2f}",
        f"{row['perplexity']:.3f} ({_change(row, exact)})",
        small(row["kl_mean"]),
        f"{100 * row['same_top1']:.1f} %",
        _rate(speed.get("prompt")),
        _rate(speed.get("generation")),
        _NONE if fit["problem"] else format_bytes(1000 * fit["bytes_per_token"]),
        _NONE if fit["problem"] else f"{fit['tokens']:,}",
    ]


def _change(row: Result, exact: float) -> str:
    change = f"{100 * (row['perplexity'] / exact - 1):+.2f}"
    error = row["perplexity_error"]
    return f"{change} %" if error is None else f"{change} ± {100 * error / exact:.2f} %"


def _rate(rate: float | None) -> str:
    if rate is None:
        return _NONE
    return f"{rate:,.1f}" if rate < 100 else f"{rate:,.0f}"


def sentences(result: Result) -> list[tuple[str, list[str]]]:
    """(preset, statements of what it costs) for each preset that was measured."""
    f16 = next((row for row in result["rows"] if row["type"] == "f16"), None)
    return [(row["type"], _points(row, f16, result)) for row in result["rows"] if row["type"] in PRESETS]


def _points(row: Result, f16: Result | None, result: Result) -> list[str]:
    smaller = f"the KV cache is {16 / row['bits_per_value']:.1f} times smaller than in half precision"
    same = f"{100 * row['same_top1']:.1f} % of the most likely next tokens stay the same"
    change = 100 * (row["perplexity"] / result["exact_perplexity"] - 1)
    direction = "rises" if change >= 0 else "falls"
    perplexity = "perplexity stays the same" if abs(change) < 0.05 else f"perplexity {direction} by {abs(change):.1f} %"
    parts = [smaller, same, perplexity]
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
    timed = sum(row["speed"] is not None for row in result["rows"])
    return f"This page is partial: {windows}, and the speed of {timed} of {len(result['rows'])} types was measured."


def _missing(result: Result) -> list[str]:
    """A sentence for each figure that is missing from the table."""
    found = []
    if any(row["kl_999th_percentile"] is None for row in result["rows"]):
        found.append("KL 99.9 % needs 1,000 scored tokens at least: give a longer text, or more minutes.")
    problems: dict[str, list[str]] = {}
    for row in result["rows"]:
        for problem in {row["fit"]["problem"], (row["speed"] or {}).get("problem", "")} - {""}:
            problems.setdefault(problem, []).append(row["type"])
    return found + [f"{', '.join(types)}: {problem}" for problem, types in problems.items()]


def _about(result: Result) -> Sequence[tuple[str, str]]:
    machine = result["machine"]
    arithmetic = {
        "float32": "float32",
        "compiled kernels": "compiled kernels, keys and values in float32 (the weights as float32 do not fit)",
    }
    exact = f"a prefill in {arithmetic[result['arithmetic']]}"
    if result["full_precision"] == "file":
        exact = "the log-probabilities of the file, of the second half of each window"
    speed = "CPU" if result["device"] == "cpu" else "GPU"
    if result.get("speed_context"):
        rounds = max(row["speed"]["rounds"] for row in result["rows"] if row["speed"])
        speed += f", a prompt of {result['speed_context']:,} tokens and 32 steps, medians of {rounds} rounds"
    return [
        ("model", f"{result['model']}, {result['weights']} weights"),
        ("text", f"{result['text']}: {_windows(result)}, {result['scored_tokens']:,} tokens scored"),
        ("full precision", f"{exact}; its perplexity is {result['exact_perplexity']:.3f}"),
        (
            "types",
            "as generation reads them: complete blocks as codes, the first and the current one in full precision",
        ),
        ("speed", speed),
        ("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"),
        ("date", f"{result['date']}, {report.duration(result['seconds'])}"),
        ("command", result["command"]),
    ]


def _windows(result: Result) -> str:
    count = result["windows"]
    return f"{count} window{'' if count == 1 else 's'} of up to {result['window']:,} tokens"

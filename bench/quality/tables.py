"""The report of a quality measurement: columns of its figures, for the page and a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.bench.quality.divergence import TAIL
from polarlm.bench.quality.pictures import pictures_of
from polarlm.bench.quality.scores import KIND, POSITIONS, SERVED, TEXT
from polarlm.bench.quality.speeds import SPEED
from polarlm.bench.report import NOTHING, Column, Report, Section, Table, cell_of, provenance, rate_text, size_text
from polarlm.bench.result import Figures, Result, Row, duration, value_of
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS

ROOM = "room"  # a subject: what fits in the memory that the weights leave


def small(figure: float) -> str:
    """A divergence: 1.2e-04 or 0.0012."""
    return "0" if figure == 0 else f"{figure:.1e}" if figure < 1e-3 else f"{figure:.4f}"


def two_digits(share: float) -> str:
    """A share in percent with two digits after the point."""
    return f"{100 * share:.2f} %"


def _plain(quantity: str, text: Callable[[float], str]) -> Callable[[Figures], str]:
    """A cell without the error."""
    return lambda figures: text(value) if (value := value_of(figures, quantity)) is not None else NOTHING


# -- columns, with what they mean --------------------------------------------------------------------------------------

TYPE = "cache type"
TYPE_SAYS = "how keys and values are stored; :plain is without our conditioning of keys, as others publish it"
_MEAN = "how far the next token's distribution is from full precision's on average, in nats; 0 is the same"
_OFF = "further off than this, in nats"
_TOP1 = "positions where the most likely next token is the same as in full precision"
_BITS = "bits of complete blocks over their values: codes, norms and means; f16 has 16"
_THERE_BITS = "the same in a window, where the newest blocks, which presets keep in full precision, are more of all"
_CHANGE = "of the text, and its change from full precision; lower is better, and small changes are chance"
_DRAFTS = "tokens that full precision drafts and the type accepts, in speculative sampling"
_LONGEST = "tokens that fit in the memory that the weights leave, up to the model's own"


DIVERGENCES = [
    Column.of("bits in a window", "bits_per_value", "{:.2f}".format, _THERE_BITS),
    Column.of("KL mean", "kl_mean", small, _MEAN),
    Column.of("KL median", "kl_median", small, f"half of the positions are {_OFF}"),
    Column.of("KL 90 %", "kl_90th_percentile", small, f"one position in ten is {_OFF}"),
    Column.of("KL 99 %", "kl_99th_percentile", small, f"one position in a hundred is {_OFF}"),
    Column.of("KL 99.9 %", TAIL, small, f"one position in a thousand is {_OFF}"),
    Column.of("KL max", "kl_max", small, "the position that is furthest off, in nats"),
    Column.of("same top-1", "same_top1", two_digits, _TOP1),
    Column.of("drafts accepted", "draft_acceptance", two_digits, _DRAFTS),
]


def overview_columns(result: Result) -> list[Column]:
    def perplexity(figures: Figures) -> str:
        row, exact = figures["perplexity"], result["exact_perplexity"]
        change = ""  # of a single window it may be chance
        if row.error is not None and row.value is not None:
            change = f" ({100 * (row.value / exact - 1):+.2f} ± {100 * row.error / exact:.2f} %)"
        return f"{row.value:.3f}{change}"

    speed = "tokens a second of a prompt, on this machine", "tokens a second after that prompt, one request alone"
    memory = "bytes of the KV cache for 1,000 tokens of the longest context"
    return [
        Column.of("bits/value", "bits_per_value", "{:.2f}".format, f"{_BITS}; of the longest context"),
        Column("perplexity", perplexity, _CHANGE),
        Column("KL mean", _plain("kl_mean", small), _MEAN),
        Column("same top-1", _plain("same_top1", lambda share: f"{100 * share:.1f} %"), _TOP1),
        Column("prompt", _plain("prompt", rate_text), speed[0]),
        Column("generation", _plain("generation", rate_text), speed[1]),
        Column("1,000 tokens", _plain("bytes_per_token", lambda size: size_text(1000 * size)), memory),
        Column("longest context", _plain("tokens", "{:,.0f}".format), _LONGEST),
    ]


# -- tables ------------------------------------------------------------------------------------------------------------


def text_figures(result: Result) -> list[tuple[str, Figures]]:
    """Each type with its scoring, and its figures of the text."""
    return [(who, figures) for _, who, figures in result.parts(TEXT)]


def overview(result: Result) -> Table:
    """Full precision, then a line for each type and way of scoring."""
    exact = {"perplexity": result["exact_perplexity"], "kl_mean": 0.0, "same_top1": 1.0}
    lines = [("full precision", {name: Row(TEXT, "", name, value=value) for name, value in exact.items()})]
    for who, figures in text_figures(result):
        one = result["types"][who]
        more = result.figures(SPEED, one["type"]) if one["scored_as"] == SERVED else {}
        lines.append((who, {**figures, **more, **result.figures(ROOM, one["type"])}))
    return Table.of(TYPE, overview_columns(result), lines)


def _cross_table(result: Result, prefix: str, title: str, quantity: str, text: Callable[[float], str]) -> Table:
    """A line for each type, and a column for each subject that begins with `prefix`."""
    at = {subject: subject.removeprefix(f"{prefix} ") for subject, *_ in result.parts(prefix=prefix)}
    whos = [who for who, _ in text_figures(result)]
    return Table.cross(title, whos, at, lambda who, at: cell_of(result.figures(at, who).get(quantity), text))


# -- the report --------------------------------------------------------------------------------------------------------


def report_of(result: Result) -> Report:
    by_text = []
    if any(result.parts(prefix=KIND)):
        columns = ("KL mean", "kl_mean", small), ("KL 99.9 %", TAIL, small), ("same top-1", "same_top1", two_digits)
        tables = [_cross_table(result, KIND, f"{title} by text", name, text) for title, name, text in columns]
        by_text.append(Section("By text", tables, "The same types on the windows of each text alone."))
    return Report(
        title=f"What a cache type costs: {result['model']}",
        lead=f"Measured on {result['text']}, {result['scored_tokens']:,} tokens, on {result['date']}",
        partial=_partial(result),
        sections=[
            Section("All types", [overview(result)]),
            *by_text,
            Section(
                "How far from full precision",
                [Table.of(TYPE, DIVERGENCES, text_figures(result))],
                "± is a standard error, bootstrapped over the windows of the text."
                if result["windows"] > 1
                else "A single window has no ±: give a longer text, or more --minutes.",
            ),
            Section(
                "By position in the text",
                [_cross_table(result, POSITIONS, "KL at positions", "kl_mean", small)],
                "A token that comes later has more codes before it, so it shows more of what a type costs. The first "
                "stretch has few codes: the first block and the newest ones are in full precision.",
            ),
        ],
        notes=_missing(result),
        pictures=pictures_of(result),
        about=[*_about(result), *provenance(result, is_timed=any(result.parts(SPEED)))],
        columns={TYPE: TYPE_SAYS, **{one.name: one.says for one in [*overview_columns(result), *DIVERGENCES]}},
        bold=frozenset(PRESETS),
        brief=1 + len(by_text),
    )


def _partial(result: Result) -> str:
    """A sentence about what the page lacks because the measurement was interrupted; empty if it is complete."""
    if result["complete"]:
        return ""
    windows = f"{result['windows']} of {result['planned_windows']} windows were scored"
    types = {one["type"] for one in result["types"].values()}
    count = sum(bool(result.figures(SPEED, name)) for name in types)
    return f"This page is partial: {windows}, and the speed of {count} of {len(types)} types was measured."


def _missing(result: Result) -> list[str]:
    statements = list(result.about.get("warnings", ()))
    if any(TAIL not in figures for _, figures in text_figures(result)):
        statements.append("KL 99.9 % needs 1,000 scored tokens at least: give a longer text, or more minutes.")
    problems: dict[str, list[str]] = {}
    for row in result.rows():
        if row.failure:
            problems.setdefault(row.failure, []).append(row.contestant)
    return statements + [f"{', '.join(types)}: {problem}" for problem, types in problems.items()]


def _about(result: Result) -> Sequence[tuple[str, str]]:
    kernels = "" if result["arithmetic"] == "float32" else ", keys and values in float32"
    coded = any(one["scored_as"] != SERVED for one in result["types"].values())
    rounds = max((len(row.runs) for row in result.rows("generation")), default=0)
    device = "CPU" if result["device"] == "cpu" else "GPU"
    speed = f"{device}, a prompt of {result.about.get('speed_context', 0):,} tokens and 32 steps, medians of {rounds}"
    return [
        ("model", f"{result['model']}, {result['weights']} weights"),
        (
            "text",
            f"{result['text']}: {counted(result['windows'], 'window')} of up to {result['window']:,} tokens, "
            f"{result['scored_tokens']:,} tokens scored",
        ),
        (
            "full precision",
            f"a prefill in {result['arithmetic']}{kernels}; its perplexity is {result['exact_perplexity']:.3f}",
        ),
        (
            "types",
            "as generation reads them: the first and the current block in full precision, with presets also the newest "
            "complete ones, and all others as codes" + ("; with every token coded, all but the first" if coded else ""),
        ),
        *([("speed", f"{speed} rounds")] if rounds else []),
        ("time", duration(result["seconds"])),
    ]

"""The report of a quality measurement: columns of its figures, for the page, a terminal and docs/quality.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.bench.quality.answers import OWN
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
_TOP1 = "positions where the most likely next token is the same as in full precision"
_BITS = "bits of complete blocks over their values: codes, norms and means; f16 has 16"
_THERE_BITS = "the same in a window, where the newest blocks, which have more bits, are more of all"
_CHANGE = "of the text, and its change from full precision; lower is better, and small changes are chance"
_DRAFTS = "tokens that full precision drafts and the type accepts, in speculative sampling"
_THERE = "how far their distributions are from full precision's, in nats, as in KL mean"
_LONGEST = "tokens that fit in the memory that the weights leave, up to the model's own"


def kl_columns(where: str, mean: str) -> list[Column]:
    """Mean, quantiles and maximum of KL with their errors. where: what a quantile is of, "position" or "token". mean:
    what the mean says."""
    off = "is further off than this, in nats"
    return [
        Column.of("KL mean", "kl_mean", small, mean),
        Column.of("KL median", "kl_median", small, f"half of the {where}s are further off than this, in nats"),
        Column.of("KL 90 %", "kl_90th_percentile", small, f"one {where} in ten {off}"),
        Column.of("KL 99 %", "kl_99th_percentile", small, f"one {where} in a hundred {off}"),
        Column.of("KL 99.9 %", TAIL, small, f"one {where} in a thousand {off}"),
        Column.of("KL max", "kl_max", small, f"the {where} that is furthest off, in nats"),
    ]


BITS = Column.of("bits/value", "bits_per_value", "{:.2f}".format, f"{_BITS}; of the longest context")
DIVERGENCES = [
    Column.of("bits in a window", "bits_per_value", "{:.2f}".format, _THERE_BITS),
    *kl_columns("position", _MEAN),
    Column.of("same top-1", "same_top1", two_digits, _TOP1),
    Column.of("drafts accepted", "draft_acceptance", two_digits, _DRAFTS),
]
ANSWERS = [
    Column.of("own tokens", "tokens", "{:,.0f}".format, "tokens that the model wrote with the type, at temperature 1"),
    Column.of("KL there", "kl_mean", small, _THERE),
    Column.of("accepted there", "draft_acceptance", two_digits, "drafts accepted at these tokens"),
]


def overview_columns(result: Result) -> list[Column]:
    def perplexity(figures: Figures) -> str:
        return f"{figures['perplexity'].value:.3f}{_change(figures['perplexity'], result['exact_perplexity'])}"

    speed = "tokens a second of a prompt, on this machine", "tokens a second after that prompt, one request alone"
    memory = "bytes of the KV cache for 1,000 tokens of the longest context"
    return [
        BITS,
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


def divergences(result: Result) -> Table:
    """All figures of KL, with their errors."""
    return Table.of(TYPE, DIVERGENCES, text_figures(result))


def kl_by_position(result: Result) -> Table:
    """KL by position; all rows are of the same windows."""
    return _by_position(result, "KL at positions", "kl_mean", small)


def top1_by_position(result: Result) -> Table:
    """The same top-1 by position; all rows are of the same windows."""
    return _by_position(result, "same top-1 at positions", "same_top1", two_digits)


def by_kind(result: Result) -> list[Table]:
    """Tables of what matters of each text, if there are several."""
    columns = ("KL mean", "kl_mean", small), ("KL 99.9 %", TAIL, small), ("same top-1", "same_top1", two_digits)
    return [_cross_table(result, KIND, f"{title} by text", name, text) for title, name, text in columns]


def _by_position(result: Result, title: str, quantity: str, text: Callable[[float], str]) -> Table:
    return _cross_table(result, POSITIONS, title, quantity, text)


def _cross_table(result: Result, prefix: str, title: str, quantity: str, text: Callable[[float], str]) -> Table:
    at = {subject: subject.removeprefix(f"{prefix} ") for subject, *_ in result.parts(prefix=prefix)}
    whos = [who for who, _ in text_figures(result)]
    return Table.cross(title, whos, at, lambda who, at: cell_of(result.figures(at, who).get(quantity), text))


def answers(result: Result) -> Table:
    """What full precision says of the texts that types wrote; nothing of a text too short for errors."""
    lines = ((who, figures) for _, who, figures in result.parts(OWN) if figures["kl_mean"].error is not None)
    return Table.of(TYPE, ANSWERS, lines)


# -- the report --------------------------------------------------------------------------------------------------------


def report_of(result: Result) -> Report:
    columns = [*overview_columns(result), *DIVERGENCES, *ANSWERS]
    by_text = []
    if any(result.parts(prefix=KIND)):
        by_text.append(Section("By text", by_kind(result), "The same types on the windows of each text alone."))
    return Report(
        title=f"What a cache type costs: {result['model']}",
        lead=f"Measured on {result['text']}, {result['scored_tokens']:,} tokens, on {result['date']}",
        partial=_partial(result),
        cards=preset_cards(result),
        sections=[
            Section("All types", [overview(result)]),
            *by_text,
            Section(
                "How far from full precision",
                [divergences(result)],
                "± is a standard error, bootstrapped over the windows of the text."
                if result["windows"] > 1
                else "A single window has no ±: give a longer text, or more --minutes.",
            ),
            Section(
                "By position in the text",
                [kl_by_position(result), top1_by_position(result)],
                "A token that comes later has more codes before it, so it shows more of what a type costs. The first "
                "stretch has few codes: the first block and the current one are in full precision.",
            ),
            Section(
                "Texts of their own",
                [answers(result)],
                "Each type continues the text with the same random numbers, and full precision reads what it wrote. "
                "Errors of codes that add up while a model reads its own tokens show here.",
            ),
        ],
        notes=_missing(result),
        pictures=pictures_of(result),
        about=[*_about(result), *provenance(result, is_timed=any(result.parts(SPEED)))],
        columns={TYPE: TYPE_SAYS, **{column.name: column.says for column in columns}},
        bold=frozenset(PRESETS),
        brief=1 + len(by_text),
    )


def _change(row: Row, exact: float) -> str:
    """The change of perplexity from full precision's; nothing of a single window, where it may be chance."""
    if row.error is None or row.value is None:
        return ""
    return f" ({100 * (row.value / exact - 1):+.2f} ± {100 * row.error / exact:.2f} %)"


def preset_cards(result: Result) -> list[tuple[str, list[str]]]:
    """(preset, statements of what it costs) for each preset that was measured."""
    f16, points = result.value(ROOM, "f16", "tokens") or 0, []
    for who, figures in text_figures(result):
        if who not in PRESETS:
            continue
        bits = result.value(ROOM, who, "bits_per_value") or value_of(figures, "bits_per_value") or 16
        same = 100 * (value_of(figures, "same_top1") or 0)
        statements = [f"the KV cache takes {bits:.2f} bits a value, in half precision 16"]
        statements.append(f"{same:.1f} % of the most likely next tokens stay the same")
        if change := _change(figures["perplexity"], result["exact_perplexity"]):
            statements.append(f"perplexity changes by {change[2:-1]}")
        if 0 < f16 < (tokens := result.value(ROOM, who, "tokens") or 0):
            statements.append(f"{tokens:,.0f} tokens of context fit here, {f16:,.0f} with f16")
        rate, half = (result.value(SPEED, name, "generation") for name in (who, "f16"))
        if rate and half:
            statements.append(f"generation runs at {rate_text(rate)} tokens/s, {rate / half:.2f} times f16's speed")
        points.append((who, statements))
    return points


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
    arithmetic = {
        "float32": "float32",
        "compiled kernels": "compiled kernels, keys and values in float32",
    }
    exact = f"a prefill in {arithmetic[result['arithmetic']]}"
    if result["full_precision"] == "file":
        exact = "the log-probabilities of the file, of the second half of each window"
    coded = any(one["scored_as"] != SERVED for one in result["types"].values())
    speed = "CPU" if result["device"] == "cpu" else "GPU"
    rounds = max((len(row.runs) for row in result.rows("generation")), default=0)
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
        *(
            [
                (
                    "speed",
                    f"{speed}, a prompt of {result['speed_context']:,} tokens and 32 steps, medians of {rounds} rounds",
                )
            ]
            if rounds
            else []
        ),
        ("time", duration(result["seconds"])),
    ]

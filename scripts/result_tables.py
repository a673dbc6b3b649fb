"""The parts of docs/results that measurements in bench/results decide: the tables of their reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from polarlm.bench.gpu.peer import attention_at
from polarlm.bench.gpu.plan import LLAMA_CPP
from polarlm.bench.gpu.tables import best_half, prompts_table, server_in_words
from polarlm.bench.quality import snapshots, tool_cost
from polarlm.bench.quality import tables as quality
from polarlm.bench.quality.scores import CODED, SERVED, TEXT
from polarlm.bench.quality.tables import small
from polarlm.bench.report import Column, Table
from polarlm.bench.result import Figures, Result, Row, origin, provenance, read, value_of
from polarlm.bench.serving.tables import LOAD, conversations_table, servers_table
from polarlm.bench.speed.contestants import GENERATION, OURS, PROMPT, RATE
from polarlm.bench.speed.measure import MEMORY
from polarlm.bench.speed.starts import START
from polarlm.bench.speed.tables import (
    STARTS,
    peers_in_words,
    place,
    rates,
    rates_table,
    report_of,
    sequences_table,
    source,
    starts_of_models,
)
from polarlm.engine import EngineConfig
from polarlm.engine.errors import counted
from polarlm.engine.state.cache_types import PRESETS_BY_NAME

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DEMO = "smollm2-135m-instruct-????-??-??*"  # a second measurement of a day has a number at the end
_SAME = "model", "weights", "text", "windows", "window"  # equal in measurements of one table
EXACT = "exact_perplexity"  # a field of results: the perplexity in full precision
_DEMO_MODEL = "SmolLM2-135M-Instruct"
PLAIN = ":plain"  # a type as published, without conditioning
_BY_AGE_SINCE = "2026-11-27"  # the default type has had blocks of two kinds since
_PLACES = [(context, batch) for batch in (1, 16) for context in (2048, 32_768, 131_072)]


def newest(name: str) -> Result:
    """The latest measurement whose file name matches the pattern `name`."""
    return read(max(RESULTS.glob(f"{name}.json")))


# -- what cache types cost ---------------------------------------------------------------------------------------------


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


def _model_measurements() -> list[Result]:
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


# -- speed -------------------------------------------------------------------------------------------------------------


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
    return dict(sorted(newest_of.values(), key=lambda item: (item[1]["model"] != _DEMO_MODEL, item[0].name)))


def all_tables() -> str:
    """The reports of all models, for docs/results/speed.md."""
    parts = []
    everything = published_results()
    titles = Counter(map(_title, everything.values()))
    for path, result in everything.items():
        where = f", on {place(result)}" if titles[_title(result)] > 1 else ""
        sections = report_of(result).sections
        tables = (section.markdown() for section in sections if section.heading != STARTS)  # they have a table of all
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


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpu() -> str:
    """The same files beside llama.cpp, and attention beside PyTorch, each with its day."""
    everything = measurements()
    return "\n\n".join([*_gpu_models(everything), *_gpu_attention(everything)])


def measurements() -> list[Result]:
    """All of GPUs, the newest first."""
    everything = [read(path) for path in sorted(RESULTS.glob("gpu-nvidia-*.json"))]
    return sorted(everything, key=lambda one: one["date"], reverse=True)


def _gpu_models(everything: list[Result]) -> Iterator[str]:
    """The newest measurement of each model beside llama.cpp, and a newer one without it."""
    shown = set[tuple[str, bool]]()
    for one in everything:
        title, has_peer = f"### {one['model']}, on an {gpu_of(one)}", has_llama_cpp(one)
        if not rates(one, GENERATION, PROMPT) or {(title, True), (title, has_peer)} & shown:
            continue
        shown.add((title, has_peer))
        yield from (title, rates_table(one, [GENERATION, PROMPT], least_spread=0.1, with_peer=True).markdown())
        if (sequences := sequences_table(one)).rows:
            yield "Prompts in ms, and on the device alone, if all is launched before it begins:"
            yield prompts_table(one).markdown()
            yield "Sequences that are asked at the same time, with 128 tokens in and 64 out each:"
            yield sequences.markdown()
            yield from filter(None, [server_in_words(one)])
        about = one.about
        commands = ",\n".join(f"`{command}`" for command in about.get("commands", [one["command"]]))
        notes = "".join(f"; {one[name]}" for name in ("peer", "note") if name in about)
        yield f"Measured {_date(one)} with\n{commands}{notes}."


def has_llama_cpp(measured: Result) -> bool:
    """Whether llama.cpp was measured, too."""
    return any(row.contestant.startswith(LLAMA_CPP) for row in measured.rows(RATE))


def gpu_of(measured: Result) -> str:
    return str(measured["machine"]["gpu"]["name"])


def _date(measured: Result) -> str:
    return f"on {measured['date']}" + (f" at commit {measured['commit']}" if "commit" in measured.about else "")


def _gpu_attention(everything: list[Result]) -> Iterator[str]:
    """The newest measurement of each GPU at all places: the newest with its times, the others with their ratios."""
    (first, *others), lines = attention_of(everything), []
    for context, batch in _PLACES:
        times = seconds_of(first, context, batch)
        lines.append([f"{context:,} × {batch}", *(f"{1e6 * time:,.1f}" for time in times)])
        for best, _, ours in (times, *(seconds_of(one, context, batch) for one in others)):
            lines[-1].append(f"{best / ours:.2f}")
    yield f"### Attention, on an {gpu_of(first)}"
    yield (
        "Attention of one token for each sequence (32 heads, 8 KV heads of 128), in µs a layer, compared with the best "
        "of PyTorch's fp16 kernels (flash and cuDNN):"
    )
    header = ["Context × sequences", "fp16, best other", "`f16` here", f"`{_default(first)}`", "× fp16"]
    yield Table([*header, *(f"× on an {gpu_of(one)}" for one in others)], lines).markdown()
    yield "\n".join(f"{gpu_of(one)} {_date(one)} with `{one['command']}`." for one in (first, *others))


def attention_of(everything: Iterable[Result]) -> list[Result]:
    """The newest measurement of each GPU that has attention in all places."""
    newest: dict[str, Result] = {}
    for one in everything:
        if all(one.figures(attention_at(*place), name) for place in _PLACES for name in ("f16", _default(one))):
            newest.setdefault(gpu_of(one), one)
    return [*newest.values()]


def _default(measured: Result) -> str:
    """The name of the default type on that day."""
    return EngineConfig.cache_type if measured["date"] >= _BY_AGE_SINCE else "ring4/ring3.5"


def seconds_of(measured: Result, context: int, batch: int) -> tuple[float, float, float]:
    """Seconds of the best of PyTorch's kernels, of ours over an fp16 cache, and of the default type."""
    subject, best = attention_at(context, batch), best_half(measured, context, batch, peers=True)
    half, default = (measured.value(subject, name, "seconds") or 0.0 for name in ("f16", _default(measured)))
    return best or 0.0, half, default


def _by_kind(result: Result, number: int) -> Table:
    return quality.by_kind(result)[number]


PARTS: Mapping[str, Callable[[], str]] = {
    "quality": quality_table,
    "positions": lambda: _tables([newest(f"positions-{DEMO}")], quality.kl_by_position),
    "models": lambda: _tables(_model_measurements(), quality.divergences),
    "texts": lambda: _tables(
        [newest("quality-qwen2.5-coder-1.5b-*")], *(partial(_by_kind, number=number) for number in range(3))
    ),
    "tools": lambda: _with_source(tool_cost.table_of, [newest("tools-8k-*")]),
    "tools 2k": lambda: _with_source(tool_cost.table_of, [newest("tools-2k-*")]),
    "tools 16k": lambda: _with_source(tool_cost.table_of, [newest("tools-16k-*")]),
    "snapshots": lambda: _tables([newest("state-trained-hybrid-*")], snapshots.table_of),
    "figures": lambda: _tables([newest(f"cost-{DEMO}")], quality.divergences, quality.answers),
    "peers": peers_table,
    "speed": all_tables,
    "starts": starts,
    "conversations": lambda: _with_source(conversations_table, [newest("agents-qwen3.5-0.8b-random-q4-0-*")]),
    "pressure": lambda: _with_source(conversations_table, [newest("pressure-demo-*")]),
    "servers": lambda: _with_source(servers_table, server_results()),
    "gpu": gpu,
}
"""Name of a mark → what writes the text between it and its end."""

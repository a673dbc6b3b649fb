"""The report of a measurement on a GPU, in which times are compared with limits and peers."""

from __future__ import annotations

from polarlm.bench.lab import BETWEEN_TOKENS, FIRST_TOKEN
from polarlm.bench.lab.gpu.attention import ENCODING
from polarlm.bench.lab.gpu.cache import ALLOWED_ERROR
from polarlm.bench.lab.gpu.peer import attention_at
from polarlm.bench.lab.gpu.plan import DEVICE, SERVER
from polarlm.bench.lab.gpu.products import PRODUCT
from polarlm.bench.report import NOTHING, Column, Report, Section, Table, cell_of, provenance
from polarlm.bench.result import Figures, Result, value_of
from polarlm.bench.speed.contestants import GENERATION, OURS, PROMPT, RATE
from polarlm.bench.speed.tables import cache, rates_table, sequences_table


def report_of(result: Result) -> Report:
    attention = "Attention of one token per sequence; × fp16: the best fp16 kernel's over this"
    return Report(
        title=f"{result['model']} on {result['machine']['gpu']['name']}",
        lead="Times beside the limits of the device, PyTorch and llama.cpp",
        sections=[
            Section("Tokens/s", [rates_table(result, [GENERATION, PROMPT])]),
            Section(
                "Prompts, ms to the first token; device: if all is launched before it begins", [_prompts_table(result)]
            ),
            Section("Sequences that are asked at the same time", [sequences_table(result)]),
            Section(attention, [_attention(result)]),
            Section("Products with weights, µs by rows", [_matrices(result)]),
            Section("Encoding, with metrics", [_encoding(result)]),
        ],
        notes=[
            *filter(None, [_server_in_words(result), _limits(result)]),
            *(f"Not measured: {one['what']}: {one['why']}." for one in result["not_measured"]),
        ],
        partial="" if result["complete"] else "This page is partial: see its last sentences.",
        about=[
            *((f"GPU, {part}", text) for part, text in result["machine"]["gpu"].items() if part != "name"),
            *provenance(result),
        ],
    )


def _number(factor: float, digits: int = 1) -> str:
    return f"{factor:,.{digits}f}"


# -- requests of a model ---------------------------------------------------------------------------------------------


def _prompts_table(result: Result) -> Table:
    """A line for each length of a prompt: milliseconds with and without the host for each cache type."""
    times = {
        (row.more["tokens"], row.contestant): result.figures(row.subject, row.contestant)
        for row in result.rows("seconds")
        if row.subject.startswith(f"{PROMPT} ")
    }
    types = dict.fromkeys(who for _, who in times)
    parts = [Column.of(part, part, lambda seconds: _number(1e3 * seconds)) for part in ("seconds", "device")]
    lines = [
        [f"{tokens:,}", *(part.cell(times.get((tokens, who), {})) for who in types for part in parts)]
        for tokens in dict.fromkeys(tokens for tokens, _ in times)
    ]
    return Table(["tokens", *(f"{cache(who)}{part}" for who in types for part in ("", ", device"))], lines)


def _server_in_words(result: Result) -> str:
    """A sentence about a server under load; "" if there was none."""
    if not (figures := result.figures(SERVER, OURS)):
        return ""
    first, gap = ([_number(1e3 * run, 0) for run in figures[part].runs] for part in (FIRST_TOKEN, BETWEEN_TOKENS))
    more = figures[RATE].more
    return (
        f"A server with {more['clients']} clients, {more['prompt']} tokens in and {more['answer']} out: "
        f"{_number(figures[RATE].value or 0, 0)} tokens/s, {first[0]} ms to the first token ({first[1]} at 95 %), "
        f"{gap[0]} ms between two ({gap[1]} at 95 %)."
    )


# -- kernels ---------------------------------------------------------------------------------------------------------


def _limits(result: Result) -> str:
    """A sentence about the device alone; "" if it was not measured."""
    copy, product = result.value(DEVICE, "copy", "bytes/s"), result.value(DEVICE, "bf16 product", "FLOP/s")
    if copy is None or product is None:
        return ""
    return f"The device copies {copy / 1e9:,.0f} GB/s, read and written, and multiplies {product / 1e12:,.0f} TFLOP/s."


def _best_half(result: Result, context: int, batch: int) -> float | None:
    """Seconds of the fastest attention over an fp16 cache, ours included."""
    times = []
    for _, who, figures in result.parts(attention_at(context, batch)):
        is_half = _is_peer(figures) or (who == "f16" and _is_right(figures))
        times += [seconds] if is_half and (seconds := value_of(figures, "seconds")) else []
    return min(times, default=None)


def _is_peer(figures: Figures) -> bool:
    return "error" not in figures


def _is_right(figures: Figures) -> bool:
    return (value_of(figures, "error") or 0) <= ALLOWED_ERROR  # False for NaN


def _attention(result: Result) -> Table:
    """The table of attention, by context and batch, with PyTorch's fp16 kernels first."""
    copy, lines = result.value(DEVICE, "copy", "bytes/s"), []
    times = (row.more for row in result.rows("seconds") if "context" in row.more)
    places = dict.fromkeys((more["context"], more["batch"]) for more in times)
    for context, batch in places:
        best, parts = _best_half(result, context, batch), list(result.parts(attention_at(context, batch)))
        for _, who, figures in sorted(parts, key=lambda part: not _is_peer(part[2])):
            time, rate = figures["seconds"], [NOTHING, NOTHING]
            right = _is_peer(figures) or _is_right(figures)
            ratio = f"{best / time.value:.2f}" if best and time.value and right else NOTHING
            if "bytes" in figures and time.value:
                speed = (figures["bytes"].value or 0) / time.value
                rate = [_number(speed / 1e9, 0), f"{100 * speed / copy:.0f} %" if copy else NOTHING]
            wrong = cell_of(figures.get("error"), lambda error, right=right: f"{'' if right else 'WRONG '}{error:.1e}")  # type: ignore[misc]
            lines.append([who, f"{context:,}", str(batch), cell_of(time, _microseconds), *rate, ratio, wrong])
    return Table(("cache", "context", "batch", "µs", "GB/s", "of copy", "× fp16", "error"), lines)


def _microseconds(seconds: float) -> str:
    return _number(1e6 * seconds)


def _matrices(result: Result) -> Table:
    """A line for each matrix and format, with the times by rows."""
    prefix = f"{PRODUCT} "
    counts = {rows: rows for _, rows, _ in result.parts(prefix=prefix)}
    products = dict.fromkeys(subject.removeprefix(prefix) for subject, *_ in result.parts(prefix=prefix))

    def cell(product: str, rows: str) -> str:
        return cell_of(result.figures(prefix + product, rows).get("seconds"), _microseconds)

    return Table.cross("matrix, weights", products, counts, cell)


def _encoding(result: Result) -> Table:
    lines = ((f"{who}, {subject}", figures) for subject, who, figures in result.parts(prefix=f"{ENCODING} "))
    return Table.of("cache, blocks at once", [Column.of("µs a block", "seconds", _microseconds)], lines)

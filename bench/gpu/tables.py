"""Results of measurements on a GPU as JSON, and tables of that, in which times are compared with limits and peers."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from polarlm.bench import report
from polarlm.bench.gpu.attention import AttentionTime, EncodeTime
from polarlm.bench.gpu.cache import ALLOWED_ERROR
from polarlm.bench.gpu.peer import PeerTime
from polarlm.bench.gpu.products import MatrixTime
from polarlm.bench.gpu.requests import GENERATION, PROMPT, PromptTime, Rate, SequencesTime, ServerTimes
from polarlm.bench.speed.contestants import OURS
from polarlm.engine import EngineConfig

NOTHING = "—"
_LARGE = 0.1  # a spread, as a share of the median
Measured = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """Limits of the device. copy: bytes per second, read and written. gemm: FLOPs per second of a bfloat16 product."""

    copy: float
    gemm: float


_OfModel = PromptTime | Rate | SequencesTime | ServerTimes
Row = _OfModel | Limits | AttentionTime | PeerTime | MatrixTime | EncodeTime

# Fields of a file of results and the rows that each of them lists.
_KINDS: Mapping[str, type[Row]] = {
    "prompts": PromptTime,
    "rates": Rate,
    "sequences": SequencesTime,
    "server": ServerTimes,
    "limits": Limits,
    "attention": AttentionTime,
    "attention_peers": PeerTime,
    "matrices": MatrixTime,
    "encoding": EncodeTime,
}


@dataclass
class Results:
    """Rows in the order of measurement, and the missing measurements with their reasons. model: its name."""

    rows: list[Row] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    model: str = ""

    def as_json(self) -> dict[str, Any]:
        rows = {name: [asdict(row) for row in self.rows if isinstance(row, kind)] for name, kind in _KINDS.items()}
        missing = [{"what": what, "why": why} for what, why in self.missing]
        return {"model": self.model, **rows, "not_measured": missing}


def format_tables(measured: Measured) -> str:
    """The text of every table that has rows, then a line for each missing measurement."""
    parts = [
        _titled("Tokens/s", rates_table(measured)),
        _titled("Prompts, ms to the first token; device: if all is launched before it begins", prompts_table(measured)),
        _titled("Sequences that are asked at the same time", sequences_table(measured)),
        *map(server_in_words, measured["server"]),
        _titled("The device alone", _limits(measured)),
        _titled("Attention of one token per sequence; × fp16: the best fp16 kernel's over this", _attention(measured)),
        _titled("Products with weights, µs by rows", _matrices(measured)),
        _titled("Encoding, with metrics", _encoding(measured)),
        "\n".join(f"Not measured: {one['what']}: {one['why']}." for one in measured["not_measured"]),
    ]
    return "\n\n".join(part for part in parts if part)


def _titled(title: str, table: str) -> str:
    return table and f"{title}\n\n{table}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(row) for row in rows]
    return report.table(list(header), lines) if lines else ""


def rates(measured: Measured) -> dict[tuple[str, int, str, str], Sequence[float]]:
    """Kind, tokens, engine and cache type → tokens/s of each run; of a prompt that has none, by its seconds."""
    found = measured.get("rates", ())
    runs = {(row["kind"], row["tokens"], row["engine"], row["cache_type"]): row["runs"] for row in found}
    for row in measured.get("prompts", ()):
        if row["seconds"]:
            runs.setdefault((PROMPT, row["tokens"], OURS, row["cache_type"]), [row["tokens"] / row["seconds"]])
    return runs


def rates_table(measured: Measured) -> str:
    """A line for each depth and prompt, a column for each cache type; ours with the ratio to the peer."""
    runs = rates(measured)
    columns = sorted({key[2:] for key in runs}, key=lambda column: (column[0] != OURS, *column))
    lines = []
    beside = [key for key in runs if key[2] != OURS] or runs  # prompts that the peer has not read are another table's
    for kind, tokens in sorted({key[:2] for key in beside}):
        peer = next((runs[key] for key in runs if key[:2] == (kind, tokens) and key[2] != OURS), None)
        cells = (_rate(runs.get((kind, tokens, *column)), peer if column[0] == OURS else None) for column in columns)
        lines.append([f"{kind} {'at' if kind == GENERATION else 'of'} {tokens:,}", *cells])
    bold = {EngineConfig.cache_type: f"**{EngineConfig.cache_type}**"}
    names = (bold.get(cache, cache) if engine == OURS else f"{engine} {cache}" for engine, cache in columns)
    return _table(("", *names), lines)


def _rate(runs: Sequence[float] | None, peer: Sequence[float] | None) -> str:
    """Tokens/s, with half the spread if that is large, and the ratio to the peer's, which is bold if we are slower."""
    if not runs:
        return NOTHING
    rate, half = statistics.median(runs), (max(runs) - min(runs)) / 2
    text = f"{rate:,.0f}" + (f" ± {half:,.0f}" if half > _LARGE * rate else "")
    if peer is None:
        return text
    ratio = rate / statistics.median(peer)
    return f"{text} ({ratio:.2f}×)" if ratio >= 1 else f"{text} (**{ratio:.2f}×**)"


def prompts_table(measured: Measured) -> str:
    """A line for each length of a prompt: milliseconds with and without the host for each cache type."""
    rows = {(row["tokens"], row["cache_type"]): row for row in measured["prompts"]}
    types = list(dict.fromkeys(name for _, name in rows))
    lines = []
    for tokens in dict.fromkeys(tokens for tokens, _ in rows):
        lines.append([f"{tokens:,}"])
        for name in types:
            row = rows.get((tokens, name), {})
            times = (row.get(part) for part in ("seconds", "device"))
            lines[-1] += [f"{1e3 * time:,.1f}" if time else NOTHING for time in times]
    return _table(("tokens", *(f"{name}{part}" for name in types for part in ("", ", device"))), lines)


def sequences_table(measured: Measured) -> str:
    """A line for each number of sequences and engine: tokens/s of prompts, of answers, all included, and of steps."""
    lines = []
    for row in sorted(measured["sequences"], key=lambda row: row["sequences"]):
        count, step = row["sequences"], row["step"]
        tokens = (row["prompt"], row["first"]), (row["answer"], row["seconds"]), (1, step)
        rates = [f"{count * each / seconds:,.0f}" if seconds else NOTHING for each, seconds in tokens]
        lines.append([str(count), _engine(row), *rates, f"{1e3 * step:.2f}" if step else NOTHING])
    return _table(("sequences", "", "prompts, tokens/s", "answers, tokens/s", "steps, tokens/s", "ms a step"), lines)


def _engine(row: Mapping[str, Any]) -> str:
    return f"{'here' if row['engine'] == OURS else row['engine']} {row['cache_type']}"


def server_in_words(row: Mapping[str, Any]) -> str:
    """A sentence about a server under load."""
    first, gap = ([f"{1e3 * seconds:,.0f}" for seconds in row[name]] for name in ("first_token", "between_tokens"))
    return (
        f"A server with {row['clients']} clients, {row['prompt']} tokens in and {row['answer']} out: "
        f"{row['tokens_per_second']:,.0f} tokens/s, {first[0]} ms to the first token ({first[1]} at 95 %), {gap[0]} ms "
        f"between two ({gap[1]} at 95 %)."
    )


def _limits(measured: Measured) -> str:
    rows = [(f"{row['copy'] / 1e9:,.0f}", f"{row['gemm'] / 1e12:,.0f}") for row in measured["limits"]]
    return _table(("copy GB/s, read + written", "bf16 product TFLOP/s"), rows)


def _share_of_copy(measured: Measured, rate: float) -> str:
    best = max((row["copy"] for row in measured["limits"]), default=None)
    return f"{100 * rate / best:.0f} %" if best else NOTHING


def best_half(measured: Measured, context: int, batch: int, *, peers: bool = False) -> float | None:
    """Seconds of the fastest attention over an fp16 cache; ours is included unless it is the best of peers."""
    ours = [row for row in measured["attention"] if row["cache_type"] == "f16" and row["error"] <= ALLOWED_ERROR]
    rows = [*measured["attention_peers"], *([] if peers else ours)]
    return min((row["seconds"] for row in rows if row["seconds"] and _at(row, context, batch)), default=None)


def _at(row: Mapping[str, Any], context: int, batch: int) -> bool:
    return bool((row["context"], row["batch"]) == (context, batch))


def _attention(measured: Measured) -> str:
    """The table of attention, by context and batch, with PyTorch's fp16 kernels first."""
    lines, rows = [], [*measured["attention_peers"], *measured["attention"]]
    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in rows):
        best = best_half(measured, context, batch)
        for row in (row for row in rows if _at(row, context, batch)):
            seconds, is_peer = row["seconds"], "name" in row
            is_right = is_peer or row["error"] <= ALLOWED_ERROR  # False for NaN
            ratio = f"{best / seconds:.2f}" if best and seconds and is_right else NOTHING
            time = f"{1e6 * seconds:,.1f}" if seconds else row["note"]
            if is_peer:
                more = NOTHING, NOTHING, ratio, row["note"] if seconds else NOTHING
            else:
                rate, error = row["bytes"] / seconds, f"{'' if is_right else 'WRONG '}{row['error']:.1e}"
                more = f"{rate / 1e9:,.0f}", _share_of_copy(measured, rate), ratio, error
            lines.append((row["name" if is_peer else "cache_type"], f"{context:,}", str(batch), time, *more))
    return _table(("cache", "context", "batch", "µs", "GB/s", "of copy", "× fp16", "error"), lines)


def _matrices(measured: Measured) -> str:
    """A line for each matrix and format, with the times by rows."""
    rows = {(row["name"], row["weights"], row["rows"]): row for row in measured["matrices"]}
    counts = list(dict.fromkeys(count for _, _, count in rows))
    lines = []
    for name, weights in dict.fromkeys(key[:2] for key in rows):
        lines.append([name, weights])
        for count in counts:
            row = rows.get((name, weights, count), {"seconds": None, "note": NOTHING})
            lines[-1].append(f"{1e6 * row['seconds']:,.1f}" if row["seconds"] else row["note"])
    return _table(("matrix", "weights", *map(str, counts)), lines)


def _encoding(measured: Measured) -> str:
    rows = [(row["cache_type"], str(row["blocks"]), f"{1e6 * row['seconds']:,.1f}") for row in measured["encoding"]]
    return _table(("cache", "blocks at once", "µs a block"), rows)

"""Results of measurements on a GPU as JSON and as tables, in which times are compared with limits and with PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polarlm.bench import report
from polarlm.bench.gpu.attention import AttentionTime, EncodeTime
from polarlm.bench.gpu.peer import PeerTime, PromptPeerTime
from polarlm.bench.gpu.steps import MatrixTime, PrefillTime, StepTime

_NONE = "—"


@dataclass(frozen=True)
class Limits:
    """Limits of the device. copy: bytes per second, read and written. gemm: FLOPs per second of a bfloat16 product."""

    copy: float
    gemm: float


Row = AttentionTime | PeerTime | MatrixTime | StepTime | PrefillTime | PromptPeerTime | EncodeTime | Limits

# Fields of a file of results and the rows that each of them lists.
_KINDS: Mapping[str, type[Row]] = {
    "limits": Limits,
    "attention": AttentionTime,
    "attention_peers": PeerTime,
    "steps": StepTime,
    "matrices": MatrixTime,
    "prefill": PrefillTime,
    "prompt_peers": PromptPeerTime,
    "encoding": EncodeTime,
}


@dataclass
class Results:
    """Rows in the order of measurement, and the missing measurements with their reasons. model: the model's shape
    (`bench.gpu.shapes.shape_of`)."""

    rows: list[Row] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    model: Mapping[str, int] = field(default_factory=dict)

    def rows_of(self, kind: type) -> list[Any]:
        return [row for row in self.rows if isinstance(row, kind)]

    @property
    def limits(self) -> Limits | None:
        """The best of all measurements: clocks may be lower at the beginning or at the end."""
        rows = self.rows_of(Limits)
        return Limits(max(row.copy for row in rows), max(row.gemm for row in rows)) if rows else None

    def best_half(self, context: int, batch: int) -> tuple[float, str] | None:
        """Seconds and name of the fastest attention over an fp16 cache, our own included."""
        ours = [(row, "f16") for row in self.rows_of(AttentionTime) if row.cache_type == "f16" and row.right]
        named = [*((row, row.name) for row in self.rows_of(PeerTime)), *ours]
        times = [(row.seconds, name) for row, name in named if row.seconds and _at(row, context, batch)]
        return min(times, default=None)

    def as_json(self) -> dict[str, Any]:
        rows = {name: [asdict(row) for row in self.rows_of(kind)] for name, kind in _KINDS.items()}
        missing = [{"what": what, "why": why} for what, why in self.missing]
        return {"model": dict(self.model), **rows, "not_measured": missing}


def _at(row: AttentionTime | PeerTime, context: int, batch: int) -> bool:
    return (row.context, row.batch) == (context, batch)


def format_tables(results: Results) -> str:
    """The text of every table that has rows, then a line for each missing measurement."""
    parts = [_limits(results), _attention(results), _steps(results), _prefill(results), _prompt_peers(results)]
    parts += [
        _matrices(results),
        _encoding(results),
        "\n".join(f"Not measured: {what}: {why}." for what, why in results.missing),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    return f"{title}\n\n{report.table(header, rows)}" if rows else ""


def _limits(results: Results) -> str:
    rows = [(f"{row.copy / 1e9:,.0f}", f"{row.gemm / 1e12:,.0f}") for row in results.rows_of(Limits)]
    return _table("The device alone", ("copy GB/s, read + written", "bf16 product TFLOP/s"), rows)


def _share_of_copy(results: Results, rate: float) -> str:
    return f"{100 * rate / results.limits.copy:.0f} %" if results.limits else _NONE


def _attention(results: Results) -> str:
    """The table of attention, by context and batch, with PyTorch's fp16 kernels first."""
    rows, measured = [], [*results.rows_of(PeerTime), *results.rows_of(AttentionTime)]
    for context, batch in dict.fromkeys((row.context, row.batch) for row in measured):
        best = results.best_half(context, batch)
        for row in (row for row in measured if _at(row, context, batch)):
            place = f"{context:,}", str(batch)
            is_peer = isinstance(row, PeerTime)
            ratio = f"{best[0] / row.seconds:.2f}" if best and row.seconds and (is_peer or row.right) else _NONE
            if is_peer:
                time = f"{1e6 * row.seconds:,.1f}" if row.seconds else row.note
                rows.append((row.name, *place, time, _NONE, _NONE, ratio, row.note if row.seconds else _NONE))
            else:
                rate, error = row.bytes / row.seconds, f"{'' if row.right else 'WRONG '}{row.error:.1e}"
                figures = f"{1e6 * row.seconds:,.1f}", f"{rate / 1e9:,.0f}", _share_of_copy(results, rate), ratio, error
                rows.append((row.cache_type, *place, *figures))
    title = "Attention of one token per sequence; × fp16: the best fp16 kernel's time over this one"
    return _table(title, ("cache", "context", "batch", "µs", "GB/s", "of copy", "× fp16", "error"), rows)


def _steps(results: Results) -> str:
    rows = []
    for row in results.rows_of(StepTime):
        floor = row.bytes / results.limits.copy if results.limits else None
        rows.append(
            (
                row.weights,
                "overlapped" if row.overlapped else "in turn",
                f"{row.context:,}" + (f", others {row.shortest:,}" if row.shortest < row.context else ""),
                str(row.batch),
                *(f"{1e3 * seconds:.2f}" for seconds in (row.seconds, row.median, row.ahead, row.device)),
                f"{1e3 * floor:.2f}" if floor else _NONE,
                f"{100 * floor / row.seconds:.0f} %" if floor else _NONE,
                f"{row.batch / row.ahead:,.0f}",
            )
        )
    times = "ms a step", "median", "ahead", "device alone", "floor", "floor / step"
    title = "Whole steps; floor: the bytes of weights and K/V at the speed of a copy; tokens/s: if steps begin ahead"
    return _table(title, ("weights", "launches", "context", "batch", *times, "tokens/s"), rows)


def _matrices(results: Results) -> str:
    rows = []
    for row in results.rows_of(MatrixTime):
        rate = row.bytes / row.seconds
        share = _share_of_copy(results, rate)
        rows.append((row.weights, row.name, str(row.rows), f"{1e6 * row.seconds:,.1f}", f"{rate / 1e9:,.0f}", share))
    return _table("Products with weights", ("weights", "matrix", "rows", "µs", "GB/s", "of copy"), rows)


def _prefill(results: Results) -> str:
    rows = []
    for row in results.rows_of(PrefillTime):
        rate = row.matrix_flops / row.seconds
        share = f"{100 * rate / results.limits.gemm:.0f} %" if results.limits else _NONE
        attention = row.attention_flops / row.attention_seconds / 1e12
        rates = f"{row.tokens / row.seconds:,.0f}", share, f"{attention:,.0f}"
        rows.append((row.weights, f"{row.tokens:,}", f"{1e3 * row.seconds:,.1f}", *rates))
    header = ("weights", "tokens", "ms", "tokens/s", "of bf16 product", "attention TFLOP/s")
    return _table("Prefill of a prompt", header, rows)


def _prompt_peers(results: Results) -> str:
    rows = []
    for row in results.rows_of(PromptPeerTime):
        time = f"{1e3 * row.seconds:,.2f}" if row.seconds else row.note
        rate = f"{row.flops / row.seconds / 1e12:,.0f}" if row.seconds else _NONE
        rows.append((row.name, f"{row.tokens:,}", time, rate, row.note if row.seconds else _NONE))
    title = "Causal attention of a prompt by PyTorch in half precision; compare with attention TFLOP/s of prefill"
    return _table(title, ("kernel", "tokens", "ms a layer", "TFLOP/s", "note"), rows)


def _encoding(results: Results) -> str:
    rows = [(row.cache_type, str(row.blocks), f"{1e6 * row.seconds:,.1f}") for row in results.rows_of(EncodeTime)]
    return _table("Encoding, with metrics", ("cache", "blocks at once", "µs a block"), rows)

"""The part of docs/speed.md that measurements of GPUs in bench/results decide."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping

from polarlm.bench import report
from polarlm.bench.gpu.requests import LLAMA_CPP
from polarlm.bench.gpu.tables import (
    Measured,
    best_half,
    prompts_table,
    rates,
    rates_table,
    sequences_table,
    server_in_words,
)
from polarlm.engine import EngineConfig
from scripts.quality_tables import RESULTS

_BY_AGE_SINCE = "2026-11-27"  # the default type has had blocks of two kinds since
_PLACES = [(context, batch) for batch in (1, 16) for context in (2048, 32_768, 131_072)]


def gpu() -> str:
    """The same files beside llama.cpp, and attention beside PyTorch, each with its day."""
    everything = measurements()
    return "\n\n".join([*_models(everything), *_attention(everything)])


def measurements() -> list[Measured]:
    """All of GPUs, the newest first."""
    everything = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("gpu-nvidia-*.json"))]
    return sorted(everything, key=lambda one: one["date"], reverse=True)


def _models(everything: list[Measured]) -> Iterator[str]:
    """The newest measurement of each model beside llama.cpp, and a newer one without it."""
    shown = set()
    for one in everything:
        title, has_peer = f"### {one['model']}, on an {gpu_of(one)}", has_llama_cpp(one)
        if not rates(one) or {(title, True), (title, has_peer)} & shown:
            continue
        shown.add((title, has_peer))
        yield from (title, rates_table(one))
        if one.get("sequences"):
            yield "Prompts in ms, and on the device alone, if all is launched before it begins:"
            yield prompts_table(one)
            yield "Sequences that are asked at the same time, with 128 tokens in and 64 out each:"
            yield sequences_table(one)
            yield from map(server_in_words, one["server"])
        commands = ",\n".join(f"`{command}`" for command in one.get("commands", [one["command"]]))
        notes = "".join(f"; {one[name]}" for name in ("peer", "note") if name in one)
        yield f"Measured {_when(one)} with\n{commands}{notes}."


def has_llama_cpp(measured: Measured) -> bool:
    """Whether llama.cpp was measured, too."""
    return any(row["engine"] == LLAMA_CPP for row in measured.get("rates", ()))


def gpu_of(measured: Measured) -> str:
    return str(measured["machine"]["gpu"]["name"])


def _when(measured: Measured) -> str:
    return f"on {measured['date']}" + (f" at commit {measured['commit']}" if "commit" in measured else "")


def _attention(everything: list[Measured]) -> Iterator[str]:
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
    yield report.table([*header, *(f"× on an {gpu_of(one)}" for one in others)], lines)
    yield "\n".join(f"{gpu_of(one)} {_when(one)} with `{one['command']}`." for one in (first, *others))


def attention_of(everything: Iterable[Measured]) -> list[Measured]:
    """The newest measurement of each GPU that has attention in all places."""
    newest: dict[str, Measured] = {}
    for one in everything:
        measured = {(row["context"], row["batch"], row["cache_type"]) for row in one.get("attention", ())}
        if all((*place, name) in measured for place in _PLACES for name in ("f16", _default(one))):
            newest.setdefault(gpu_of(one), one)
    return [*newest.values()]


def _default(measured: Measured) -> str:
    """The name of the default type on that day."""
    return EngineConfig.cache_type if measured["date"] >= _BY_AGE_SINCE else "ring4/ring3.5"


def seconds_of(measured: Measured, context: int, batch: int) -> tuple[float, float, float]:
    """Seconds of the best of PyTorch's kernels, of ours over an fp16 cache, and of the default type."""
    rows = (row for row in measured["attention"] if (row["context"], row["batch"]) == (context, batch))
    ours, best = {row["cache_type"]: row["seconds"] for row in rows}, best_half(measured, context, batch, peers=True)
    return best or 0.0, ours["f16"], ours[_default(measured)]


PARTS: Mapping[str, Callable[[], str]] = {"gpu": gpu}
"""Name of a mark → what writes the text between it and its end."""

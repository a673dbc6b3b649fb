"""The part of docs/speed.md that measurements of GPUs in bench/results decide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from polarlm.bench.gpu.peer import attention_at
from polarlm.bench.gpu.plan import LLAMA_CPP
from polarlm.bench.gpu.tables import best_half, prompts_table, sequences_table, server_in_words
from polarlm.bench.report import Table
from polarlm.bench.result import Result, read
from polarlm.bench.speed.contestants import GENERATION, PROMPT, RATE
from polarlm.bench.speed.tables import rates, rates_table
from polarlm.engine import EngineConfig
from scripts.quality_tables import RESULTS

_BY_AGE_SINCE = "2026-11-27"  # the default type has had blocks of two kinds since
_PLACES = [(context, batch) for batch in (1, 16) for context in (2048, 32_768, 131_072)]


def gpu() -> str:
    """The same files beside llama.cpp, and attention beside PyTorch, each with its day."""
    everything = measurements()
    return "\n\n".join([*_models(everything), *_attention(everything)])


def measurements() -> list[Result]:
    """All of GPUs, the newest first."""
    everything = [read(path) for path in sorted(RESULTS.glob("gpu-nvidia-*.json"))]
    return sorted(everything, key=lambda one: one["date"], reverse=True)


def _models(everything: list[Result]) -> Iterator[str]:
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
        yield f"Measured {_when(one)} with\n{commands}{notes}."


def has_llama_cpp(measured: Result) -> bool:
    """Whether llama.cpp was measured, too."""
    return any(row.contestant.startswith(LLAMA_CPP) for row in measured.rows(RATE))


def gpu_of(measured: Result) -> str:
    return str(measured["machine"]["gpu"]["name"])


def _when(measured: Result) -> str:
    return f"on {measured['date']}" + (f" at commit {measured['commit']}" if "commit" in measured.about else "")


def _attention(everything: list[Result]) -> Iterator[str]:
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
    yield "\n".join(f"{gpu_of(one)} {_when(one)} with `{one['command']}`." for one in (first, *others))


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


PARTS: Mapping[str, Callable[[], str]] = {"gpu": gpu}
"""Name of a mark → what writes the text between it and its end."""

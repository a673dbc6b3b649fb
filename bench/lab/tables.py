"""`python -m polarlm.bench.lab.tables`: writes the tables of README.md, from bench/results.

Each has the newest measurement of its kind, so a new file in bench/results replaces its rows. A part lies between
marks, as in `scripts.docs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from polarlm.bench import result as results
from polarlm.bench.lab.gpu.plan import LLAMA_CPP
from polarlm.bench.quality.scores import CODED, SERVED, TEXT, contestant
from polarlm.bench.report import NOTHING, Table, rate_text
from polarlm.bench.result import Figures, Result, read, value_of
from polarlm.bench.speed.contestants import GENERATION, OURS, PROMPT, RATE, subject_of
from polarlm.bench.speed.tables import (
    cache,
    engine,
    is_ours,
    label,
    place,
    rates,
    strongest,
)
from polarlm.engine import EngineConfig, codecs
from polarlm.engine.state.cache_types import PRESETS
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from scripts import docs

DEFAULT, HALF = EngineConfig.cache_type, "f16"
_DEMO = "quality-smollm2-135m-instruct-????-??-??*"  # a second measurement of a day has a number at the end
_SAME = "model", "weights", "text", "windows", "window"  # equal in measurements of one table
_EXACT = "exact_perplexity"  # a field of results: the perplexity in full precision


def newest(name: str) -> Result:
    """The latest measurement whose file name matches the pattern `name`."""
    return read(max(results.RESULTS.glob(f"{name}.json")))


def _ratio(ours: float | None, other: float | None, what: str = "") -> str:
    """The ratio of two rates, bold if we are slower."""
    if not ours or not other:
        return NOTHING
    ratio = f"{ours / other:.2f}"
    return (f"**{ratio}**" if float(ratio) < 1 else ratio) + (f" ({what})" if what else "")


def _rate(rate: float | None) -> str:
    return NOTHING if rate is None else rate_text(rate)


# -- speed ---------------------------------------------------------------------------------------------------------

_MODELS = {  # results → the model's name
    "speed-smollm2-135m-instruct-q4-0-amd-epyc-*": "SmolLM2-135M",
    "speed-qwen2.5-coder-1.5b-q4-0-amd-epyc-*": "Qwen2.5-Coder-1.5B",
    "speed-qwen2.5-1.5b-random-q4-0-intel-*": "Qwen2.5-1.5B's shape",
}
_OF_GPU = (GENERATION, 2048), (GENERATION, 32_768), (PROMPT, 2048)


def speed_in_short() -> str:
    """Generation after the longest context and the longest prompt on CPUs, then an 8B model on a GPU; the default type
    beside the strongest peer and our own half precision."""
    lines = [line for name, model in _MODELS.items() for line in _cpu_rows(newest(name), model)]
    header = ["Machine, day", "Model", "", "tokens/s", "× strongest peer", "× our `f16`"]
    return Table(header, [*lines, *_gpu_rows()], left=3).markdown()


def _cpu_rows(measured: Result, model: str) -> Iterator[list[str]]:
    machine = re.sub(r"[(]R[)]| Processor", "", place(measured)).split(",")[0]
    first = [f"{machine}, {measured['date']}", f"{model}, {measured['weights']}"]
    for section in GENERATION, PROMPT:
        subject, rows = list(rates(measured, section).items())[-1]
        ours = {cache(who): row.value for who, row in rows.items() if is_ours(who)}
        peer = strongest(rows.values())
        beside = NOTHING if peer is None else _ratio(ours[DEFAULT], peer.value, label(engine(peer.contestant)))
        yield [*first, subject, _rate(ours[DEFAULT]), beside, _ratio(ours[DEFAULT], ours.get(HALF))]
        first = ["", ""]


def _gpu_rows() -> Iterator[list[str]]:
    everything = _gpu_results()
    one = next(one for one in everything if _is_8b(one) and rates(one, GENERATION, PROMPT))
    machine, model = _gpu_name(one), str(one["model"]).upper().replace("-", ", ", 1)
    peer = next(m for m in everything if _is_8b(m) and _gpu_name(m) == machine and has_llama_cpp(m))
    when = str(peer.about.get("peer_date", "" if peer is one else peer["date"]))  # llama.cpp's figures of another day
    first, name = [f"{machine}, {one['date']}", model], f"llama.cpp of {when}" if when else "llama.cpp"
    for kind, tokens in _OF_GPU:
        subject = subject_of(kind, tokens)
        rate, half = (one.value(subject, f"{OURS} {type}", RATE) for type in (DEFAULT, HALF))
        beside = _ratio(rate, peer.value(subject, f"{LLAMA_CPP} {HALF}", RATE), name)
        yield [*first, subject, _rate(rate), beside, _ratio(rate, half)]
        first = ["", ""]


def _is_8b(measured: Result) -> bool:
    return str(measured["model"]).lower().startswith("8b")


def _gpu_results() -> list[Result]:
    """All measurements of GPUs, the newest first."""
    everything = [read(path) for path in sorted(results.RESULTS.glob("gpu-nvidia-*.json"))]
    return sorted(everything, key=lambda one: one["date"], reverse=True)


def has_llama_cpp(measured: Result) -> bool:
    """Whether llama.cpp was measured, too."""
    return any(row.contestant.startswith(LLAMA_CPP) for row in measured.rows(RATE))


def _gpu_name(measured: Result) -> str:
    return str(measured["machine"]["gpu"]["name"])


# -- cache types ---------------------------------------------------------------------------------------------------

_HEAD, _LONG, _BLOCK, _MEAN_BITS = 64, 8192, EngineConfig.block_size, 8  # of the demonstration model
_QWEN = "models-qwen2.5-coder-1.5b-wikitext-8192-*"
_NAMES = {
    "compact": "`compact`",
    "balanced": "**`balanced`**, the default",
    "quality": "`quality`",
    "f16": "`f16`",
    "q4_0-rotated:plain": "`q4_0`, rotated (llama.cpp)",
    "fp8:plain": "FP8, E4M3 (vLLM)",
}


def costs_in_short() -> str:
    """Bits, perplexity and KL of our presets and of others' types, all in the same windows."""
    found, elsewhere = _newest_of_each(), newest(_QWEN)
    of_all = {name: rows for _, types in found for name, rows in types.items()}
    full, lines = found[0][0][_EXACT], list[Sequence[str]]()
    for name, words in _NAMES.items():
        as_served, coded = of_all[name][SERVED], of_all[name].get(CODED, {})
        bits = _of(as_served, "bits_per_value")
        change = f"{100 * (_of(as_served, 'perplexity') / full - 1):+.1f} %"
        cells = f"{bits:.2f}", f"{_long_bits(name, bits):.2f}", change, _kl(as_served), _kl(coded)
        lines.append([words, *cells, _kl(elsewhere.figures(TEXT, contestant(name, CODED)))])
    days = sorted([*(one["date"] for one, types in found if {*types} & {*_NAMES}), elsewhere["date"]])
    header = ["Type", "bits/value, 2,048 tokens", "8,192", "perplexity", "KL as served", "KL, all coded", "Qwen2.5"]
    return f"{Table(header, lines).markdown()}\n\nMeasured from {days[0]} to {days[-1]}."


def _kl(figures: Figures) -> str:
    return f"{_of(figures, 'kl_mean'):#.2g}" if figures else NOTHING


def _long_bits(name: str, bits: float) -> float:
    """Bits a value of a text of 8,192 tokens. bits: of a shorter one, which is the same for types without recent
    blocks."""
    if name not in PRESETS:
        return bits
    kinds = PRESETS[name]
    keys, values = codecs.get(kinds.keys), codecs.get(kinds.values)
    layer = LayerShape(keys, values, 1, _HEAD, _MEAN_BITS, recent_blocks=kinds.recent_blocks)
    return CacheShape(_BLOCK, (layer,)).bits_of_text(_LONG)


def _newest_of_each() -> list[tuple[Result, dict[str, dict[str, Figures]]]]:
    """The measurements with the windows of the newest, newest first, each with the types that no newer one has: type →
    way of scoring → its figures of the text."""
    latest, *older = map(read, sorted(results.RESULTS.glob(f"{_DEMO}.json"), reverse=True))
    measurements: list[tuple[Result, dict[str, dict[str, Figures]]]] = []
    shown: set[str] = set()
    for measured in [latest, *(one for one in older if all(one[key] == latest[key] for key in _SAME))]:
        rows: dict[str, dict[str, Figures]] = {}
        for who, one in measured["types"].items():
            if one["type"] not in shown:
                rows.setdefault(one["type"], {})[one["scored_as"]] = measured.figures(TEXT, who)
        measurements.append((measured, rows))
        shown |= {*rows}
    return measurements


def _of(figures: Figures, quantity: str) -> float:
    return value_of(figures, quantity) or 0.0


PARTS: Mapping[str, Callable[[], str]] = {
    "speed in short": speed_in_short,
    "costs in short": costs_in_short,
}
"""Name of a mark → what writes the text between it and its end."""


if __name__ == "__main__":
    docs.write(PARTS)

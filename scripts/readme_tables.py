"""The tables of README.md: speed on CPUs and GPUs, a server, and what cache types cost, from bench/results.

Each has the newest measurement of its kind, so a new file in bench/results and `make readme` replace its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from polarlm.bench.gpu.plan import LLAMA_CPP
from polarlm.bench.quality.scores import CODED, SERVED, TEXT, contestant
from polarlm.bench.report import NOTHING, rate_text
from polarlm.bench.result import Figures, Result
from polarlm.bench.serving.options import FIRST_TOKEN, XLLAMACPP
from polarlm.bench.serving.tables import LOAD
from polarlm.bench.speed.contestants import GENERATION, OURS, PROMPT, RATE, SEQUENCES, subject_of
from polarlm.bench.speed.tables import cache, engine, is_ours, label, place, strongest
from polarlm.bench.speed.tables import rates as speed_rates
from polarlm.engine import EngineConfig, codecs
from polarlm.engine.state.cache_types import PRESETS_BY_NAME
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.shapes import CacheShape
from scripts.result_tables import (
    DEMO,
    attention_of,
    gpu_of,
    has_llama_cpp,
    measurements,
    newest,
    newest_of_each,
    of,
    rates_of,
    seconds_of,
    server_results,
)

_NUMBERS = "tokens/s", "bits/value, 2,048 tokens", "8,192"  # columns to the right
DEFAULT, HALF = EngineConfig.cache_type, "f16"

# Part of a machine's name → the day since which its kernels are today's, and what has changed; figures from before are
# marked.
_REWRITTEN = {
    "Xeon": (
        "2026-11-27",
        "The Xeon's prompt predates matrices of bfloat16, [three times as fast](docs/speed.md#what-decides-it) with "
        "SmolLM2-135M",
    ),
    "NVIDIA": (
        "2026-11-29",
        "Attention to blocks of two kinds, dequantizing and scheduling have changed since 2026-11-28: the GPU has run "
        "their tests, and nothing has been timed. On 2026-11-26 `balanced` was `ring4/ring3.5`",
    ),
}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    line = ["---:" if name in _NUMBERS else "---" for name in header]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, line, *rows))


def _machine(name: str, date: str) -> str:
    """A machine's name, marked if the figures of that day are of an older version."""
    since = next((day for part, (day, _) in _REWRITTEN.items() if part in name), "")
    return f"{name}, older version ({date})" if date < since else name


def _sources(shown: Sequence[tuple[str, str]]) -> str:
    """The days of measurements, and what has changed since. shown: machine and day of each."""
    days = sorted({day for _, day in shown})
    changes = [why for part, (since, why) in _REWRITTEN.items() if any(part in m and day < since for m, day in shown)]
    measured = f"Measured {'on' if len(days) == 1 else f'from {days[0]} to'} {days[-1]}"
    return " ".join(f"{sentence}." for sentence in (measured, *changes))


def _ratio(ours: float | None, other: float | None, what: str = "") -> str:
    """The ratio of two rates, bold if we are slower."""
    if not ours or not other:
        return NOTHING
    ratio = f"{ours / other:.2f}"
    return (f"**{ratio}**" if float(ratio) < 1 else ratio) + (f" ({what})" if what else "")


def _rate(rate: float | None) -> str:
    return NOTHING if rate is None else rate_text(rate)


# -- CPUs ----------------------------------------------------------------------------------------------------------

_MODELS = {  # results → the model's name
    "speed-smollm2-135m-instruct-q4-0-amd-epyc-*": "SmolLM2-135M",
    "speed-qwen2.5-coder-1.5b-q4-0-amd-epyc-*": "Qwen2.5-Coder-1.5B",
    "speed-qwen2.5-1.5b-random-q4-0-intel-*": "Qwen2.5-1.5B's shape",
}
_SERVERS = {XLLAMACPP: "llama.cpp's server"}
_EIGHT = f"{DEFAULT}, 8-bit inputs"  # a column of measurements


def speed() -> str:
    """Prompts and generation of the default type beside the strongest peer, then a server beside llama.cpp's."""
    rows, shown = list[Sequence[str]](), list[tuple[str, str]]()
    for name, model in _MODELS.items():
        measured = newest(name)
        shown.append((_cores(measured), measured["date"]))
        first = [_machine(*shown[-1]), f"{model}, {measured['weights']}"]
        for cells in _rates(measured):
            rows.append([*first, *cells])
            first = ["", ""]
    for measured in server_results():
        shown.append((_cores(measured), measured["date"]))
        rows += _server_rows(measured, _machine(*shown[-1]))
    return f"{_table(['Machine', 'Model', '', 'tokens/s', '× strongest peer'], rows)}\n\n{_sources(shown)}"


def _cores(measured: Result) -> str:
    return re.sub(r"\(R\)| Processor", "", place(measured)).split(",")[0]


def _rates(result: Result) -> Iterator[list[str]]:
    for section in GENERATION, PROMPT:
        of_section = speed_rates(result, section).items()
        for subject, rows in sorted(of_section, key=lambda item: next(iter(item[1].values())).more["tokens"]):
            ours = {cache(who): row.value for who, row in rows.items() if is_ours(who)}
            peer = strongest(rows.values())
            name, rate = ("", None) if peer is None else (label(engine(peer.contestant)), peer.value)
            yield [subject, _rate(ours[DEFAULT]), _ratio(ours[DEFAULT], rate, name)]
            if section == PROMPT and ours.get(_EIGHT):
                yield [f"{subject}, inputs of 8 bits", _rate(ours[_EIGHT]), _ratio(ours[_EIGHT], rate, name)]


def _server_rows(measured: Result, machine: str) -> Iterator[list[str]]:
    """Tokens/s and the first token of our server, with ratios to the fastest of the others."""
    load = measured["load_options"]
    peer = max((row for _, who, row in rates_of(measured) if who != OURS), key=lambda row: row.value or 0).contestant
    (rate, own), (theirs, other) = (
        [measured.value(LOAD, who, name) for name in (RATE, FIRST_TOKEN)] for who in (OURS, peer)
    )
    tokens = load["shared_prefix"] + load["prompt_tokens"]
    what = f"server of {load['clients']} clients, {tokens} tokens in and {load['max_tokens']} out"
    name = next((words for engine, words in _SERVERS.items() if peer.startswith(engine)), peer.partition(" ")[0])
    yield [machine, measured["model"], what, _rate(rate), _ratio(rate, theirs, f"{name}: {_rate(theirs)}")]
    yield ["", "", f"first token after {own:.2f} s", "", _ratio(other, own, f"{name}: {other:.2f} s")]


# -- GPUs ----------------------------------------------------------------------------------------------------------

_KINDS = GENERATION, PROMPT
_DEPTHS, _PROMPTS, _SEQUENCES = (8, 2048, 32_768), (64, 512, 2048), 64
_ATTENTION = (2048, 1), (32_768, 16)  # context, sequences


def gpu() -> str:
    """An 8B model on the GPU that was measured last, beside llama.cpp and our own half precision, and attention."""
    everything = measurements()
    one = next(one for one in everything if _is_8b(one) and speed_rates(one, *_KINDS))
    machine, model = gpu_of(one), str(one["model"]).upper().replace("-", ", ", 1)
    shown, rows = [(machine, str(one["date"]))], list[Sequence[str]]()
    peer = next(m for m in everything if _is_8b(m) and gpu_of(m) == machine and has_llama_cpp(m))
    when = str(peer.about.get("peer_date", "" if peer is one else peer["date"]))  # llama.cpp's figures of another day
    for kind, tokens in [*((GENERATION, depth) for depth in _DEPTHS), *((PROMPT, n) for n in _PROMPTS)]:
        subject = subject_of(kind, tokens)
        rate, half = (one.value(subject, f"{OURS} {name}", RATE) for name in (DEFAULT, HALF))
        if rate:
            where = f" of {tokens:,}" if kind == PROMPT else ", depth ≤ 64" if tokens < 64 else f" at {tokens:,}"
            beside = _ratio(rate, peer.value(subject, f"{LLAMA_CPP} {HALF}", RATE))
            rows.append([kind + where, _rate(rate), beside, _ratio(rate, half)])
    for count, prompt, answer, rate in _together(one, OURS):
        there = next((other for same, *_, other in _together(peer, LLAMA_CPP) if same == count), None)
        what = f"{count} sequences, {prompt} tokens in and {answer} out"
        rows.append([what, _rate(rate), _ratio(rate, there), NOTHING])
    faster = [row[0] for row in rows if row[-1] not in (NOTHING, "") and "*" not in row[-1]]
    rows = [[*([_machine(*shown[0]), model] if n == 0 else ["", ""]), *row] for n, row in enumerate(rows)]

    attention = attention_of(everything)[0]
    shown.append((gpu_of(attention), str(attention["date"])))
    for n, (context, batch) in enumerate(_ATTENTION):
        best, half, coded = seconds_of(attention, context, batch)
        what = f"attention alone, {context:,} tokens × {batch}"
        first = [_machine(*shown[1]) if shown[1] != shown[0] else "", "a layer of an 8B model"] if n == 0 else ["", ""]
        rows.append([*first, what, "", _ratio(best, coded, "PyTorch, fp16"), _ratio(half, coded)])
    beside = f"× llama.cpp of {when}" if when else "× llama.cpp"
    table = _table(["GPU", "Model", "", "tokens/s", beside, "× our `f16`"], rows)
    where = f"The cache was as fast as our own `f16`, or faster: {', '.join(faster)}"
    return f"{table}\n\n{_sources(shown)} {where if faster else 'Our own `f16` was faster in every row of the model'}."


def _is_8b(measured: Result) -> bool:
    return str(measured["model"]).lower().startswith("8b")


def _together(measured: Result, engine: str) -> Iterator[tuple[int, int, int, float]]:
    """Number, tokens in and out, and tokens/s of answers of the most sequences at a time."""
    for _, who, times in measured.parts(f"{_SEQUENCES} {SEQUENCES}"):
        if who.startswith(engine) and (seconds := times["seconds"].value):
            more = times["seconds"].more
            yield _SEQUENCES, more["prompt"], more["answer"], _SEQUENCES * more["answer"] / seconds


# -- cache types ---------------------------------------------------------------------------------------------------

_HEAD, _LONG, _BLOCK, _MEAN_BITS = 64, 8192, EngineConfig.block_size, 8  # of the demonstration model
_QWEN = "models-qwen2.5-coder-1.5b-wikitext-8192-*"
_NAMES = {
    "compact": "`compact`",
    "balanced": "**`balanced`**, the default",
    "quality": "`quality`",
    "turbo4:plain": "TurboQuant, `turbo4`",
    "q4_0:plain": "`q4_0`",
    "q4_0-rotated:plain": "`q4_0`, rotated (llama.cpp)",
    "int4-token-head:plain": "int4, a scale for each token and head (vLLM)",
    "nvfp4:plain": "NVFP4 (SGLang, vLLM)",
    "kivi4:plain": "KIVI, `kivi4`",
    "kvarn-k4/kvarn-v4:plain": "KVarN, 4 bits",
    "fp8:plain": "FP8, E4M3, scale 1 (vLLM)",
    "fp8-token-head:plain": "FP8, E4M3, a scale for each token and head (vLLM)",
}


def costs() -> str:
    """Bits, perplexity and KL of our presets and of other projects' types, all in the same windows."""
    found, elsewhere = newest_of_each(f"quality-{DEMO}"), newest(_QWEN)
    of_all = {name: rows for _, types in found for name, rows in types.items()}
    full = found[0][0]["exact_perplexity"]
    qwen = {name: elsewhere.figures(TEXT, contestant(name, CODED)) for name in _NAMES}
    shown = [("", one["date"]) for one, types in found if {*types} & {*_NAMES}] + [("", elsewhere["date"])]
    lines = []
    for name, words in _NAMES.items():
        if name in of_all:
            as_served, coded = of_all[name][SERVED], of_all[name][CODED]
            bits = of(as_served, "bits_per_value")
            change = f"{100 * (of(as_served, 'perplexity') / full - 1):+.1f} %"
            cells = f"{bits:.2f}", f"{_long_bits(name, bits):.2f}", change, _kl(as_served), _kl(coded)
            lines.append((bits, [words, *cells, _kl(qwen[name]) if qwen[name] else NOTHING]))
    header = ["Type", "bits/value, 2,048 tokens", "8,192", "perplexity", "KL as served", "KL, all coded", "Qwen2.5"]
    return f"{_table(header, [line for _, line in sorted(lines, key=lambda line: line[0])])}\n\n{_sources(shown)}"


def _kl(figures: Figures) -> str:
    return f"{of(figures, 'kl_mean'):#.2g}"


def _long_bits(name: str, bits: float) -> float:
    """Bits a value of a text of 8,192 tokens. bits: of a shorter one, which is the same for types without ages."""
    if name not in PRESETS_BY_NAME:
        return bits
    kinds = PRESETS_BY_NAME[name]
    keys, values = map(codecs.get, kinds.low_precision)
    layer = LayerShape(keys, values, 1, _HEAD, _MEAN_BITS, high_precision=kinds.high_precision_kind)
    return CacheShape(_BLOCK, (layer,)).bits_of_text(_LONG)


PARTS: Mapping[str, Callable[[], str]] = {"speed in short": speed, "gpu in short": gpu, "costs in short": costs}
"""Name of a mark → what writes the text between it and its end."""

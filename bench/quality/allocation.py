"""`python -m polarlm.bench.quality.allocation`: a cache type for each layer's keys and values, under a budget of bits.

Half of each window is a prompt in full precision. The other half is computed once for each layer and side: what one
layer's keys, or its values, cost when they are read as codes of `ring3.5` is the divergence from full precision. Costs
of different layers add up, and bits that are equal for all leave those layers with most of the error whose codes cost
most. So, from the fewest bits on, the step to more bits that saves most for its bits is taken, as long as the budget
lasts. The square of an error, and with it its cost, falls by half with each half bit more.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named
from polarlm.bench.quality.coded_prompt import CodedPrompt, whole_store
from polarlm.bench.quality.divergence import compare
from polarlm.bench.quality.scores import small, windows
from polarlm.bench.report import Output
from polarlm.engine import codecs
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.cli.commands import note, run
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.codecs.ring import NAMES
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.loading.assembly import assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.state.store import KVStore

_MEASURED = "ring3.5"


@dataclass(frozen=True)
class Options:
    """The flags: the text, the model and the budget."""

    text: str | None = setting(None, "--text", metavar="FILE", help="UTF-8 text; this flag is needed")
    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=HF_REPO_HELP)
    bits: float = setting(3.5, "--bits", metavar="X", help="bits per value, at most")
    windows: int = setting(5, "--windows", metavar="N", help="windows of the text, from its start")
    window: int = setting(512, "--window", metavar="N", help="tokens of a window")


def costs(coded: Transformer, store: KVStore, cut: Sequence[Sequence[int]]) -> np.ndarray:
    """KL, in nats, from full precision when one side of one layer is read as codes: (windows, L, 2); keys come first.

    coded: a model that stores every layer with codes. store: from `whole_store`. cut: windows of equal lengths.
    """
    layers, block = len(coded.config.layers), coded.store.shape.block_size
    half = len(cut[0]) // 2 // block * block
    found, none, every = np.empty((len(cut), layers, 2)), slice(0, 0), slice(block, half)
    with tqdm(total=found.size, desc="Computing", unit="part", disable=None) as bar:
        for window, ids in enumerate(cut):
            prompt = CodedPrompt(coded, store)
            prompt.grow(ids[:half])
            exact = prompt.logits(ids[half:], none, none)
            for layer, side in np.ndindex(layers, 2):
                read = (every, none) if side == 0 else (none, every)
                logits = prompt.logits(ids[half:], *read, layers=slice(layer, layer + 1))
                found[window, layer, side] = compare(exact, logits).kl.mean()
                bar.update()
            prompt.release()
    return found


def allocate(cost: np.ndarray, steps: Sequence[float], budget: float) -> np.ndarray:
    """An index into `steps`, ascending bits, for each entry of `cost`, whose bits are at most `budget` on average.

    cost: of each entry, any shape, with the same number of bits.
    """
    chosen = np.zeros(cost.shape, int)
    left = (budget - steps[0]) * cost.size
    remaining = [4.0**-bits for bits in steps]
    while True:
        best: tuple[float, tuple[int, ...]] | None = None
        for at in np.ndindex(cost.shape):
            step = chosen[at]
            if step + 1 < len(steps) and (more := steps[step + 1] - steps[step]) <= left + 1e-9:
                saved = float(cost[at]) * (remaining[step] - remaining[step + 1]) / more
                if best is None or saved > best[0]:
                    best = saved, at
        if best is None:
            return chosen
        step = chosen[best[1]]
        left -= steps[step + 1] - steps[step]
        chosen[best[1]] += 1


def by_layer(names: Sequence[str]) -> str:
    """The setting that gives each layer its type: the commonest, then those of other layers.

    >>> by_layer(["ring3", "ring4", "ring4", "ring3", "ring5", "ring3"])
    'ring3,ring4@1-2,ring5@4'
    """
    common = max(sorted(set(names)), key=list(names).count)
    parts, first = [common], 0
    for name, run_of in itertools.groupby(names):
        last = first + len(list(run_of)) - 1
        if name != common:
            parts.append(f"{name}@{first}" + (f"-{last}" if last > first else ""))
        first = last + 1
    return ",".join(parts)


def steps_of(block_size: int, head_dim: int) -> tuple[list[float], float]:
    """Bits per value of each of `NAMES`, and bits per value of keys for the means of their blocks."""
    mean = sum(np.prod(shape, dtype=int) * dtype.itemsize for shape, dtype in mean_fields(8, head_dim).values())
    steps = [codecs.bits_per_value(codecs.get(name), block_size, head_dim) for name in NAMES]
    return steps, 8 * float(mean) / (block_size * head_dim)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes JSON, prints the table and the types; returns the exit code."""
    return run(_measure_and_report, argv)


def _measure_and_report(argv: Sequence[str]) -> None:
    options, destination = parse(
        argv,
        {"Allocation": Options, "Output": Output},
        prog="python -m polarlm.bench.quality.allocation",
        description="A cache type for the keys and the values of each layer, from what their errors cost.",
        checks={"windows": at_least(1), "window": at_least(4 * EngineConfig().block_size)},
    )
    if options.text is None:
        raise FlagError("--text is missing: give a UTF-8 text file, such as one that the model will read")
    try:
        text = Path(options.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"--text {options.text} cannot be read as UTF-8 text: {error}") from None
    ops = NumpyOps()
    settings = {"ctx_size": options.window, "kept_sequences": 0, "parallel": 1, "cache_type": _MEASURED}
    parts = assemble(settle(model_named(options.weights, options.hf_repo), None, settings), note, ops=ops)
    try:
        coded, source = parts.model, parts.source
        if len(coded.config.kv_attentions) < len(coded.config.layers) or any(
            window is not None for window, _ in coded.store.shape.groups
        ):
            raise FlagError(f"{source.name} has layers without keys and values, or with a sliding window")
        steps, mean = steps_of(coded.store.shape.block_size, source.config.attention.head_dim)
        if options.bits < steps[0] + mean / 2:
            raise FlagError(f"--bits {options.bits:g} is less than {steps[0] + mean / 2:.3f}, the bits of {NAMES[0]}")
        output = destination.path("allocation", source.name)
        cut = windows(source.tokenizer.tokenize(text), options.window, source.tokenizer.bos_id)[: options.windows]
        if len(cut) < options.windows or len(cut[-1]) < options.window:
            raise FlagError(f"--text {options.text} is too short for {options.windows} windows of {options.window}")
        found = costs(coded, whole_store(coded, settings), cut)
    finally:
        parts.close()
    cost = found.mean(axis=0)
    chosen = allocate(cost, steps, options.bits - mean / 2)
    types = [[NAMES[step] for step in side] for side in chosen.T]
    about = {
        "model": source.name,
        "text": Path(options.text).name,
        "window": options.window,
        "windows": len(cut),
        "bits_per_value": float(np.mean([steps[step] for step in chosen.flat]) + mean / 2),
        "cache_type_k": by_layer(types[0]),
        "cache_type_v": by_layer(types[1]),
    }
    report.write(output, "quality.allocation", argv, {**about, "costs": found.tolist()})
    note(f"Written to {output}")
    print(_table(cost, found, types, about))


def _table(cost: np.ndarray, found: np.ndarray, types: Sequence[Sequence[str]], about: dict[str, Any]) -> str:
    errors = found.std(axis=0, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.zeros_like(cost)
    rows = [
        [str(layer), *(f"{small(cost[layer, side])} ± {small(errors[layer, side])}" for side in (0, 1)), *names]
        for layer, names in enumerate(zip(*types, strict=True))
    ]
    header = ["layer", f"KL, keys of {_MEASURED}", f"KL, values of {_MEASURED}", "keys", "values"]
    return (
        f"{about['model']} on {about['text']}, {about['windows']} windows of {about['window']} tokens, half of each a "
        f"prompt. KL in nats, of one side of one layer.\n\n{report.table(header, rows)}\n\n"
        f"{about['bits_per_value']:.3f} bits per value: --cache-type-k {about['cache_type_k']} "
        f"--cache-type-v {about['cache_type_v']}"
    )


if __name__ == "__main__":
    sys.exit(main())

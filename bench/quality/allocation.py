"""`python -m polarlm.bench.quality.allocation`: a cache type for each layer's keys and values, under a budget of bits.

As auto:BITS finds them, with windows of a text in the place of the calibration text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from polarlm.bench import report
from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named
from polarlm.bench.quality.scores import windows
from polarlm.bench.report import Output
from polarlm.engine import codecs
from polarlm.engine.cli.commands import command, note
from polarlm.engine.cli.flags import FlagError, parse
from polarlm.engine.config import EngineConfig, setting
from polarlm.engine.loading import calibration
from polarlm.engine.loading.assembly import Parts, assemble
from polarlm.engine.loading.auto import allocation
from polarlm.engine.loading.auto.sensitivity import measure
from polarlm.engine.loading.checks import settle
from polarlm.engine.loading.encoding import WHOLE
from polarlm.engine.loading.sizes import cache_shape
from polarlm.engine.state.shapes import CacheShape


@dataclass(frozen=True)
class Options:
    """The flags: the text, the model and the budget."""

    text: str | None = setting(None, "--text", metavar="FILE", help="UTF-8 text; this flag is needed")
    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=HF_REPO_HELP)
    bits: float = setting(3.5, "--bits", metavar="X", help="bits per value, at most")
    windows: int = setting(5, "--windows", metavar="N", help="windows of the text, from its start")
    window: int = setting(512, "--window", metavar="N", help="tokens of a window")


def costs(parts: Parts, cut: Sequence[Sequence[int]], progress: Callable[[], Any]) -> np.ndarray:
    """What errors of each layer cost on each window, of equal lengths: (windows, L, 2), keys first, as
    `sensitivity.measure` returns it."""
    model, size = parts.model, parts.config.block_size
    ids = calibration.text_ids(parts.source.tokenizer, calibration.TOKENS)
    statistics = calibration.load_or_calibrate(model.ops, model.config, model.weights, ids, size, note)
    found = []
    for window in cut:
        of_layers = measure(model.ops, model.config, model.weights, window, size, statistics)
        found.append(list(of_layers.values()))
        progress()
    return np.array(found)


@command
def main(argv: Sequence[str]) -> None:
    """Measures, writes JSON, prints the table and the types."""
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
    settings = {"ctx_size": options.window, "kept_sequences": 0, "parallel": 1, "cache_type": codecs.FULL}
    parts = assemble(settle(model_named(options.weights, options.hf_repo), None, settings), note)
    try:
        source, size = parts.source, parts.config.block_size
        layers, count = source.config.kv_attentions, len(source.config.layers)
        allocation.types(options.bits, layers, count, size, None)  # the bits are possible
        output = destination.path("allocation", source.name)
        window = options.window // size * size
        cut = windows(source.tokenizer.tokenize(text), window, source.tokenizer.bos_id)[: options.windows]
        if len(cut) < options.windows or len(cut[-1]) < window:
            raise FlagError(f"--text {options.text} is too short for {options.windows} windows of {window}")
        with tqdm(total=len(cut), desc="Computing", unit="window", disable=None) as bar:
            found = costs(parts, cut, bar.update)
    finally:
        parts.close()
    mean = dict(zip(layers, found.mean(axis=0).tolist(), strict=True))
    types = allocation.types(options.bits, layers, count, size, mean).split("/")
    config = EngineConfig(cache_type_k=types[0], cache_type_v=types[1])
    shape = cache_shape(config, WHOLE, parts.model.ops, source.config)
    about = {
        "model": source.name,
        "text": Path(options.text).name,
        "window": window,
        "windows": len(cut),
        "bits_per_value": shape.bits_per_value,
        "cache_type_k": types[0],
        "cache_type_v": types[1],
    }
    report.write(output, "quality.allocation", argv, {**about, "costs": found.tolist()})
    note(f"Written to {output}")
    print(_table(shape, found, about))


def _table(shape: CacheShape, found: np.ndarray, about: dict[str, Any]) -> str:
    shares = found / found.sum(axis=(1, 2), keepdims=True)
    mean = shares.mean(axis=0)
    errors = shares.std(axis=0, ddof=1) / len(found) ** 0.5 if len(found) > 1 else np.zeros_like(mean)
    rows = [
        [
            str(layer),
            *(f"{100 * mean[place, side]:.1f} ± {100 * errors[place, side]:.1f} %" for side in (0, 1)),
            one.codec_k.name,
            one.codec_v.name,
        ]
        for place, (layer, one) in enumerate(shape.kv_layers.items())
    ]
    header = ["layer", "cost of keys", "cost of values", "keys", "values"]
    return (
        f"{about['model']} on {about['text']}, {about['windows']} windows of {about['window']} tokens. Cost: a side's "
        f"share of the KL, at equal bits.\n\n{report.table(header, rows)}\n\n"
        f"{about['bits_per_value']:.3f} bits per value: --cache-type-k {about['cache_type_k']} "
        f"--cache-type-v {about['cache_type_v']}"
    )


if __name__ == "__main__":
    sys.exit(main())

"""`python -m polarlm.bench.quality.layer_types`: types for the keys and values of each layer, within a budget of bits.

The sensitivity of a layer's keys, or of its values, is the KL from full precision when they alone are read as codes of
the first type, in all complete blocks but the first one. Small costs of several sides add up, and that of a side is in
proportion to the squared error of its type, which is taken from Gaussian vectors. So the next bits go where each saves
most, until none are left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from polarlm.bench.command import HF_REPO_HELP, WEIGHTS_HELP, at_least, model_named
from polarlm.bench.quality.inputs import read_text
from polarlm.bench.quality.scores import windows
from polarlm.bench.quality.states import divergence
from polarlm.engine import codecs
from polarlm.engine.backends.numpy.ops import NumpyOps
from polarlm.engine.cli.commands import note, run
from polarlm.engine.cli.flags import FlagError, parse, that
from polarlm.engine.config import setting
from polarlm.engine.loading.assembly import Parts, assemble
from polarlm.engine.loading.checks import settle
from polarlm.engine.model.forward import Transformer
from polarlm.engine.quantization.encode import decode_centred, encode_centred
from polarlm.engine.state.shapes import LayerShape
from polarlm.engine.state.store import KVStore, Span

_VECTORS = 4096  # Gaussian vectors that the error of a type is measured on
Sides = dict[tuple[int, str], float]  # (number of the layer, "k" or "v") → KL, nats


@dataclass(frozen=True)
class Options:
    """The flags: the text, the model, the types and the bits."""

    text: str | None = setting(None, "--text", metavar="FILE", help="UTF-8 text; this flag is needed")
    weights: str | None = setting(None, "--weights", "-m", metavar="PATH", help=WEIGHTS_HELP)
    hf_repo: str | None = setting(None, "-hf", "--hf-repo", metavar="USER/REPO[:QUANT]", help=HF_REPO_HELP)
    types: str = setting(
        "ring3,ring3.5,ring4,ring5", "--types", metavar="TYPES", help="to choose from, fewest bits first"
    )
    bits: float = setting(3.44, "--bits", metavar="N", help="bits/value of the whole cache at most")
    first_window: int = setting(
        8, "--first-window", metavar="N", help="windows of the text to leave out, from its start"
    )
    windows: int = setting(1, "--windows", metavar="N", help="windows to measure on")
    window: int = setting(512, "--window", metavar="N", help="tokens of a window")


class _OneSide(KVStore):
    """A store whose prompts read one side of one layer as codes, and all else in full precision."""

    side: tuple[int, str] | None = None  # of the next prompts; None: nothing is coded

    def __init__(self, coded: KVStore) -> None:
        """coded: the store of an engine with the type."""
        super().__init__(coded.ops, coded.plan, coded.conditioning)
        self._formats = {layer: coded.cache(layer).format for layer in coded.shape.kv_layers}

    def seal(self, layer: int, span: Span) -> None:
        """Nothing is kept of a prompt."""

    def round_trip(self, layer: int, span: Span) -> None:
        if self.side is None or self.side[0] != layer:
            return
        _, _, growth = self._of(layer, span)
        format, side = self._formats[layer], self.side[1]
        codec, metric, mean_bits, x = (
            (format.codec_k, format.metric_k, format.mean_bits, growth.buffer[0])
            if side == "k"
            else (format.codec_v, format.metric_v, 0, growth.buffer[1])
        )
        n, end = format.block_size, span.count // format.block_size * format.block_size
        blocks = x[:, n:end].reshape(len(x), -1, n, x.shape[2])
        fields = encode_centred(codec, blocks, metric, mean_bits)
        x[:, n:end] = decode_centred(codec, *fields).reshape(len(x), -1, x.shape[2])


def sensitivities(parts: Parts, cut: Sequence[Sequence[int]]) -> Sides:
    """The sensitivities of all layers with K/V, means over the windows `cut`. parts: those of the first type."""
    store = _OneSide(parts.model.store)
    model = Transformer(parts.model.ops, parts.source.config, parts.model.weights, store)
    sides = [(layer, side) for layer in store.shape.kv_layers for side in "kv"]
    found = dict.fromkeys(sides, 0.0)
    with tqdm(total=len(cut) * len(sides), desc="Measuring", unit="side", disable=None) as bar:
        for ids in cut:
            store.side = None
            exact = _states(model, ids)
            for store.side in sides:
                found[store.side] += float(divergence(model, exact, _states(model, ids)).kl.mean()) / len(cut)
                bar.update()
    return found


def _states(model: Transformer, ids: Sequence[int]) -> np.ndarray:
    """Hidden states (T, E) of ids (T,), a prompt of one unit, whose layers are read as `_OneSide` leaves them."""
    store, sequence = model.store, model.store.new_sequence()
    span = store.open(sequence, len(ids))
    span.round_trip = True
    try:
        return np.array(model.ops.to_host(model.forward([span], ids)))
    finally:
        store.abort(span)
        store.release(sequence)


def errors(types: Sequence[str], head_dim: int, block_size: int) -> list[float]:
    """The mean squared errors of the types on Gaussian vectors, over that of the first one."""
    x = np.random.default_rng(0).standard_normal((1, _VECTORS // block_size, block_size, head_dim), np.float32)
    each = [float(np.square(codec.decode(codec.encode(x)) - x).mean()) for codec in map(codecs.get, types)]
    return [error / each[0] for error in each]


def bits_of(types: Sequence[str], shape: LayerShape, block_size: int) -> list[float]:
    """Bits/value of the types, without the means of keys."""
    own = (LayerShape(codec, codec, shape.kv_heads, shape.head_dim) for codec in map(codecs.get, types))
    return [8 * one.quantized_bytes(block_size) / (block_size * one.values) for one in own]


def chosen(sides: Sides, errors: Sequence[float], bits: Sequence[float], budget: float) -> dict[tuple[int, str], int]:
    """The index of each side's type. errors, bits: of the types, fewest bits first; budget: mean bits at most.

    All sides have equally many values. Raises FlagError if the budget is below the first type's bits.
    """
    if budget < bits[0]:
        raise FlagError(f"--bits: the first type takes {bits[0]:.3f} bits/value for codes, and {budget:.3f} are left")
    found, left = dict.fromkeys(sides, 0), (budget - bits[0]) * len(sides) + 1e-9
    while True:
        steps = [
            (cost * (errors[found[side]] - errors[new]) / (bits[new] - bits[found[side]]), side, new)
            for side, cost in sides.items()
            for new in range(found[side] + 1, len(bits))
            if bits[new] - bits[found[side]] <= left
        ]
        if not steps:
            return found
        _, side, new = max(steps)
        left -= bits[new] - bits[found[side]]
        found[side] = new


def cache_type(names: Sequence[str], types: dict[tuple[int, str], int]) -> str:
    """The setting `cache_type` for these indices of `names`: KEYS/VALUES, with types for some layers."""
    return "/".join(
        _one_side(names, {layer: index for (layer, at), index in types.items() if at == side}) for side in "kv"
    )


def _one_side(names: Sequence[str], types: dict[int, int]) -> str:
    most = max(set(types.values()), key=list(types.values()).count)
    runs: list[list[int]] = []  # first layer, last layer, type
    for layer, index in types.items():
        if runs and runs[-1][1:] == [layer - 1, index]:
            runs[-1][1] = layer
        elif index != most:
            runs.append([layer, layer, index])
    parts = [f"{names[index]}@{first}" + (f"-{last}" if last > first else "") for first, last, index in runs]
    return ",".join([names[most], *parts])


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints the cache type; returns the exit code."""
    return run(_measure_and_print, argv)


def _measure_and_print(argv: Sequence[str]) -> None:
    (options,) = parse(
        argv,
        {"Layers": Options},
        prog="python -m polarlm.bench.quality.layer_types",
        description="A cache type for each layer's keys and values, within a budget of bits.",
        checks={
            "windows": at_least(1),
            "first_window": at_least(0),
            "window": at_least(192),
            "bits": that(lambda bits: 0 < bits <= 16, "must be above 0 and at most 16"),
        },
    )
    if options.text is None:
        raise FlagError("--text is missing: give a UTF-8 text file, such as the test part of WikiText-2")
    text, types = read_text(options.text), [name.strip() for name in options.types.split(",")]
    settings = {"ctx_size": options.window, "kept_sequences": 0, "parallel": 1, "cache_type": types[0]}
    parts = assemble(settle(model_named(options.weights, options.hf_repo), None, settings), note, ops=NumpyOps())
    try:
        shape, layers = parts.plan.shape, list(parts.plan.shape.kv_layers.values())
        if len({(one.kv_heads, one.head_dim) for one in layers}) > 1:
            raise FlagError(f"{parts.source.name} has layers of several shapes, which this command does not weigh")
        ids = parts.source.tokenizer.tokenize(text)
        cut = windows(ids, options.window, parts.source.tokenizer.bos_id)[options.first_window :][: options.windows]
        if not cut or len(cut[-1]) < options.window:
            raise FlagError(f"--text {Path(options.text).name} is too short for these windows")
        try:
            bits = bits_of(types, layers[0], shape.block_size)
            factors = errors(types, layers[0].head_dim, shape.block_size)
        except ValueError as error:
            raise FlagError(f"--types: {error}") from None
        found = sensitivities(parts, cut)
    finally:
        parts.close()
    for side, title in (("k", "keys"), ("v", "values")):
        print(f"KL of {title} by layer: " + " ".join(f"{kl:.1e}" for (_, at), kl in found.items() if at == side))
    types_of = chosen(found, factors, bits, options.bits - (shape.bits_per_value - bits[0]))
    print(f"--cache-type {cache_type(types, types_of)}")


if __name__ == "__main__":
    sys.exit(main())

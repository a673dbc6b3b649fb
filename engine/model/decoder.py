"""The loop over the layers of a decoder, and the inputs of their rows: those of a step, of prompts that are computed
together, of a long prompt.

Letters: T rows, E hidden size, L layers, P size of a layer's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from polarlm.engine.backends.kv import Spans
from polarlm.engine.backends.ops import Array, Ops, Result, Routing, SamplerInputs
from polarlm.engine.model.layers import Eps, LayerInputs
from polarlm.engine.model.layers.experts import Experts
from polarlm.engine.model.layers.gated_mlp import GatedMLP
from polarlm.engine.model.layers.kinds import FFNS, MIXERS, LayerWeights, Mixer
from polarlm.engine.model.layers.layer_embedding import LayerEmbedding
from polarlm.engine.model.rope import RopeTables
from polarlm.engine.state.store import KVStore
from polarlm.model_loaders import config


class MtpInputs(NamedTuple):
    """What the layer of `ModelConfig.mtp` reads of a step's rows, float32.

    both (T, 2E): embeddings, and room for the hidden states before them. before (T, E): these states, of the first row
    of each sequence; zeros in other rows. follows (T, 1): 0 for the first row of a sequence, 1 for others.
    """

    both: Array
    before: Array
    follows: Array


class Inputs(NamedTuple):
    """The inputs of rows: on the host, or on the device that computes them.

    x: ids (T,) int32, or the hidden states (T, E) of an earlier device. ropes: see `RopeTables.tables`. spans: one for
    each group of layers. added: what `TokenInputs` adds in each layer (T, L·P). sampler: with it, tokens are sampled.
    ids (T,) int32: those of the rows, for sampling, if x has other values.
    """

    x: Array
    ropes: tuple[tuple[Array, ...], ...] = ()
    spans: tuple[Spans, ...] = ()
    adapters: Routing | None = None
    added: Array | None = None
    sampler: SamplerInputs | None = None
    ids: Array | None = None
    mtp: MtpInputs | None = None


class InputChoice:
    """Chooses the inputs of a layer: layers share tables of RoPE, and spans."""

    def __init__(self, ropes: RopeTables, store: KVStore, layers: int) -> None:
        self.ropes, self.store = ropes, store
        shared = [(ropes.kind.get(layer), store.group_of(layer)) for layer in range(layers)]
        self._distinct = [*dict.fromkeys(shared)]
        self.index = [self._distinct.index(one) for one in shared]
        """For each layer, which of `distinct` has its inputs."""

    def distinct(self, inputs: Inputs) -> tuple[LayerInputs, ...]:
        """Return the inputs of layers that have different ones."""
        adapters, added = inputs.adapters, inputs.added
        ropes = [None if kind is None else inputs.ropes[kind] for kind, _ in self._distinct]
        spans = [inputs.spans[group] for _, group in self._distinct]
        return tuple([LayerInputs(*of_layer, adapters, added) for of_layer in zip(ropes, spans, strict=True)])

    def __call__(self, layer: int, inputs: Inputs) -> LayerInputs:
        return self.distinct(inputs)[self.index[layer]]


_TUPLES = (tuple, Inputs, Routing, MtpInputs)


def flatten(inputs: Any, arrays: list[Any]) -> Hashable:
    """Append the arrays of nested tuples to `arrays`, and return the tuples with True instead of each."""
    form = list[Any]()
    for one in inputs:
        if one is None:
            form += (None,)
        elif type(one) in _TUPLES:
            form += (flatten(one, arrays),)
        else:
            form += (True,)
            arrays += (one,)
    kind = type(inputs)
    return tuple(form) if kind is tuple else kind(*form)


def _filled(form: Any, arrays: Iterator[Any]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(form, tuple):
        inputs = [_filled(one, arrays) for one in form]
        return tuple(inputs) if type(form) is tuple else type(form)(*inputs)
    return None if form is None else next(arrays)


@dataclass(frozen=True)
class Work:
    """What a device computes of flattened inputs. Equal ones are one recording."""

    function: Callable[[Inputs], Any]
    form: Hashable  # see `flatten`

    def __call__(self, *arrays: Any) -> Any:
        return self.function(_filled(self.form, iter(arrays)))


def run_graph(ops: Ops, key: str, function: Callable[[Inputs], Result], inputs: Inputs) -> Result:
    """function(inputs), by `Ops.run_graph`."""
    arrays = list[Any]()
    result: Result = ops.run_graph(key, Work(function, flatten(inputs, arrays)), arrays)
    return result


def decoder_layer(
    ops: Ops, layer: config.Layer, eps: Eps, weights: LayerWeights, cache: Any, transform: Any, number: int
) -> DecoderLayer:
    """Return the objects that compute `layer`, of this number. cache, transform: as a `Mixer` takes them."""
    embedding = None
    if weights.embedding is not None:
        assert layer.ffn is not None
        embedding = LayerEmbedding(ops, layer.ffn.activation, number, eps, weights.embedding)
    return DecoderLayer(
        ops,
        MIXERS[type(layer.mixer)](ops, layer.mixer, eps, weights.mixer, cache, transform),
        None if layer.ffn is None else FFNS[type(layer.ffn)](ops, layer.ffn, eps, weights.ffn),
        weights.scale,
        embedding,
    )


class Chunk(NamedTuple):
    """Rows that a layer computes together.

    rows: which of x. inputs: see `InputChoice.distinct`. skipped: so many of the first ones only append their state in
    the last layer, since nothing reads their output. last: the spans of the last layer's group without these.
    """

    rows: slice
    inputs: Sequence[LayerInputs]
    skipped: int = 0
    last: Spans = None


class Rows:
    """Rows that layers compute, cut into chunks: those of a step, which are one."""

    def __init__(self, choice: InputChoice, chunks: list[Chunk], last: int | None = None) -> None:
        """last: the number of the model's last layer, if chunks have skipped rows."""
        self.choice, self.chunks, self.last = choice, chunks, last

    def begin(self, layer: int, x: Array) -> None:
        """A layer begins, for rows x (T, E)."""

    def project(self, number: int, layer: DecoderLayer, x: Array, chunk: Chunk, inputs: LayerInputs) -> Any:
        """Call `Mixer.project` of a layer for the rows of a chunk of x (T, E), and return its result."""
        return layer.mixer.project(x[chunk.rows], inputs)


class DecoderLayer(NamedTuple):
    """The objects that compute a decoder layer."""

    ops: Ops
    mixer: Mixer
    ffn: GatedMLP | Experts | None
    scale: Array | None = None  # (1,)
    embedding: LayerEmbedding | None = None

    def complete(self, x: Array, projected: Any, inputs: LayerInputs) -> None:
        """Compute all that follows `Mixer.project`, for rows x (T, E), in place."""
        self.mixer.mix(x, projected, inputs)
        if self.ffn is not None:
            self.ffn.add(x, inputs)
        if self.embedding is not None:
            self.embedding.add(x, inputs)
        if self.scale is not None:
            self.ops.scale(x, self.scale)


def compute(layers: Iterable[tuple[int, DecoderLayer]], x: Array, rows: Rows) -> Generator[tuple[int, Chunk]]:
    """Compute numbered layers for rows x (T, E), in place, chunk by chunk. Yields after each chunk of a layer; the
    chunks may be replaced then, in the list."""
    for number, layer in layers:
        rows.begin(number, x)
        for chunk in rows.chunks:
            _compute_chunk(number, layer, x, rows, chunk)
            yield number, chunk


def _compute_chunk(number: int, layer: DecoderLayer, x: Array, rows: Rows, chunk: Chunk) -> None:
    inputs, kept = chunk.inputs[rows.choice.index[number]], chunk.rows
    projected = rows.project(number, layer, x, chunk, inputs)
    if number == rows.last and chunk.skipped:
        if chunk.skipped == len(projected):
            return
        kept, projected = slice(kept.start + chunk.skipped, kept.stop), projected[chunk.skipped :]
        inputs = inputs.after(chunk.skipped)._replace(spans=chunk.last)
    layer.complete(x[kept], projected, inputs)

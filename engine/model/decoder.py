"""The loop over the layers of a decoder, and its rows with their inputs: of a step, or of prompts, in chunks.

Letters: T rows, E hidden size, H query heads, K KV heads, D head dim, L layers, P size of a layer's embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.kv import Spans
from polarlm.engine.backends.ops import Array, Ops, Result, Routing, SamplerInputs
from polarlm.engine.model.adapters import row_adapters
from polarlm.engine.model.batch import PromptBatch
from polarlm.engine.model.layers import Eps, LayerInputs, Tap
from polarlm.engine.model.layers.experts import Experts
from polarlm.engine.model.layers.gated_mlp import GatedMLP
from polarlm.engine.model.layers.kinds import FFNS, MIXERS, LayerWeights, Mixer
from polarlm.engine.model.layers.layer_embedding import LayerEmbedding
from polarlm.engine.model.rope import RopeTables
from polarlm.engine.model.vision_encoders import ImagePart
from polarlm.engine.state.positions import rope_positions, whole_images
from polarlm.engine.state.store import KVStore
from polarlm.model_loaders import config

PromptTap = Callable[[int, int, Array, Array], None]
"""tap(layer, position, queries, keys): a `Tap` for rows of a layer, the first row at `position`."""


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


def _fill(form: Any, arrays: Iterator[Any]) -> Any:
    """The inverse of `flatten`."""
    if isinstance(form, tuple):
        inputs = [_fill(one, arrays) for one in form]
        return tuple(inputs) if type(form) is tuple else type(form)(*inputs)
    return None if form is None else next(arrays)


@dataclass(frozen=True)
class Work:
    """What a device computes of flattened inputs. Equal ones are one recording."""

    function: Callable[[Inputs], Any]
    form: Hashable  # see `flatten`

    def __call__(self, *arrays: Any) -> Any:
        return self.function(_fill(self.form, iter(arrays)))


def run_graph(ops: Ops, key: str, function: Callable[[Inputs], Result], inputs: Inputs) -> Result:
    """function(inputs), by `Ops.run_graph`."""
    arrays = list[Any]()
    result: Result = ops.run_graph(key, Work(function, flatten(inputs, arrays)), arrays)
    return result


def decoder_layer(
    ops: Ops, model: config.ModelConfig, eps: Eps, weights: LayerWeights, cache: Any, transform: Any, number: int
) -> DecoderLayer:
    """Return the objects that compute the layer of this number. cache, transform: as a `Mixer` takes them."""
    layer, embedding, ffn = model.layers[number], None, weights.ffn
    if layer.parallel and ffn is not None:
        ffn = replace(ffn, norm=weights.mixer.norm)
    if weights.embedding is not None:
        assert layer.ffn is not None
        embedding = LayerEmbedding(ops, layer.ffn.activation, number, eps, weights.embedding)
    return DecoderLayer(
        ops,
        MIXERS[type(layer.mixer)](ops, layer.mixer, eps, weights.mixer, cache, transform),
        None if layer.ffn is None else FFNS[type(layer.ffn)](ops, layer.ffn, eps, ffn),
        weights.scale,
        embedding,
        model.centred,
        layer.parallel,
    )


class Chunk(NamedTuple):
    """Rows that a layer computes together.

    rows: which of x. inputs: see `InputChoice.distinct`. skipped: so many of the first ones only append their state in
    the last layer, since nothing reads their output. outputs: which of x something reads, of several prompts on a CPU;
    None for all of the chunk that are not skipped. last: the spans of the last layer's group with these alone.
    """

    rows: slice
    inputs: Sequence[LayerInputs]
    skipped: int = 0
    last: Spans = None
    outputs: np.ndarray | None = None


class Rows:
    """Rows that layers compute, cut into chunks: those of a step, which are one."""

    def __init__(
        self,
        choice: InputChoice,
        chunks: list[Chunk],
        last: int | None = None,
        watch: Callable[[int, Array], None] | None = None,
    ) -> None:
        """last: the number of the model's last layer, if chunks have skipped rows. watch: gets the number of each layer
        and the rows before it, (T, E)."""
        self.choice, self.chunks, self.last, self._watch = choice, chunks, last, watch

    def begin(self, layer: int, x: Array) -> None:
        """A layer begins, for rows x (T, E)."""
        if self._watch is not None:
            self._watch(layer, x)

    def project(self, number: int, layer: DecoderLayer, x: Array, chunk: Chunk, inputs: LayerInputs) -> Any:
        """Call `Mixer.project` of a layer for the rows of a chunk of x (T, E), and return its result."""
        return layer.project(x[chunk.rows], inputs)


class DecoderLayer(NamedTuple):
    """The objects that compute a decoder layer."""

    ops: Ops
    mixer: Mixer
    ffn: GatedMLP | Experts | None
    scale: Array | None = None  # (1,)
    embedding: LayerEmbedding | None = None
    centred: bool = False  # see `ModelConfig`
    parallel: bool = False  # see `config.Layer`

    def project(self, x: Array, inputs: LayerInputs, tap: Tap | None = None) -> Any:
        """Call `Mixer.project` for rows x (T, E), which lose their mean if norms subtract it."""
        if self.centred:
            self.ops.centre(x)
        return self.mixer.project(x, inputs, tap)

    def complete(self, x: Array, projected: Any, inputs: LayerInputs) -> None:
        """Compute all that follows `project`, for rows x (T, E), in place."""
        if self.parallel:
            assert isinstance(self.ffn, GatedMLP)
            inner = self.ffn.project(x, inputs)  # before x changes
            self.mixer.mix(x, projected, inputs)
            self.ffn.down.add(x, inner, inputs.adapters)
            return
        self.mixer.mix(x, projected, inputs)
        if self.ffn is not None:
            if self.centred:
                self.ops.centre(x)
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
    inputs, output_rows = chunk.inputs[rows.choice.index[number]], chunk.rows
    projected = rows.project(number, layer, x, chunk, inputs)
    if number == rows.last and chunk.skipped:
        if chunk.skipped == len(projected):
            return
        output_rows, projected = slice(output_rows.start + chunk.skipped, output_rows.stop), projected[chunk.skipped :]
        inputs = inputs.part(slice(chunk.skipped, None))._replace(spans=chunk.last)
    if number != rows.last or chunk.outputs is None:
        layer.complete(x[output_rows], projected, inputs)
    elif len(at := chunk.outputs - chunk.rows.start):
        outputs = x[chunk.outputs]
        with layer.ops.as_step():
            layer.complete(outputs, projected[at], inputs.part(at)._replace(spans=chunk.last))
        x[chunk.outputs] = outputs


# -- prompts -----------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """The consecutive layers of a model that one device has."""

    ops: Ops
    layers: Sequence[int]


def stages(ops: Ops, layers: int) -> list[Stage]:
    """Return the stages of a model with this number of layers."""
    runs = itertools.groupby(range(layers), ops.layer_ops)
    return [Stage(device, [*numbers]) for device, numbers in runs]


def cut(count: int, step: int, whole: Sequence[range] = ()) -> list[slice]:
    """Cut `count` rows into chunks of at most `step`, or of one of `whole`, rows that are not cut. The last one is no
    single row, which other kernels would compute, whose sums differ by a rounding."""
    firsts = [0]
    while (left := count - firsts[-1]) > step:
        first = firsts[-1] + step - (left == step + 1 and step > 2)
        image = next((rows for rows in whole if rows.start < first < rows.stop), None)
        firsts.append(first if image is None else image.start if image.start > firsts[-1] else image.stop)
    return [slice(first, end) for first, end in zip(firsts, [*firsts[1:], count], strict=True)]


class PromptRows(Rows):
    """The rows of prompts, layer by layer. They are sealed in a layer once all of them are appended there."""

    last: int

    def __init__(
        self,
        choice: InputChoice,
        batch: PromptBatch,
        ids: np.ndarray,
        depth: int,
        most: int,
        images: Sequence[ImagePart],
        tap: PromptTap | None,
        mtp: Any,
    ) -> None:
        """ids (T,) int32: of the rows. depth: the number of the model's layers. most: rows of a chunk. images: of rows
        of one span. tap: of prompts of one span. mtp: the model's `MtpLayer` or None; if it has K/V, it is the last
        layer, and they are appended here. In the last layer, rows of which no output is read only append their state.
        """
        self._states = None if mtp is None else mtp.states()
        watch = None if self._states is None else self._states.add
        super().__init__(choice, [], depth - (mtp is None or not mtp.has_kv), watch)
        parts = batch.parts or batch.spans
        self._store, self._spans, self._parts, self._ids = choice.store, batch.spans, parts, ids
        self._images, self._tap, self._mtp, self._appends_mtp = images, tap, mtp, self.last == depth
        self._count, self._only_last, self._batch, self._done = len(ids), batch.only_last, batch, 0
        outputs = self._count if batch.outputs is None else batch.outputs
        self._first_output = self._count - outputs
        self._ends = np.cumsum([span.count for span in batch.spans]) - 1  # the last row of each span
        self._round_trips = [span for span in batch.spans if span.round_trip]
        # With a round trip, a block is encoded as a whole before any of its tokens attends.
        self.step = self._count if self._round_trips else most
        self._slices = cut(self._count, self.step, whole_images(parts) if self._store.sees_whole_images else ())
        self._tables = choice.ropes.tables(rope_positions(parts)), row_adapters(parts)

    def outputs(self, x: Array) -> Array:
        """Return the hidden states that something reads of all rows x (T, E), which are complete."""
        if self._mtp is not None:
            self._mtp.keep_last(self._spans[0], x if self._states is None else self._states.sum)
        return x[self._ends] if self._only_last else x[self._first_output :]

    def compute(
        self, ops: Ops, layers: Iterable[tuple[int, DecoderLayer]], x: Array, added: Array | None
    ) -> Generator[int]:
        """Compute the layers of a device, in chunks for it, and yield as `Transformer.chunks` does. added: see
        `Inputs.added`."""
        self._ops, (ropes, adapters) = ops, self._tables
        tables = [tuple(map(ops.to_device, table)) for table in ropes]
        routing = None if adapters is None else Routing(*map(ops.to_device, adapters))
        inputs = [self._part(rows, tables, routing, added) for rows in self._slices]
        self.chunks[:] = map(self._chunk, self._slices, inputs)
        with ExitStack() as self._stream:  # it ends with each unit, since other work needs the threads then
            for layer, chunk in compute(layers, x, self):
                count, is_last = chunk.rows.stop - chunk.rows.start, chunk.rows.stop == self._count
                if is_last and self._open_stream is not None:
                    self._store.seal(layer, *self._spans)
                self._done += count
                is_end = self._batch.by_layer or (is_last and layer == self.last)
                is_unit = is_end or self._done + count > self.step * ops.unit_layers
                if is_unit and not self._batch.parts:
                    self._stream.close()
                    yield self._done
                    self._done = 0

    @staticmethod
    def _part(rows: slice, tables: Sequence[Any], adapters: Routing | None, added: Array | None) -> Inputs:
        ropes = tuple([tuple([array[rows] for array in table]) for table in tables])  # no views for each layer
        routing = None if adapters is None else adapters.part(rows)
        return Inputs(None, ropes, (), routing, None if added is None else added[rows])

    def _chunk(self, rows: slice, inputs: Inputs) -> Chunk:
        last, count, outputs = self._store.group_of(self.last), rows.stop - rows.start, None
        first_output = self._count if self._appends_mtp else self._first_output
        skipped = min(max(0, first_output - rows.start), count)
        spans = self._store.spans(self._parts, rows)
        last_spans = spans[last]
        if skipped not in (0, count):  # if all rows are skipped, none attends in the last layer
            last_spans = self._store.spans(self._parts, slice(rows.start + skipped, rows.stop))[last]
        if self._only_last:
            ends = self._ends
            outputs = ends[(rows.start <= ends) & (ends < rows.stop)]
            spans_here = [span for span, end in zip(self._spans, ends, strict=True) if rows.start <= end < rows.stop]
            parts = [span.part(span.count - 1, 1) for span in spans_here]
            last_spans = self._store.spans(parts, slice(0, len(parts)))[last]
        return Chunk(rows, self.choice.distinct(inputs._replace(spans=tuple(spans))), skipped, last_spans, outputs)

    def begin(self, layer: int, x: Array) -> None:
        super().begin(layer, x)
        for part in self._images:
            if 0 < layer <= len(part.added):
                self._ops.linear(*part.added[layer - 1], residual=x[part.at])
        for span in self._spans:
            self._store.begin_layer(layer, span)
        is_read = layer == self.last and (self._appends_mtp or self._only_last)  # by Python
        is_read = is_read or self._tap is not None or bool(self._round_trips)
        self._open_stream = None if is_read else self._ops.stream
        if is_read:
            self._stream.close()

    def project(self, number: int, layer: DecoderLayer, x: Array, chunk: Chunk, inputs: LayerInputs) -> Any:
        rows, tap = chunk.rows, self._tap and partial(self._tap, number, self._spans[0].start + chunk.rows.start)
        mixed = x[rows]
        if self._open_stream is not None:
            self._stream.enter_context(self._open_stream())
        if self._mtp is not None and self._appends_mtp and number == self.last:
            mixed = self._mtp.prompt_input(self._spans[0], self._ids, self._states, x, rows)
        projected = layer.project(mixed, inputs, tap)
        if rows.stop == self._count and self._open_stream is None:
            self._store.seal(number, *self._spans)
            for span in self._round_trips:
                self._store.round_trip(number, span)
        return projected

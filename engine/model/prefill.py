"""Prefill: computes the rows of a prompt layer by layer, in chunks.

Letters: T rows, E hidden size, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

from polarlm.engine.backends.ops import Array, Ops, PeerArray, Routing
from polarlm.engine.model.adapters import row_adapters
from polarlm.engine.model.decoder import Chunk, DecoderLayer, InputChoice, Inputs, Rows, compute
from polarlm.engine.model.layers import LayerInputs
from polarlm.engine.model.vision_encoders._rows import ImagePart
from polarlm.engine.state.positions import rope_positions, whole_images
from polarlm.engine.state.store import Span

PromptTap = Callable[[int, int, Array, Array], None]
"""tap(layer, position, queries, keys): a `Tap` for rows of a layer, the first row at `position`."""


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

    def __init__(
        self,
        choice: InputChoice,
        last: int,
        spans: Sequence[Span],
        parts: Sequence[Span],
        first_output: int,
        *,
        rows: int,
        images: Sequence[ImagePart] = (),
        tap: PromptTap | None = None,
        mtp_input: Callable[[Array, slice], Array] | None = None,
    ) -> None:
        """last: the number of the model's last layer, in which rows before `first_output` only append their state.
        parts: those of `spans` in the order of the rows. rows: most of a chunk. images: of rows of one span. tap: of
        prompts of one span. mtp_input: returns the input of the last layer, which has K/V alone, if it is the one of
        `ModelConfig.mtp`; see `MtpLayer.prompt_input`."""
        super().__init__(choice, [], last)
        self._store, self._last, self._spans, self._parts = choice.store, last, spans, parts
        self._images, self._tap, self._mtp_input = images, tap, mtp_input
        self._count = sum(part.count for part in parts)
        self._first_output = first_output if mtp_input is None else self._count
        self._round_trips = [span for span in spans if span.round_trip]
        # With a round trip, a block is encoded as a whole before any of its tokens attends.
        self.step = self._count if self._round_trips else rows
        self._slices = cut(self._count, self.step, whole_images(parts) if self._store.sees_whole_images else ())
        self._tables = choice.ropes.tables(rope_positions(parts)), row_adapters(parts)

    def cut_for(self, ops: Ops, added: Array | None) -> None:
        """Make the chunks for layers of a device. added: see `Inputs.added`."""
        self._ops, (ropes, adapters) = ops, self._tables
        tables = [tuple(map(ops.to_device, table)) for table in ropes]
        routing = None if adapters is None else Routing(*map(ops.to_device, adapters))
        self._inputs = [self._part(rows, tables, routing, added) for rows in self._slices]
        self._place_chunks()

    @staticmethod
    def _part(rows: slice, tables: Sequence[Any], adapters: Routing | None, added: Array | None) -> Inputs:
        ropes = tuple([tuple([array[rows] for array in table]) for table in tables])  # no views for each layer
        routing = None if adapters is None else adapters.part(rows)
        return Inputs(None, ropes, (), routing, None if added is None else added[rows])

    def _place_chunks(self) -> None:
        self.chunks[:], self._changes = map(self._chunk, self._slices, self._inputs), self._store.changes

    def _chunk(self, rows: slice, inputs: Inputs) -> Chunk:
        last, count = self._store.group_of(self._last), rows.stop - rows.start
        skipped = min(max(0, self._first_output - rows.start), count)
        spans = self._store.spans(self._parts, rows)
        kept = spans[last]
        if skipped not in (0, count):  # if all rows are skipped, none attends in the last layer
            kept = self._store.spans(self._parts, slice(rows.start + skipped, rows.stop))[last]
        return Chunk(rows, self.choice.distinct(inputs._replace(spans=tuple(spans))), skipped, kept)

    def follow_blocks(self) -> None:
        """Read blocks that earlier turns left where they are now, if they have been moved."""
        if self._store.changes != self._changes:
            self._place_chunks()

    def begin(self, layer: int, x: Array) -> None:
        for part in self._images:
            if 0 < layer <= len(part.added):
                self._ops.linear(*part.added[layer - 1], residual=x[part.at])
        for span in self._spans:
            self._store.begin_layer(layer, span)

    def project(self, number: int, layer: DecoderLayer, x: Array, chunk: Chunk, inputs: LayerInputs) -> Any:
        rows, tap = chunk.rows, self._tap and partial(self._tap, number, self._spans[0].start + chunk.rows.start)
        mixed = x[rows] if self._mtp_input is None or number != self._last else self._mtp_input(x, rows)
        projected = layer.mixer.project(mixed, inputs, tap)
        if rows.stop == self._count:
            self._store.seal(number, *self._spans)
            for span in self._round_trips:
                self._store.round_trip(number, span)
        return projected


def prefill(
    stages: Sequence[Stage],
    layers: Sequence[DecoderLayer],
    x: Array,
    added: Array | None,
    rows: PromptRows,
    *,
    by_layer: bool,
) -> Generator[int, None, Array]:
    """Compute all layers for x (T, E), the embedded rows, in place, and seal them; see `Transformer.forward_chunks`.
    Returns x on the last layer's device. The last layer leaves rows without output as they are."""
    done, last = 0, len(layers) - 1
    for number, (ops, numbers) in enumerate(stages):
        if number:
            x = ops.to_device(PeerArray(x, stages[number - 1].ops))
        rows.cut_for(ops, added)
        for layer, chunk in compute(((one, layers[one]) for one in numbers), x, rows):
            count = chunk.rows.stop - chunk.rows.start
            done += count
            if by_layer or done + count > rows.step or (layer == last and chunk.rows.stop == len(x)):
                yield done
                done = 0
                rows.follow_blocks()
    return x

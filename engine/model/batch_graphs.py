"""Batches: prompts that are computed together, with a step of the sequences that run.

A batch of few rows waits for its launches, so it is recorded: what lies between two layers' attention depends on the
number of rows alone, which is filled up to a bucket. Attention, and what the store does for a layer, depend on the
spans of the batch, and are launched between the parts of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polarlm.engine.backends.kv import RecordedSpans
from polarlm.engine.backends.ops import Array, Ops, Routing
from polarlm.engine.model.adapters import row_adapters
from polarlm.engine.model.batch import PromptBatch
from polarlm.engine.model.decoder import Chunk, DecoderLayer, InputChoice, Inputs, Rows, Work, compute, flatten
from polarlm.engine.model.layers import LayerInputs
from polarlm.engine.state.positions import rope_positions
from polarlm.engine.state.store import Span

_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # rows
# Rows that are not there are computed, too, which pays while a layer takes less time than its launches, some 0.1 ms
# from Python: up to 256 rows, whose products wait for bytes of weights, and as long as E² · rows is at most this. (The
# products of a layer are some 25 E² operations a row, of which a large GPU does 4e14 a second.)
_FEW_ROWS, _SHORT = 256, 1 << 30


class RecordedRows(Rows):
    """The rows of a batch, whose K/V are appended, and attention launched, between the parts of its recording."""

    def begin(self, layer: int, x: Array) -> None:
        spans: RecordedSpans = self.chunks[0].inputs[self.choice.index[layer]].spans
        spans.layer = layer


class BatchGraphs:
    """The recorded batches of a model on one device, whose layers all have K/V, or read the K/V of others.

    embed: as `Transformer`'s.
    """

    def __init__(
        self,
        ops: Ops,
        layers: Sequence[DecoderLayer],
        choice: InputChoice,
        hidden_size: int,
        embed: Callable[..., tuple[Array, Array | None]],
    ) -> None:
        self._ops, self._layers, self._choice, self._embed = ops, layers, choice, embed
        self._store = choice.store
        self._groups = tuple(RecordedSpans(self._begin, self._seal) for _ in self._store.groups)
        self._spans: Sequence[Span] = ()  # of the prompts in the batch that runs
        limit = max(_FEW_ROWS, _SHORT // hidden_size**2) if ops.batches_take_steps else 0
        self.most_rows = max((size for size in _BUCKETS if size <= limit), default=0)  # of a recorded batch

    def _begin(self, layer: int) -> None:
        for span in self._spans:
            self._store.begin_layer(layer, span)

    def _seal(self, layer: int) -> None:
        self._store.seal(layer, *self._spans)

    def run(self, batch: PromptBatch, ids: np.ndarray) -> Array:
        """Compute a batch with the tokens ids (T,) int32, T ≤ most_rows, and return hidden states of `outputs`."""
        parts, outputs = batch.parts, batch.outputs or 0
        store, count, last = self._store, len(ids), len(self._layers) - 1
        rows, arrays = next(size for size in _BUCKETS if size >= count), list[Any]()
        ropes, adapters = self._choice.ropes.tables(rope_positions(parts)), row_adapters(parts)
        work = Work(self._compute, flatten(Inputs(ids, ropes, adapters=adapters), arrays))
        arrays = [np.concatenate([x, np.zeros((rows - count, *x.shape[1:]), x.dtype)]) for x in arrays]
        self._spans = batch.spans
        try:
            for group, now in zip(self._groups, store.spans(parts, slice(0, count)), strict=True):
                group.spans = now
            x, projected, *added = self._ops.run_graph("batch", work, arrays)
        finally:
            self._spans = ()
            for group in self._groups:
                group.spans = group.pending = None  # which hold the prompts' buffers, and arrays of a recording
        at, layer = slice(count - outputs, count), self._layers[last]
        of_layer = LayerInputs(
            spans=store.spans(parts, at)[store.group_of(last)],
            adapters=None if adapters is None else Routing(*(self._ops.to_device(table[at]) for table in adapters)),
            added=added[0][at] if added else None,
        )
        layer.complete(x[at], projected[at], of_layer)
        return x[at]

    def _compute(self, inputs: Inputs) -> tuple[Array, ...]:
        """All layers up to the last one's attention → hidden states (T, E), that layer's queries, and `Inputs.added`,
        if there is any."""
        x, added = self._embed(inputs.x)
        distinct = self._choice.distinct(inputs._replace(spans=self._groups, added=added))
        rows = RecordedRows(self._choice, [Chunk(slice(None), distinct)])
        *first_layers, (last, layer) = enumerate(self._layers)
        for _ in compute(first_layers, x, rows):
            pass
        of_layer = distinct[self._choice.index[last]]
        rows.begin(last, x)
        projected = layer.project(x, of_layer)
        self._ops.run_between_graphs(*self._groups[self._store.group_of(last)].append_call(), is_last=True)
        return (x, projected) if added is None else (x, projected, added)

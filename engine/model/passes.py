"""Passes: prompts that are computed together, with a step of the sequences that run.

A pass of few rows waits for its launches, so it is recorded: what lies between two layers' attention depends on the
number of rows alone, which is filled up to a bucket. Attention, and what the store does for a layer, depend on the
spans of the pass, and are launched between the parts of the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from polarlm.engine.backends.kv import RecordedSpans
from polarlm.engine.backends.ops import Array, Ops, Routing
from polarlm.engine.model.adapters import have_adapters, row_adapters
from polarlm.engine.model.layers.kinds import DecoderLayer
from polarlm.engine.model.rope import RopeTables
from polarlm.engine.state.positions import rope_positions
from polarlm.engine.state.store import KVStore, Span

_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)  # rows
# Rows that are not there are computed, too, which pays while a layer takes less time than its launches, some 0.1 ms
# from Python: up to 256 rows, whose products wait for bytes of weights, and as long as E² · rows is at most this. (The
# products of a layer are some 25 E² operations a row, of which a large GPU does 4e14 a second.)
_FEW_ROWS, _SHORT = 256, 1 << 30


class Passes:
    """The recorded passes of a model on one device, whose layers all have K/V, or read the K/V of others.

    embed: as `Transformer`'s, with recorded=True.
    """

    def __init__(
        self,
        ops: Ops,
        store: KVStore,
        layers: Sequence[DecoderLayer],
        ropes: RopeTables,
        hidden_size: int,
        embed: Callable[..., tuple[Array, Array | None]],
    ) -> None:
        self._ops, self._store, self._layers, self._ropes, self._embed = ops, store, layers, ropes, embed
        self._groups = [RecordedSpans(self._begin, self._seal) for _ in store.groups]
        self._spans: Sequence[Span] = ()  # of the prompts in the pass that runs
        most = max(_FEW_ROWS, _SHORT // hidden_size**2)
        self.most_rows = max(size for size in _BUCKETS if size <= most)  # of a recorded pass

    def _begin(self, layer: int) -> None:
        for span in self._spans:
            self._store.begin_layer(layer, span)

    def _seal(self, layer: int) -> None:
        self._store.seal(layer, *self._spans)

    def run(self, spans: Sequence[Span], ids: np.ndarray, outputs: int, parts: Sequence[Span]) -> Array:
        """Compute rows with the tokens ids (T,) int32, T ≤ most_rows, and return the hidden states of the last
        `outputs` rows. spans: of prompts. parts: of these and of steps, in the order of the rows."""
        store, count, of_rows = self._store, len(ids), row_adapters(parts)
        rows = next(size for size in _BUCKETS if size >= count)
        tables = [*chain.from_iterable(self._ropes.tables(rope_positions(parts))), *of_rows]
        inputs = [np.concatenate([x, np.zeros((rows - count, *x.shape[1:]), x.dtype)]) for x in (ids, *tables)]
        self._spans = spans
        try:
            for group, now in zip(self._groups, store.spans(parts, slice(0, count)), strict=True):
                group.spans = now
            x, seen, *more = self._ops.run_graph(("pass", have_adapters(parts)), self._rows, inputs)
        finally:
            self._spans = ()
            for group in self._groups:
                group.spans = group.pending = None  # which hold the prompts' buffers, and arrays of a recording
        kept, number = slice(count - outputs, count), len(self._layers) - 1
        layer, last = self._layers[number], store.spans(parts, kept)[store.group_of(number)]
        adapters = Routing(*(self._ops.to_device(table[kept]) for table in of_rows)) if of_rows else None
        layer.mixer.mix(x[kept], seen[kept], last, adapters=adapters, recorded=False)
        layer.finish(x[kept], more[0][kept] if more else None, adapters=adapters, recorded=False)
        return x[kept]

    def _rows(self, ids: Array, *tables: Array) -> tuple[Array, ...]:
        """All layers up to the last one's attention: ids (T,) int32 → hidden states (T, E), that layer's queries, and
        the inputs of all layers (T, L·P), if any. tables: as `RopeTables.tables`, then as `row_adapters`."""
        first, last = self._ropes.arrays, len(self._layers) - 1
        x, inputs = self._embed(ids, recorded=True)
        ropes = self._ropes.joined(tables)
        adapters = Routing(*tables[first:]) if tables[first:] else None
        for number, layer in enumerate(self._layers):
            spans = self._groups[self._store.group_of(number)]
            spans.layer = number
            seen = layer.mixer.project(x, self._ropes.of_layer(number, ropes), spans, adapters=adapters, recorded=True)
            if number < last:
                layer.mixer.mix(x, seen, spans, adapters=adapters, recorded=True)
                layer.finish(x, inputs, adapters=adapters, recorded=True)
        self._ops.run_between_graphs(*spans.append_call(), is_last=True)
        return (x, seen) if inputs is None else (x, seen, inputs)

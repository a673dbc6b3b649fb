"""The spans of steps for the ops: rows of sequences that the last step had, too, are taken from there."""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.backends.kv import Spans
from polarlm.engine.state.kv_blocks import KVBlocks
from polarlm.engine.state.layer_state import TableVersion
from polarlm.engine.state.positions import positions
from polarlm.engine.state.store import KVStore, Span


class StepSpans:
    """Makes the spans of a store's steps. Where a sequence has the blocks of the last step, its row is from there."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._last: tuple[dict[TableVersion | None, int], list[Spans]] = {}, [None] * len(store.groups)

    def __call__(self, spans: Sequence[Span]) -> tuple[Spans, ...]:
        """Return what `KVStore.spans` does for all rows."""
        store, at, next_spans, result = self._store, positions(spans), self._store.ops.next_spans, list[Spans]()
        if next_spans is None or len(at) > len(spans):
            return tuple(store.spans(spans, slice(0, len(at))))
        tables = [None if span.reservations else span.sequence.table_version for span in spans]
        rows, last = self._last
        last_rows = [rows.get(table, -1) for table in tables]
        for group, last_spans in zip(store.groups, last, strict=True):
            is_kv, layer, n = isinstance(group, KVBlocks), group.layers[0], store.shape.block_size
            new = [(row, spans[row]) for row, last_row in enumerate(last_rows) if last_row < 0 or not is_kv]
            views = {row: store.view(layer, span, slice(row, row + 1), span.start) for row, span in new}
            result.append(next_spans(last_spans, last_rows, views, at, n) if is_kv else group.spans([*views.values()]))
        self._last = {one: row for row, one in enumerate(tables) if one is not None}, result
        return tuple(result)

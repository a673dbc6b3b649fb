"""Contexts from which rows of keys and values are removed in place: what follows keeps its positions, and what was read
behind them has seen them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from polarlm.engine.backends import transfer
from polarlm.engine.model.batch import PromptBatch, run_to_end
from polarlm.engine.model.forward import Transformer
from polarlm.engine.state.image_positions import ImagePositions
from polarlm.engine.state.store import SequenceKV

Rows = Mapping[tuple[int, str], np.ndarray]
"""Layer and side, "k" or "v" → keys or values (K, T, D) float16, as they are stored."""


class Context:
    """A sequence in the store of a model whose layers all have attention without a window, and a cache of `f16`. end:
    the position of its next token. Methods raise OutOfBlocks."""

    def __init__(self, model: Transformer) -> None:
        self._model, self._store, (self._group,) = model, model.store, model.store.groups
        self._n = self._store.shape.block_size
        self._kv = self._store.new_sequence()
        self._positions, self.end = np.zeros(0, np.int64), 0

    def read(self, ids: Sequence[int]) -> np.ndarray:
        """Read more tokens (T,) → their hidden states (T, E)."""
        removed = self.end - len(self._positions)
        # As behind an image that takes up more positions than rows.
        self._kv.image_positions = ImagePositions((), np.full((3, 1), removed)) if removed else None
        span = self._store.open(self._kv, len(ids), as_steps=True)
        with self._store.abort_on_error([span]):
            hidden = run_to_end(self._model.chunks(PromptBatch([span], ids)))
            self._store.commit(span)
        self._positions = np.append(self._positions, np.arange(self.end, self.end + len(ids)))
        self.end += len(ids)
        return np.array(self._model.ops.to_host(hidden))

    def copy(self) -> Context:
        """A context that is continued by itself and shares complete blocks with this one."""
        other, table, length = Context(self._model), self._kv.tables[0], self._kv.length
        shared = self._group.share([] if table.sink is None else [table.sink, *table.quantized], [], length)
        if table.current is not None:
            (shared.current,) = self._group.full.allocate()
            self._group.copy_full(shared.current, table.current, length % self._n)
        other._kv, other._positions, other.end = SequenceKV(length, [shared]), self._positions, self.end
        return other

    def remove(self, holes: Sequence[range]) -> None:
        """Remove the rows at these positions."""
        kept = ~np.isin(self._positions, [position for hole in holes for position in hole])
        rows = {key: x[:, kept] for key, x in self._rows().items()}
        self.release()
        self._positions, n, length = self._positions[kept], self._n, int(kept.sum())
        table = self._group.reserve_table(length, 0, 0, with_sink=length >= n)
        for slot, part in ((table.sink, slice(n)), (table.current, slice(length // n * n, None))):
            if slot is not None:
                self._group.write_full(slot, {key: x[:, part] for key, x in rows.items()})
        if count := len(table.quantized):
            coded = {
                (layer, f"{side}.values"): x[:, n : n + count * n].reshape(len(x), count, n, -1).swapaxes(0, 1)
                for (layer, side), x in rows.items()
            }
            self._group.write_blocks(table.quantized, coded)
        self._kv = SequenceKV(length, [table])

    def _rows(self) -> Rows:
        group, table, parts = self._group, self._kv.tables[0], list[Rows]()
        if table.sink is not None:
            parts.append(group.read_full(table.sink, self._n))
        if count := len(table.quantized):
            arrays, codes = group.read_blocks(table.quantized), {}
            for layer in group.layers:
                own = {name: x for (number, name), x in arrays.items() if number == layer}
                fields = transfer.convert_blocks(group.cache(layer).format, count, own, transfer.FIELDS)
                for side in "kv":
                    x = fields[f"{side}.values"].swapaxes(0, 1)  # (K, B, N, D)
                    codes[layer, side] = x.reshape(len(x), -1, x.shape[-1])
            parts.append(codes)
        if table.current is not None:
            parts.append(group.read_full(table.current, self._kv.length % self._n))
        return {key: np.concatenate([part[key] for part in parts], axis=1) for key in parts[0]}

    def release(self) -> None:
        self._store.release(self._kv)

"""The state of attention: K/V, in blocks, of the layers that share a window and a shape of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby

import numpy as np

from polarlm.engine.backends.kv import Cache, FilledBlocks, KVLocation, Move, Spans, SpanView, layers_together
from polarlm.engine.backends.ops import Ops
from polarlm.engine.codecs import NotFinite
from polarlm.engine.errors import EngineError
from polarlm.engine.sampling.sample import NOT_FINITE
from polarlm.engine.state.blocks import OutOfBlocks
from polarlm.engine.state.layer_shapes import LayerShape, SharedShape
from polarlm.engine.state.layer_state import BlockArrays, Buffers
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.tables import BlockTable, Reservation, TableGroup


class KVBlocks(TableGroup):
    """A `LayerState`: the block tables of a group, and the caches of its layers."""

    def __init__(
        self, ops: Ops, shape: CacheShape, layers: tuple[int, ...], caches: Sequence[Cache], blocks: tuple[int, int]
    ):
        """layers: a group's layers with K/V. caches: one per layer. blocks: the numbers of quantized blocks and of
        slots."""
        first = shape.layers[layers[0]]
        assert isinstance(first, LayerShape)
        super().__init__(shape.block_size, first.window, *blocks, first.recent_blocks)
        self.layers = layers
        self._ops, self._shape = ops, shape
        self._caches = dict(zip(layers, caches, strict=True))
        self._heads = [shape.kv_layers[layer].kv_heads for layer in layers]
        self._encoded_layers: dict[int, int] = {}  # slots of blocks that are quantized next → layers that have codes
        # Layers without K/V read the last layer's, so that no other group may write to a prompt's buffer.
        self._is_shared = any(isinstance(layer, SharedShape) and layer.group == first.group for layer in shape.layers)

    def cache(self, layer: int) -> Cache:
        return self._caches[layer]

    # -- growing -----------------------------------------------------------------------------------------------

    def open(self, table: BlockTable, start: int, count: int, buffers: Buffers, *, as_steps: bool) -> Reservation:
        reservation = self.grow(table, start, count)
        try:
            format = self._shape.format(self.layers[0])
            key = format.kv_heads, format.head_dim, format.sides, self.layers if self._is_shared else ()
            if key not in buffers.by_shape:
                buffer = self._ops.buffer(format, buffers.rows, as_slots=as_steps, layers=buffers.layers)
                buffers.by_shape[key] = buffer
            reservation.buffer, reservation.first = buffers.by_shape[key], buffers.first
        except BaseException:  # there is no memory for the buffer
            self.abort(reservation)
            raise
        return reservation

    def view(
        self, layer: int, table: BlockTable, reservation: Reservation, start: int, rows: slice, position: int
    ) -> SpanView:
        n = self.block_size
        if reservation.buffer is None:
            slot, *following = reservation.slots.values()
            current = KVLocation(None, slot)
        else:
            current, following = KVLocation(reservation.buffer, reservation.first), []
        return SpanView(
            rows=rows,
            position=position,
            current=current,
            current_start=reservation.start * n,
            sink=table.sink if reservation.start else None,
            table=table.quantized,
            table_start=(1 + table.dropped) * n,
            following=following,
        )

    def spans(self, views: Sequence[SpanView]) -> Spans:
        return self._ops.spans(views, self.block_size)

    def begin(self, layers: Sequence[int], table: BlockTable, reservation: Reservation, start: int) -> None:
        """Copy recent blocks, and the current block's earlier tokens, to the reservation's buffer, if it has one."""
        if (buffer := reservation.buffer) is None:
            return
        n = self.block_size
        tokens = [min(n, start - first) for first in range(reservation.start * n, start, n)]
        self._copy(
            layers,
            [
                Move(KVLocation(buffer, reservation.first + index), KVLocation(None, slot), tokens[index])
                for index, slot in enumerate(self.held_slots(table))
            ],
        )

    def seal(self, layers: Sequence[int], reservation: Reservation, start: int, count: int) -> list[FilledBlocks]:
        """Copy the new tokens that stay in slots, and return the blocks to encode."""
        if reservation.buffer is None:
            return []
        n, buffer = self.block_size, reservation.buffer
        absent = reservation.start - reservation.first  # blocks before the buffer
        self._copy(
            layers,
            [
                Move(KVLocation(None, slot), KVLocation(buffer, number - absent), min(n, start + count - number * n))
                for number, slot in reservation.slots.items()
                if (number + 1) * n > start
            ],
        )
        places = [KVLocation(buffer, number - absent) for number in reservation.quantized]
        return self._to_encode(layers, [*reservation.quantized.values()], places)

    def _copy(self, layers: Iterable[int], moves: Sequence[Move]) -> None:
        if moves:
            self._ops.copy_full([self._caches[layer] for layer in layers], moves)

    def round_trip(self, layer: int, reservation: Reservation, start: int, count: int) -> None:
        if start >= self.block_size:  # a sequence's first block is never encoded
            with _damage_as_error():
                block, filled = divmod(start, self.block_size)
                place = KVLocation(reservation.buffer, reservation.first + block - reservation.start)
                self._ops.round_trip(self._caches[layer], place, filled + count)

    def filled_blocks(self, reservations: Sequence[tuple[Reservation, int]]) -> list[FilledBlocks]:
        pairs = [pair for reservation, length in reservations for pair in self.filled_slots(reservation, length)]
        return self._from_slots(dict.fromkeys(pairs), len(self.layers))

    def _from_slots(self, pairs: Iterable[tuple[int, int]], most: int) -> list[FilledBlocks]:
        """Return what is to be encoded in the next `most` layers. pairs: (quantized block, slot)."""
        filled = []
        for done, members in groupby(sorted(pairs, key=self._layers_done), self._layers_done):
            blocks, slots = zip(*members, strict=True)
            filled += self._to_encode(self.layers[done : done + most], blocks, [KVLocation(None, one) for one in slots])
        return filled

    def _layers_done(self, pair: tuple[int, int]) -> int:
        block, slot = pair
        return self._encoded_layers.get(slot, 0) if self.ahead.get(slot) == block else 0

    def _to_encode(
        self, layers: Sequence[int], blocks: Sequence[int], places: Sequence[KVLocation]
    ) -> list[FilledBlocks]:
        return [FilledBlocks([self._caches[layer] for layer in layers], blocks, places)] if blocks and layers else []

    # -- recent blocks -----------------------------------------------------------------------------------------

    def note_oldest(self, table: BlockTable) -> None:
        """Note the block that a table quantizes next."""
        if len(table.recent) >= self.recent_blocks > 0:
            self._encoded_layers.setdefault(table.recent[0], 0)

    def encode_ahead(self) -> None:
        """Encode some layers of the blocks that are quantized next: so many that all are done after half a block's
        steps. Raises EngineError as `encode` does."""
        slots = [slot for slot, done in self._encoded_layers.items() if done < len(self.layers)]
        if not slots:
            return
        with suppress(OutOfBlocks):
            for slot in slots:
                if slot not in self.ahead:
                    (self.ahead[slot],) = self.quantized.allocate()
        pairs = [(self.ahead[slot], slot) for slot in slots if slot in self.ahead]
        together = layers_together(self._ops.encoded_at_once, self._heads, len(pairs))
        most = max(together, -(-2 * len(self.layers) // self.block_size))
        if pairs:
            encode(self._ops, self._from_slots(pairs, most))
        for _, slot in pairs:
            self._encoded_layers[slot] = min(len(self.layers), self._encoded_layers[slot] + most)

    def encode_recent(self, table: BlockTable) -> None:
        """Encode the oldest recent block of a table, which is quantized then. Raises OutOfBlocks."""
        slot = table.recent[0]
        table.quantized.append(self.encode_slot(slot))
        del table.recent[0]
        self._release((), [slot])

    def encode_slot(self, slot: int) -> int:
        """Return a quantized block, which the caller holds, with the codes of a complete block. Raises OutOfBlocks."""
        (block,) = self._blocks_of([slot])
        try:
            encode(self._ops, self._from_slots([(block, slot)], len(self.layers)))
        except BaseException:
            self._release([block], ())
            raise
        return block

    def _release(self, quantized: Iterable[int], full: Iterable[int]) -> None:
        full = [*full]
        super()._release(quantized, full)
        for slot in full:
            if not self.full.references(slot):
                self._encoded_layers.pop(slot, None)

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        self._copy(self.layers, [Move(KVLocation(None, target), KVLocation(None, source), tokens)])

    # -- blocks on the host ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        return {
            (layer, name): array
            for layer, cache in self._caches.items()
            for name, array in self._ops.read_blocks(cache, blocks).items()
        }

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        for layer, cache in self._caches.items():
            self._ops.write_blocks(cache, blocks, layer_arrays(arrays, layer))

    def read_full(self, slot: int, tokens: int) -> BlockArrays:
        return {
            (layer, side): x
            for layer, cache in self._caches.items()
            for side, x in zip(cache.format.sides, self._ops.read_full(cache, slot, tokens), strict=False)
        }

    def write_full(self, slot: int, arrays: BlockArrays) -> None:
        for layer, cache in self._caches.items():
            self._ops.write_full(cache, slot, arrays[layer, "k"], arrays[layer, cache.format.sides[-1]])

    def bytes(self, table: BlockTable) -> int:
        quantized, full = table.counts
        return quantized * self._shape.quantized_bytes(self.layers) + full * self._shape.full_bytes(self.layers)


def layer_arrays(arrays: BlockArrays, layer: int) -> dict[str, np.ndarray]:
    """Return the arrays of one layer by their names."""
    return {name: array for (number, name), array in arrays.items() if number == layer}


def encode(ops: Ops, filled: Sequence[FilledBlocks]) -> None:
    """Encode blocks. Raises EngineError ("model_damaged") if one holds NaN or infinity and the device detects it."""
    with _damage_as_error():
        ops.encode_blocks(filled)


@contextmanager
def _damage_as_error() -> Iterator[None]:
    """Raise EngineError ("model_damaged") for K/V that are not finite: they come from damaged weights."""
    try:
        yield
    except NotFinite:
        raise EngineError(NOT_FINITE, "model_damaged") from None

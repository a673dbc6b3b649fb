"""The state of attention: K/V, in blocks, of the layers that share a window and a shape of heads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import Cache, FilledBlocks, KVLocation, Move, Spans, SpanView
from polarlm.engine.backends.ops import Ops
from polarlm.engine.codecs import NotFinite
from polarlm.engine.errors import EngineError
from polarlm.engine.sampling.sample import NOT_FINITE
from polarlm.engine.state.layer_shapes import SharedShape
from polarlm.engine.state.layer_state import BlockArrays, Buffers
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.tables import BlockTable, Reservation, TableGroup


class BlocksOfKind(NamedTuple):
    """Blocks of one kind: by layer the caches that they are in, their numbers there, and their indices among the blocks
    that were given."""

    caches: Mapping[int, Cache]
    numbers: Sequence[int]
    indices: Sequence[int]


class KVBlocks(TableGroup):
    """A `LayerState`: the block tables of a group, and the caches of its layers."""

    def __init__(
        self, ops: Ops, shape: CacheShape, layers: tuple[int, ...], caches: Sequence[Cache], blocks: tuple[int, int]
    ):
        """layers: a group's layers with K/V. caches: one per layer. blocks: the numbers of quantized blocks and of
        slots."""
        first = shape.layers[layers[0]]
        super().__init__(shape.block_size, first.window, *blocks)
        self.layers = layers
        self._ops, self._shape = ops, shape
        self._caches = dict(zip(layers, caches, strict=True))
        # Layers without K/V read the last layer's, so that no other group may write to a prompt's buffer.
        self._is_shared = any(isinstance(layer, SharedShape) and layer.group == first.group for layer in shape.layers)

    def cache(self, layer: int) -> Cache:
        return self._caches[layer]

    def _split_by_kind(self, blocks: Sequence[int]) -> Iterable[BlocksOfKind]:
        """Yield the quantized blocks of each kind."""
        yield BlocksOfKind(self._caches, blocks, range(len(blocks)))

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
        n, first = self.block_size, start // self.block_size
        if reservation.buffer is None:
            slot, *following = reservation.slots.values()
            current = KVLocation(None, slot)
        else:
            current, following = KVLocation(reservation.buffer, reservation.first), []
        ids, high_precision = self._numbers(table.quantized)
        return SpanView(
            rows=rows,
            position=position,
            current=current,
            current_start=first * n,
            sink=table.sink if first else None,
            table=ids,
            table_start=(1 + table.dropped) * n,
            following=following,
            high_precision=high_precision,
        )

    def _numbers(self, blocks: Sequence[int]) -> tuple[Sequence[int], Sequence[int] | None]:
        """Return the numbers of blocks in the cache: of all, or of low-precision and of high-precision ones."""
        return blocks, None

    def spans(self, views: Sequence[SpanView]) -> Spans:
        return self._ops.spans(views, self.block_size)

    def begin(self, layers: Sequence[int], table: BlockTable, reservation: Reservation, start: int) -> None:
        """Copy the current block's earlier tokens to the reservation's buffer, if it has one."""
        filled = start % self.block_size
        if reservation.buffer is not None and filled:
            assert table.current is not None
            beginning = KVLocation(reservation.buffer, reservation.first)
            self._copy(layers, [Move(beginning, KVLocation(None, table.current), filled)])

    def seal(self, layers: Sequence[int], reservation: Reservation, start: int, count: int) -> list[FilledBlocks]:
        """Copy the tokens that stay in slots, and return the blocks to encode."""
        if reservation.buffer is None:
            return []
        n, buffer = self.block_size, reservation.buffer
        blocks_absent, moves = start // n - reservation.first, list[Move]()  # before: blocks that the buffer lacks
        for number, slot in reservation.slots.items():
            tokens = min(n, start + count - number * n)
            moves.append(Move(KVLocation(None, slot), KVLocation(buffer, number - blocks_absent), tokens))
        self._copy(layers, moves)
        pairs = [(block, KVLocation(buffer, number - blocks_absent)) for number, block in reservation.quantized.items()]
        return self._to_encode(layers, pairs)

    def _copy(self, layers: Iterable[int], moves: Sequence[Move]) -> None:
        if moves:
            self._ops.copy_full([self._caches[layer] for layer in layers], moves)

    def round_trip(self, layer: int, reservation: Reservation, start: int, count: int) -> None:
        if start >= self.block_size:  # a sequence's first block is never encoded
            with _damage_as_error():
                tokens = start % self.block_size + count
                self._ops.round_trip(
                    self._cache_of_newest(layer), KVLocation(reservation.buffer, reservation.first), tokens
                )

    def _cache_of_newest(self, layer: int) -> Cache:
        """Return the cache of a layer's new blocks."""
        return self._caches[layer]

    def filled_blocks(self, reservations: Sequence[tuple[Reservation, int]]) -> list[FilledBlocks]:
        slots = [pair for reservation, length in reservations for pair in self.filled_slots(reservation, length)]
        return self._to_encode(self.layers, [(block, KVLocation(None, slot)) for block, slot in slots])

    def _to_encode(self, layers: Sequence[int], pairs: Sequence[tuple[int, KVLocation]]) -> list[FilledBlocks]:
        """Return the blocks to encode in `layers`. pairs: quantized blocks, and where their tokens are."""
        return [
            FilledBlocks([kind.caches[layer] for layer in layers], kind.numbers, [pairs[i][1] for i in kind.indices])
            for kind in self._split_by_kind([block for block, _ in pairs])
            if kind.numbers
        ]

    def copy_full(self, target: int, source: int, tokens: int) -> None:
        self._copy(self.layers, [Move(KVLocation(None, target), KVLocation(None, source), tokens)])

    # -- blocks on the host ------------------------------------------------------------------------------------

    def read_blocks(self, blocks: Sequence[int]) -> BlockArrays:
        """As in `LayerState`, for blocks of one kind."""
        (kind,) = self._split_by_kind(blocks)
        return {
            (layer, name): array
            for layer, cache in kind.caches.items()
            for name, array in self._ops.read_blocks(cache, kind.numbers).items()
        }

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        (kind,) = self._split_by_kind(blocks)
        for layer, cache in kind.caches.items():
            self._ops.write_blocks(cache, kind.numbers, layer_arrays(arrays, layer))

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

"""The state of attention with two kinds of blocks: high-precision ones, which are requantized for want of room, or by
age.

The newest blocks of sequences are requantized last: errors in these cost most. By age, the oldest of these is coded
again while the next block of its sequence fills, some layers at every step, so that no step waits for it.

A block's id is its name. Its place says where it lies, and its kind. Coding a block again, or moving it,
changes only its place: tables, the prefix cache and reference counts know nothing of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby

import numpy as np

from polarlm.engine.backends.kv import Cache, FilledBlocks, KVLocation, layers_together
from polarlm.engine.backends.ops import Ops
from polarlm.engine.state.blocks import BlockAllocator, NeedsRequantize, OutOfBlocks
from polarlm.engine.state.kv_blocks import KVBlocks, OneKind, encode, of_layer
from polarlm.engine.state.layer_state import BlockArrays
from polarlm.engine.state.requantize.placement import BlockPlace, BlockPlacement
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.tables import BlockTable, Reservation

_LOW = 16  # the part of the store that new high-precision blocks leave free, for running sequences
_HIGH = 8  # the part that requantizing makes free
_RECENT = 8  # latest layers: the next one is expected to take as long as the slowest of them
_SHARED = 256  # blocks of a KV head that the threads of a CPU share
_ALONE = 0.05  # seconds between two units while no request takes steps


class MixedPrecisionAllocator(BlockAllocator):
    """Allocates blocks, with a place for each that is held or kept: high-precision ones while there is room, or by age.

    Blocks that the prefix cache alone knows are requantized first, as they would be allocated, then blocks of
    sequences, oldest first, their newest ones last. By room, all are requantized before the cache gives one up. By age,
    it keeps the newest ones of a sequence, and gives up blocks before blocks of running sequences are requantized.
    """

    def __init__(
        self, placement: BlockPlacement, size: int, bytes_each: tuple[int, int], newest: int, *, is_by_age: bool
    ) -> None:
        """size: the blocks that fit if none is high-precision; beside them, `placement` has room for the one that is
        being coded. bytes_each: of a high-precision block, and of another one. newest: of a sequence's blocks, see
        `HighPrecisionKind`."""
        super().__init__(size)
        self.placement, (self._high_precision_bytes, self._bytes), self.is_by_age = placement, bytes_each, is_by_age
        self.newest = newest
        self._newest: dict[
            int, None
        ] = {}  # the high-precision blocks that are the newest ones of a sequence, oldest first
        self._settled: dict[int, None] = {}  # the other high-precision blocks whose contents are complete, oldest first
        self._due: dict[int, None] = {}  # by age: the settled ones that no step may read any more

    @property
    def _room(self) -> int:
        return self.placement.free - self._bytes * (not self.placement.coding)

    def lacks_room(self, more: int | None = None) -> bool:
        """Whether blocks should be requantized before `more` are allocated; None: before anything is."""
        if more is None and self.is_by_age:
            return bool(self._due)
        wanted = self.size // _HIGH if more is None else more + self.size // _LOW
        return bool(self._settled or self._newest) and self._room < wanted * self._bytes

    def allocate(self, count: int = 1) -> list[int]:
        """As `BlockAllocator.allocate`; of several blocks, the last ones are high-precision.

        Raises NeedsRequantize if there is no room until blocks are requantized.
        """
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free} of {self.size} free")
        more = max(1, self._high_precision_bytes - self._bytes)  # additional bytes of a high-precision block
        newest = min(count, self.newest) if self.is_by_age else 0  # for as many high-precision blocks room is made
        while self._room < count * self._bytes + newest * more:
            if self._due or ((self._settled or self._newest) and not self.is_by_age):
                raise NeedsRequantize(f"{count} blocks wanted, and others can be requantized")
            if self.placement.coding and self.is_by_age:  # of blocks that a step may read as they are
                self.placement.give_up(next(iter(self.placement.coding)))
                continue
            kept = next((block for block in self._free if block in self._kept), None)
            if kept is not None:
                self._evict(kept)
            elif self._room >= count * self._bytes:
                break
            elif self._settled or self._newest:
                raise NeedsRequantize(f"{count} blocks wanted, and the newest of sequences can be requantized")
            else:  # the blocks of open spans are high-precision
                raise OutOfBlocks(f"{count} blocks wanted, and there is no room")
        taken = super().allocate(count)
        left = self._room - count * self._bytes - (0 if self.is_by_age else self.size * self._bytes // _LOW)
        high_precision = min(newest if self.is_by_age else count, max(0, left // more))
        for number, block in enumerate(taken):
            is_high_precision = number >= count - high_precision
            self.placement.place(block, is_high_precision=is_high_precision)
        return taken

    def _evict(self, block: int) -> None:
        """Take a free block from the prefix cache."""
        self._kept.pop(block)()
        self._free.move_to_end(block, last=False)
        self._free_place(block)

    def drop(self, block: int) -> None:
        super().drop(block)
        if not self.references(block):
            self._free_place(block)

    def release(self, block: int) -> None:
        super().release(block)
        if self.references(block):
            return
        if block not in self._kept:
            self._free_place(block)
        elif not self.is_by_age:
            self.settle(block)
        elif block in self._settled and block not in self._due:  # its sequence may go on
            del self._settled[block]
            self._newest[block] = None
            self.placement.give_up(block)

    def _free_place(self, block: int) -> None:
        for blocks in (self._newest, self._settled, self._due):
            blocks.pop(block, None)
        self.placement.release(block)

    def complete(self, block: int) -> None:
        """Note that a block is complete, one of a sequence's newest; a high-precision one can be requantized later."""
        if self.placement[block].is_high_precision and block not in self._settled:
            self._newest.setdefault(block)

    def settle(self, block: int) -> None:
        """Let a complete block be requantized if it is high_precision: it is no longer one of the newest."""
        if block in self._newest:
            del self._newest[block]
            self._settled[block] = None

    def require(self, block: int) -> None:
        """Let a block that can be requantized be so before the next step."""
        if block in self._settled:
            self._due[block] = None

    def begin_next(self) -> int | None:
        """Return the block that is being requantized, or else begin with the next one; None if there is none."""
        if not self.placement.coding and (high_precision := self._settled or self._newest):
            first = next(iter(high_precision))
            self.placement.begin(next((block for block in self._free if block in high_precision), first))
        return next(iter(self.placement.coding), None)

    def begin_with_settled(self) -> tuple[list[int], list[int]]:
        """Return the blocks that are being requantized, those that are due and others, and begin with as many as have
        room beside these, but not with the newest ones."""
        for block in (*self._due, *self._settled):
            if block not in self.placement.coding and self.placement.free >= self._bytes:
                self.placement.begin(block)
        due = [block for block in self.placement.coding if block in self._due]
        return due, [block for block in self.placement.coding if block not in self._due]

    def finish(self, block: int) -> None:
        """Let a block that is being requantized be one of fewer bits."""
        for blocks in (self._newest, self._settled, self._due):
            blocks.pop(block, None)
        self.placement.finish(block)


class MixedPrecisionBlocks(KVBlocks):
    """The `LayerState` of layers without a window, with two kinds of blocks in one memory."""

    blocks: MixedPrecisionAllocator

    def __init__(
        self, ops: Ops, shape: CacheShape, layers: tuple[int, ...], caches: Sequence[Cache], blocks: tuple[int, int]
    ):
        """As `KVBlocks`. One of the quantized blocks is for requantizing."""
        super().__init__(ops, shape, layers, caches, blocks)
        assert self.window is None
        ((high_precision, other),) = {(cache.high_precision.code_bytes, cache.code_bytes) for cache in caches}
        placement, kind = BlockPlacement(blocks[0], (high_precision, other), self._move), shape.high_precision
        assert kind is not None
        self.quantized = self.blocks = MixedPrecisionAllocator(
            placement, blocks[0] - 1, (high_precision, other), kind.newest, is_by_age=kind.is_by_age
        )
        self._of_kinds = (
            self._caches,
            {layer: cache.high_precision for layer, cache in self._caches.items()},
        )  # others, high-precision
        self._heads = [shape.kv_layers[layer].kv_heads for layer in layers]
        self._more_bytes = sum(self._heads) * (
            high_precision - other
        )  # additional bytes of a high-precision block, in all layers

    def _of_kind(self, layer: int, *, is_high_precision: bool) -> Cache:
        return self._of_kinds[is_high_precision][layer]

    def _by_kind(self, blocks: Sequence[int]) -> Iterator[OneKind]:
        places = [self.blocks.placement[block] for block in blocks]
        for is_high_precision in (False, True):
            if indices := [index for index, place in enumerate(places) if place.is_high_precision is is_high_precision]:
                yield OneKind(self._of_kinds[is_high_precision], [places[index].number for index in indices], indices)

    def _move(self, target: BlockPlace, source: BlockPlace) -> None:
        for layer in self.layers:
            self._of_kind(layer, is_high_precision=source.is_high_precision).move(target.number, source.number)

    def lacks_room(self, tokens: int | None = None) -> bool:
        """Whether blocks should be requantized before a span of a prompt's `tokens`; None: before anything."""
        return self.blocks.lacks_room(None if tokens is None else tokens // self.block_size + 1)

    def requantize(self) -> bool:
        """Code one block again with fewer bits, all layers at once; False if there is none to be coded."""
        return self._code_next(len(self.layers))

    def requantize_layer(self) -> bool:
        """Code a layer of one block again; its last layer makes it one of fewer bits. False if there is no block to be
        coded."""
        return self._code_next(1)

    def _code_next(self, most: int) -> bool:
        block = self.blocks.begin_next()
        if block is None:
            return False
        self._code([block], most)
        self._finish([block])
        return True

    def requantize_aged(self) -> None:
        """Requantize blocks that have become too old for their bits, of all sequences together: all that a step may not
        read any more, and of the others as many layers as let them be ready after half a block's steps."""
        if not self.blocks.is_by_age:
            return
        count = len(self.layers)
        while self.lacks_room():
            due, others = self.blocks.begin_with_settled()
            self._code(due or others, count)
            self._finish(due or others)
        _, others = self.blocks.begin_with_settled()
        if not others:
            return
        at_once = layers_together(self._ops.encoded_at_once, self._heads, len(others))
        self._code(others, max(at_once, -(-2 * count // self.block_size)))

    def _finish(self, blocks: Sequence[int]) -> None:
        """Let blocks have fewer bits whose layers have all been requantized."""
        for block in blocks:
            if self.blocks.placement.done[block] == len(self.layers):
                self.blocks.finish(block)

    def _code(self, blocks: Sequence[int], most: int) -> None:
        """Code the next layers of blocks that are being requantized, at most `most` of each."""
        placement = self.blocks.placement
        for first, alike in groupby(sorted(blocks, key=placement.done.__getitem__), placement.done.__getitem__):
            group = [*alike]
            sources, targets = ([of[block].number for block in group] for of in (placement, placement.coding))
            layers = self.layers[first : first + most]
            together = layers_together(max(self._ops.encoded_at_once, _SHARED), self._heads, len(group))
            for start in range(0, len(layers), together):
                self._code_together(layers[start : start + together], sources, targets)
            placement.done.update(dict.fromkeys(group, first + len(layers)))

    def _code_together(self, layers: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Code some layers of blocks again, by their numbers: half of the layers, or of the blocks, after the other as
        long as there is no memory for what all of them decode to. Raises MemoryError if there is none for one."""
        with suppress(MemoryError):
            encode(self._ops, [self._decoded(layer, sources, targets) for layer in layers])
            return
        half, of_blocks = len(layers) // 2, len(sources) // 2
        if half:
            self._code_together(layers[:half], sources, targets)
            self._code_together(layers[half:], sources, targets)
        elif of_blocks:
            self._code_together(layers, sources[:of_blocks], targets[:of_blocks])
            self._code_together(layers, sources[of_blocks:], targets[of_blocks:])
        else:
            raise MemoryError("no memory for a block that is requantized")

    def _decoded(self, layer: int, sources: Sequence[int], targets: Sequence[int]) -> FilledBlocks:
        """Return what high-precision blocks of a layer decode to, to be requantized."""
        buffer = self._ops.decode_blocks(self._of_kind(layer, is_high_precision=True), sources)
        decoded = [KVLocation(buffer, number) for number in range(len(sources))]
        return FilledBlocks([self._caches[layer]], targets, decoded)

    def _by_place(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        return self.blocks.placement.numbers(blocks)

    def _cache_of_newest(self, layer: int) -> Cache:
        return self._of_kind(layer, is_high_precision=True)

    def commit(self, table: BlockTable, reservation: Reservation, length: int) -> None:
        before = len(table.quantized)
        super().commit(table, reservation, length)
        if len(table.quantized) == before:
            return
        for block in table.quantized[before:]:
            self.blocks.complete(block)
        settled = table.quantized[: max(0, len(table.quantized) + 1 - self.blocks.newest)]
        for block in settled:
            self.blocks.settle(block)
        for block in settled[:-1]:
            self.blocks.require(block)

    def is_high_precision(self, block: int) -> bool:
        """Whether a block is of the high-precision kind."""
        return self.blocks.placement[block].is_high_precision

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        """As `KVBlocks.write_blocks`, with arrays of blocks that are not high-precision, which these become."""
        for block in blocks:
            if self.is_high_precision(block):
                self.blocks.placement.lower(block)
        super().write_blocks(blocks, arrays)

    def write_high_precision(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        """Write blocks with arrays of high-precision ones. Those that are not high-precision have these requantized."""
        for caches, numbers, indices in self._by_kind(blocks):
            for layer, cache in caches.items():
                layer_arrays = {name: array[list(indices)] for name, array in of_layer(arrays, layer).items()}
                if cache is self._caches[layer]:
                    self._code_arrays(layer, numbers, layer_arrays)
                else:
                    self._ops.write_blocks(cache, numbers, layer_arrays)
        for block in blocks:
            self.blocks.complete(block)
            if not self.blocks.is_by_age:
                self.blocks.settle(block)

    def _code_arrays(self, layer: int, places: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        """Code a layer of blocks that are not high-precision from arrays of high-precision ones."""
        ops, format = self._ops, self._caches[layer].high_precision.format
        aside = ops.of_layer(layer).cache(format, len(places), 0, [self._caches[layer].high_precision])
        ops.write_blocks(aside, range(len(places)), arrays)
        buffer = ops.decode_blocks(aside, range(len(places)))
        sources = [KVLocation(buffer, number) for number in range(len(places))]
        encode(ops, [FilledBlocks([self._caches[layer]], places, sources)])

    def bytes(self, table: BlockTable) -> int:
        high_precision = sum(map(self.is_high_precision, table.quantized))
        return super().bytes(table) + high_precision * self._more_bytes


class Requantizer:
    """Makes room in a store with two kinds of blocks, layer by layer, between units of work."""

    def __init__(self, blocks: MixedPrecisionBlocks | None) -> None:
        """blocks: None for a store whose blocks are all alike."""
        self._blocks = blocks
        self._seconds: deque[float] = deque(maxlen=_RECENT)  # time of each recent layer
        self._awaited: int | None = None  # tokens of a prompt that waits for room

    def must_wait(self, tokens: int) -> bool:
        """Return whether a prompt of `tokens` must wait for `run`: else its unit would code many blocks."""
        is_short = self._blocks is not None and self._blocks.lacks_room(tokens)
        self._awaited = tokens if is_short else None
        return is_short

    def run(self, step: float | None) -> int:
        """Code all blocks that are too old for their bits, and then others if the store should have more room; return
        how many layers of the latter. step: the seconds of a step, which this exceeds only if a single layer does; None
        if no request takes steps."""
        blocks, seconds, coded = self._blocks, _ALONE if step is None else step, 0
        if blocks is None:
            return 0
        blocks.requantize_aged()  # at once, so that what a step reads does not depend on how long others take
        awaited, self._awaited = self._awaited, None
        started = before = time.perf_counter()
        while not coded or before - started + max(self._seconds) <= seconds:
            if not (blocks.lacks_room() or blocks.lacks_room(awaited)) or not blocks.requantize_layer():
                break
            now = time.perf_counter()
            self._seconds.append(now - before)
            before, coded = now, coded + 1
        return coded

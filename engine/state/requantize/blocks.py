"""The state of attention with two kinds of blocks: the newest ones of a sequence have more bits than older ones.

A new block is high-precision if there is room. The oldest of the newest ones is requantized while the next block of its
sequence fills, some layers at every step, so that no step waits for it.

A block's id is its name. Its place says where it lies, and its kind. Requantizing a block, or moving it, changes only
its place: tables, the prefix cache and reference counts know nothing of it.
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
from polarlm.engine.state.kv_blocks import BlocksOfKind, KVBlocks, encode, layer_arrays
from polarlm.engine.state.layer_state import BlockArrays
from polarlm.engine.state.requantize.placement import BlockPlace, BlockPlacement
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.tables import BlockTable, Reservation

_SPARE_SHARE = (
    16  # a prompt waits until it leaves this part of the store free, for the next blocks of running sequences
)
_RECENT_LAYERS = 8  # the next layer is expected to take as long as the slowest of these
_SHARED_BLOCKS = 256  # blocks of a KV head that the threads of a CPU share
_IDLE_SECONDS = 0.05  # seconds between two units while no request takes steps


class MixedPrecisionAllocator(BlockAllocator):
    """Allocates blocks, with a place for each that is held or kept: high-precision ones for the end of a sequence.

    For these it gives up blocks that the prefix cache alone knows; blocks of running sequences are requantized only if
    the others find no place otherwise.
    """

    def __init__(self, placement: BlockPlacement, size: int, bytes_each: tuple[int, int], newest: int) -> None:
        """size: the blocks that fit if none is high-precision; `placement` has room for one more, which is being
        requantized. bytes_each: of a high-precision block, and of a low-precision one. newest: see
        `HighPrecisionKind`."""
        super().__init__(size)
        self.placement, (self._high_precision_bytes, self._bytes) = placement, bytes_each
        self.newest = newest
        # High-precision blocks that are complete, each the oldest first.
        self._newest: dict[int, None] = {}  # the newest ones of a sequence
        self._aged: dict[int, None] = {}  # the others, which may be requantized
        self._due: dict[int, None] = {}  # those of the aged that no step may read any more

    @property
    def _room(self) -> int:
        return self.placement.free - self._bytes * (not self.placement.targets)

    @property
    def has_due(self) -> bool:
        """Whether blocks must be requantized before the next step."""
        return bool(self._due)

    def lacks_room(self, count: int) -> bool:
        """Whether blocks can and should be requantized before `count` are allocated."""
        return bool(self._aged or self._newest) and self._room < (count + self.size // _SPARE_SHARE) * self._bytes

    def allocate(self, count: int = 1, *, are_guesses: bool = False) -> list[int]:
        """As `BlockAllocator.allocate`; of several blocks, the last ones are high-precision.

        Raises NeedsRequantize if there is no room until blocks are requantized.
        """
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free} of {self.size} free")
        extra_bytes = max(1, self._high_precision_bytes - self._bytes)  # additional bytes of a high-precision block
        newest = min(count, self.newest)
        while self._room < count * self._bytes + newest * extra_bytes:
            if self._due:
                raise NeedsRequantize(f"{count} blocks wanted, and others can be requantized")
            if self.placement.targets:  # of blocks that a step may read as they are
                self.placement.give_up(next(iter(self.placement.targets)))
                continue
            kept_block = next((block for block in self._free if block in self._kept), None)
            if kept_block is not None:
                self._evict(kept_block)
            elif self._room >= count * self._bytes:
                break
            elif self._aged or self._newest:
                raise NeedsRequantize(f"{count} blocks wanted, and the newest of sequences can be requantized")
            else:  # the blocks of open spans are high-precision
                raise OutOfBlocks(f"{count} blocks wanted, and there is no room")
        blocks = super().allocate(count, are_guesses=are_guesses)
        high_precision = min(newest, max(0, (self._room - count * self._bytes) // extra_bytes))
        for number, block in enumerate(blocks):
            self.placement.place(block, is_high_precision=number >= count - high_precision)
        return blocks

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
        elif block in self._aged and block not in self._due:  # its sequence may go on
            del self._aged[block]
            self._newest[block] = None
            self.placement.give_up(block)

    def _free_place(self, block: int) -> None:
        for blocks in (self._newest, self._aged, self._due):
            blocks.pop(block, None)
        self.placement.release(block)

    def add_newest(self, block: int) -> None:
        """Note that a block is complete, and one of the newest of its sequence."""
        if self.placement[block].is_high_precision and block not in self._aged:
            self._newest.setdefault(block)

    def add_aged(self, block: int, *, is_due: bool) -> None:
        """Let a complete block be requantized if it is high-precision: it is no longer one of the newest. is_due: no
        step may read it any more as it is."""
        if block in self._newest:
            del self._newest[block]
            self._aged[block] = None
        if is_due and block in self._aged:
            self._due[block] = None

    def begin_next(self) -> int | None:
        """Return the block that is being requantized, or else begin with the next one; None if there is none."""
        if not self.placement.targets and (blocks := self._aged or self._newest):
            first = next(iter(blocks))
            self.placement.begin(next((block for block in self._free if block in blocks), first))
        return next(iter(self.placement.targets), None)

    def begin_aged(self) -> tuple[list[int], list[int]]:
        """Begin with as many aged blocks as have room in both kinds. Return the blocks that are being requantized:
        those that are due, and others."""
        for block in (*self._due, *self._aged):
            if block not in self.placement.targets and self.placement.free >= self._bytes:
                self.placement.begin(block)
        due = [block for block in self.placement.targets if block in self._due]
        return due, [block for block in self.placement.targets if block not in self._due]

    def finish(self, block: int) -> None:
        """Let a block that is being requantized be low-precision."""
        for blocks in (self._newest, self._aged, self._due):
            blocks.pop(block, None)
        self.placement.finish(block)


def _high_precision_of(cache: Cache) -> Cache:
    """The cache of the high-precision blocks of a layer that has both kinds."""
    assert cache.high_precision is not None
    return cache.high_precision


class MixedPrecisionBlocks(KVBlocks):
    """The `LayerState` of layers without a window, with two kinds of blocks in one memory."""

    blocks: MixedPrecisionAllocator

    def __init__(
        self, ops: Ops, shape: CacheShape, layers: tuple[int, ...], caches: Sequence[Cache], blocks: tuple[int, int]
    ):
        """As `KVBlocks`. One of the quantized blocks is for requantizing."""
        super().__init__(ops, shape, layers, caches, blocks)
        assert self.window is None
        high_caches = {layer: _high_precision_of(cache) for layer, cache in self._caches.items()}
        ((high, low),) = {(high_caches[layer].code_bytes, self._caches[layer].code_bytes) for layer in layers}
        placement, kind = BlockPlacement(blocks[0], (high, low), self._move), shape.high_precision
        assert kind is not None
        self.quantized = self.blocks = MixedPrecisionAllocator(placement, blocks[0] - 1, (high, low), kind.newest)
        # low-precision, high-precision
        self._kinds = self._caches, high_caches
        self._heads = [shape.kv_layers[layer].kv_heads for layer in layers]
        self._more_bytes = sum(self._heads) * (high - low)  # additional bytes of a high-precision block, in all layers

    def _cache_of_kind(self, layer: int, *, is_high_precision: bool) -> Cache:
        return self._kinds[is_high_precision][layer]

    def _split_by_kind(self, blocks: Sequence[int]) -> Iterator[BlocksOfKind]:
        places = [self.blocks.placement[block] for block in blocks]
        for is_high in (False, True):
            if indices := [index for index, place in enumerate(places) if place.is_high_precision is is_high]:
                yield BlocksOfKind(self._kinds[is_high], [places[index].number for index in indices], indices)

    def _move(self, target: BlockPlace, source: BlockPlace) -> None:
        for layer in self.layers:
            self._cache_of_kind(layer, is_high_precision=source.is_high_precision).move(target.number, source.number)

    def lacks_room(self, tokens: int) -> bool:
        """Whether blocks should be requantized before a span of a prompt's `tokens`."""
        return self.blocks.lacks_room(tokens // self.block_size + 1)

    def requantize(self) -> bool:
        """Requantize one block, all layers at once; False if there is none."""
        return self._requantize_next(len(self.layers))

    def requantize_layer(self) -> bool:
        """Requantize a layer of one block; its last layer makes it low-precision. False if there is no block."""
        return self._requantize_next(1)

    def _requantize_next(self, most_layers: int) -> bool:
        block = self.blocks.begin_next()
        if block is None:
            return False
        self._requantize_layers([block], most_layers)
        self._finish([block])
        return True

    def requantize_aged(self) -> None:
        """Requantize blocks that have become too old for their bits, of all sequences together: all that a step may not
        read any more, and of the others as many layers as let them be ready after half a block's steps."""
        count = len(self.layers)
        while self.blocks.has_due:
            due, others = self.blocks.begin_aged()
            self._requantize_layers(due or others, count)
            self._finish(due or others)
        _, others = self.blocks.begin_aged()
        if not others:
            return
        group = layers_together(self._ops.encoded_at_once, self._heads, len(others))
        self._requantize_layers(others, max(group, -(-2 * count // self.block_size)))

    def _finish(self, blocks: Sequence[int]) -> None:
        """Make blocks low-precision whose layers have all been requantized."""
        for block in blocks:
            if self.blocks.placement.layers_done[block] == len(self.layers):
                self.blocks.finish(block)

    def _requantize_layers(self, blocks: Sequence[int], most: int) -> None:
        """Requantize the next layers of blocks that are being requantized, at most `most` of each."""
        placement = self.blocks.placement
        done = placement.layers_done.__getitem__
        for first, members in groupby(sorted(blocks, key=done), done):
            group = [*members]
            sources = [placement[block].number for block in group]
            targets = [placement.targets[block].number for block in group]
            layers = self.layers[first : first + most]
            together = layers_together(max(self._ops.encoded_at_once, _SHARED_BLOCKS), self._heads, len(group))
            for start in range(0, len(layers), together):
                self._requantize_group(layers[start : start + together], sources, targets)
            placement.layers_done.update(dict.fromkeys(group, first + len(layers)))

    def _requantize_group(self, layers: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Requantize some layers of blocks, by their numbers: half of the layers, or of the blocks, after the other
        half as long as there is no memory for what all of them decode to. Raises MemoryError if there is none for
        one."""
        with suppress(MemoryError):
            encode(self._ops, [self._decode(layer, sources, targets) for layer in layers])
            return
        half, half_blocks = len(layers) // 2, len(sources) // 2
        if half:
            self._requantize_group(layers[:half], sources, targets)
            self._requantize_group(layers[half:], sources, targets)
        elif half_blocks:
            self._requantize_group(layers, sources[:half_blocks], targets[:half_blocks])
            self._requantize_group(layers, sources[half_blocks:], targets[half_blocks:])
        else:
            raise MemoryError("no memory for a block that is requantized")

    def _decode(self, layer: int, sources: Sequence[int], targets: Sequence[int]) -> FilledBlocks:
        """Return what high-precision blocks of a layer decode to, to be encoded with fewer bits."""
        buffer = self._ops.decode_blocks(self._cache_of_kind(layer, is_high_precision=True), sources)
        values = [KVLocation(buffer, number) for number in range(len(sources))]
        return FilledBlocks([self._caches[layer]], targets, values)

    def _numbers(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        return self.blocks.placement.numbers(blocks)

    def _cache_of_newest(self, layer: int) -> Cache:
        return self._cache_of_kind(layer, is_high_precision=True)

    def commit(self, table: BlockTable, reservation: Reservation, length: int) -> None:
        count = len(table.quantized)
        super().commit(table, reservation, length)
        if len(table.quantized) == count:
            return
        for block in table.quantized[count:]:
            self.blocks.add_newest(block)
        aged = table.quantized[: max(0, len(table.quantized) + 1 - self.blocks.newest)]
        for block in aged:
            self.blocks.add_aged(block, is_due=block != aged[-1])

    def is_high_precision(self, block: int) -> bool:
        return self.blocks.placement[block].is_high_precision

    def write_blocks(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        """As `KVBlocks.write_blocks`, with arrays of low-precision blocks, which these become."""
        for block in blocks:
            if self.is_high_precision(block):
                self.blocks.placement.lower(block)
        super().write_blocks(blocks, arrays)

    def write_high_precision(self, blocks: Sequence[int], arrays: BlockArrays) -> None:
        """Write blocks with arrays of high-precision ones, which are requantized for low-precision blocks."""
        for caches, numbers, indices in self._split_by_kind(blocks):
            for layer, cache in caches.items():
                selected = {name: array[list(indices)] for name, array in layer_arrays(arrays, layer).items()}
                if cache is self._caches[layer]:
                    self._write_requantized(layer, numbers, selected)
                else:
                    self._ops.write_blocks(cache, numbers, selected)
        for block in blocks:
            self.blocks.add_newest(block)

    def _write_requantized(self, layer: int, numbers: Sequence[int], arrays: Mapping[str, np.ndarray]) -> None:
        """Write a layer of low-precision blocks from arrays of high-precision ones."""
        ops, high = self._ops, self._cache_of_kind(layer, is_high_precision=True)
        buffer_cache = ops.layer_ops(layer).cache(high.format, len(numbers), 0, [high])
        ops.write_blocks(buffer_cache, range(len(numbers)), arrays)
        buffer = ops.decode_blocks(buffer_cache, range(len(numbers)))
        sources = [KVLocation(buffer, number) for number in range(len(numbers))]
        encode(ops, [FilledBlocks([self._caches[layer]], numbers, sources)])

    def bytes(self, table: BlockTable) -> int:
        return super().bytes(table) + sum(map(self.is_high_precision, table.quantized)) * self._more_bytes


class Requantizer:
    """Requantizes blocks between units of work: all that are due, and others to make room for a prompt that waits."""

    def __init__(self, blocks: MixedPrecisionBlocks | None) -> None:
        """blocks: None for a store with one kind of blocks."""
        self._blocks = blocks
        self._layer_seconds: deque[float] = deque(maxlen=_RECENT_LAYERS)
        self._tokens_to_fit: int | None = None  # of a prompt that waits for room

    def must_wait(self, tokens: int) -> bool:
        """Return whether a prompt of `tokens` must wait for `run`: else its unit would requantize many blocks."""
        is_short = self._blocks is not None and self._blocks.lacks_room(tokens)
        self._tokens_to_fit = tokens if is_short else None
        return is_short

    def run(self, step_seconds: float | None) -> int:
        """Requantize all blocks that are due, and then others if a prompt waits for room; return how many layers of the
        latter. step_seconds: the time of a step, which this exceeds only if a single layer does; None if no request
        takes steps."""
        blocks, layers = self._blocks, 0
        if blocks is None:
            return 0
        blocks.requantize_aged()  # at once, so that what a step reads does not depend on how long others take
        tokens, self._tokens_to_fit = self._tokens_to_fit, None
        limit = _IDLE_SECONDS if step_seconds is None else step_seconds
        started = layer_started = time.perf_counter()
        while not layers or layer_started - started + max(self._layer_seconds) <= limit:
            if tokens is None or not blocks.lacks_room(tokens) or not blocks.requantize_layer():
                break
            now = time.perf_counter()
            self._layer_seconds.append(now - layer_started)
            layer_started, layers = now, layers + 1
        return layers

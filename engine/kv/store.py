"""The KV store: where every sequence's K/V lies, and what becomes codes when.

A sequence is cut into blocks of N tokens. Its first block (the sink) and the block it is filling (the tail) stay in
full precision, in *exact slots*; every complete block between them is encoded. New tokens pass through a `Span`:

    span = store.open(sequence, count)      blocks are reserved, or OutOfBlocks and nothing has changed
    for every layer:                        append → attend (any number of chunks), then
        store.seal(layer, span)             complete blocks become codes, the rest goes to the tail
    store.commit(span)                      the sequence is longer now       (or store.abort(span))

A span of one token writes straight into the tail; a longer one keeps one layer's new K/V in a buffer of its own until
that layer is sealed. Layers that see the same window share block tables (a `Group`), and blocks that no later token of
a group can see are given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.backends.ops import Array, CacheSpan, LayerCache, Ops
from engine.codecs import Codec
from engine.conditioning import Conditioning
from engine.kv.blocks import BlockAllocator, OutOfBlocks
from engine.kv.plan import CacheShape, StorePlan


@dataclass
class BlockTable:
    """Where the blocks of one sequence lie, for the layers of one group.

    Blocks are numbered from the start of the sequence: block 0 is the sink, block i ≥ 1 is coded[i − 1 − dropped].
    """

    sink: int | None = None  # exact slot
    coded: list[int] = field(default_factory=list)
    dropped: int = 0  # coded blocks at the front that left the window
    tail: int | None = None  # exact slot, held while the current block has tokens


@dataclass
class SequenceKV:
    """A sequence in the store: how many tokens it holds, and one block table per group."""

    length: int
    tables: list[BlockTable]


@dataclass
class _Growth:
    """What one span adds to one block table."""

    tail: int | None  # slot for the tokens behind the last complete block; in a step, for the block it is in
    sink: int | None  # slot for block 0, when this span completes it
    coded: list[int]  # ids for the complete blocks first_coded, first_coded + 1, …
    first_coded: int  # earlier ones are out of the window before anyone reads their codes
    new_slots: list[int]  # exact slots taken from the allocator


@dataclass
class Span:
    """`count` new tokens of a sequence, from position `start`, on their way into the store."""

    sequence: SequenceKV
    start: int
    count: int
    growth: list[_Growth]
    buffer: tuple[Array, Array] | None  # k, v (K, start % N + count, D) of the layer in work; None: write to the tail
    now_as_codes: bool = False


class Group:
    """The layers that see the same window: their allocators and arrays."""

    def __init__(
        self, ops: Ops, shape: CacheShape, window: int | None, layers: tuple[int, ...], coded: int, exact: int
    ):
        self.window = window
        self.layers = layers
        self.coded = BlockAllocator(coded)
        self.exact = BlockAllocator(exact)
        self.caches = {layer: _allocate_layer(ops, shape, coded, exact) for layer in layers}

    def oldest_visible(self, length: int) -> int:
        """The first position that the token behind `length` tokens, and any later one, can still see."""
        return 0 if self.window is None else max(0, length - self.window + 1)


def _allocate_layer(ops: Ops, shape: CacheShape, coded: int, exact: int) -> LayerCache:
    n, k, d = shape.block_size, shape.kv_heads, shape.head_dim

    def codes(codec: Codec) -> dict[str, Array]:
        return {name: ops.zeros((k, coded, *f.shape), f.dtype) for name, f in codec.fields(n, d).items()}

    return LayerCache(
        codec_k=shape.codec_k,
        codec_v=shape.codec_v,
        k=codes(shape.codec_k),
        v=codes(shape.codec_v),
        k_mean=ops.zeros((k, coded, d), np.float16) if shape.centre_keys else None,
        exact_k=ops.zeros((exact, k, n, d), np.float32),
        exact_v=ops.zeros((exact, k, n, d), np.float32),
    )


class KVStore:
    """All block storage of a model. Not thread-safe; the engine holds its lock around every call."""

    def __init__(self, ops: Ops, plan: StorePlan, conditioning: Conditioning):
        self.ops = ops
        self.plan = plan
        self.shape = plan.shape
        self.conditioning = conditioning
        self.groups = [
            Group(ops, plan.shape, window, layers, coded, plan.exact_slots)
            for (window, layers), coded in zip(plan.shape.groups, plan.coded_blocks, strict=True)
        ]
        self._group_of = {layer: i for i, group in enumerate(self.groups) for layer in group.layers}

    # -- sequences ---------------------------------------------------------------------------------------------

    def new_sequence(self) -> SequenceKV:
        return SequenceKV(0, [BlockTable() for _ in self.groups])

    def release(self, sequence: SequenceKV) -> None:
        """Give back everything the sequence holds; it is empty afterwards."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            for slot in (table.sink, table.tail):
                if slot is not None:
                    group.exact.release(slot)
            for block in table.coded:
                group.coded.release(block)
        sequence.length, sequence.tables = 0, [BlockTable() for _ in self.groups]

    def forkable(self, sequence: SequenceKV, length: int) -> int:
        """The most tokens ≤ `length` that a fork can keep: any number inside an exact block, else whole blocks."""
        n = self.shape.block_size
        length = min(length, sequence.length)
        if n <= length < sequence.length // n * n:
            length = length // n * n
        # A window that has moved on has dropped blocks which a shorter sequence would still see.
        if length < sequence.length and any(
            t.dropped or (t.sink is None and sequence.length >= n) for t in sequence.tables
        ):
            return 0
        return length

    def fork(self, sequence: SequenceKV, length: int) -> SequenceKV:
        """A sequence with the first `length` tokens (as `forkable` gave it) of another.

        Coded blocks and the sink are shared, the tail is copied. Raises OutOfBlocks and changes nothing.
        """
        n = self.shape.block_size
        complete, rest = divmod(length, n)
        tails: list[list[int]] = []
        try:
            for group in self.groups:
                tails.append(group.exact.allocate(1 if rest else 0))
        except OutOfBlocks:
            for group, taken in zip(self.groups, tails, strict=False):
                for slot in taken:
                    group.exact.release(slot)
            raise
        copy = SequenceKV(length, [])
        for group, table, tail in zip(self.groups, sequence.tables, tails, strict=True):
            kept = BlockTable(dropped=table.dropped, coded=table.coded[: max(0, complete - 1 - table.dropped)])
            if complete and table.sink is not None:
                kept.sink = table.sink
                group.exact.retain(table.sink)
            for block in kept.coded:
                group.coded.retain(block)
            if tail:
                kept.tail = tail[0]
                source = table.tail if complete == sequence.length // n else table.sink
                for cache in group.caches.values():
                    k, v = cache.exact_k[source], cache.exact_v[source]
                    self.ops.copy_exact(cache, kept.tail, k[:, :rest], v[:, :rest])
            copy.tables.append(kept)
        return copy

    # -- growing a sequence ------------------------------------------------------------------------------------

    def open(self, sequence: SequenceKV, count: int, *, now_as_codes: bool = False) -> Span:
        """Reserve room for `count` more tokens. Raises OutOfBlocks and changes nothing."""
        growth: list[_Growth] = []
        try:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                growth.append(self._grow(group, table, sequence.length, count))
        except OutOfBlocks:
            self._give_back(growth)
            raise
        n, k, d = self.shape.block_size, self.shape.kv_heads, self.shape.head_dim
        rows = sequence.length % n + count
        buffer = None if count == 1 else (self.ops.empty((k, rows, d)), self.ops.empty((k, rows, d)))
        return Span(sequence, sequence.length, count, growth, buffer, now_as_codes)

    def _grow(self, group: Group, table: BlockTable, start: int, count: int) -> _Growth:
        n = self.shape.block_size
        end = start + count
        first, complete, rest = start // n, end // n, end % n
        oldest = group.oldest_visible(end)
        fills_sink = first == 0 and complete > 0 and oldest < n
        writes_tail = rest > 0 or (count == 1 and not fills_sink)
        first_coded = max(1, first, oldest // n)
        coded = group.coded.allocate(max(0, complete - first_coded))
        # The tail's slot goes on with the block it holds. A longer span that completes this block leaves the slot as
        # it is until commit, so that an aborted span has destroyed nothing.
        same_block = table.tail is not None and (fills_sink or complete == first or count == 1)
        try:
            new_slots = group.exact.allocate(fills_sink + writes_tail - same_block)
        except OutOfBlocks:
            for block in coded:
                group.coded.release(block)
            raise
        slots = ([table.tail] if same_block else []) + new_slots
        sink = slots.pop(0) if fills_sink else None
        return _Growth(slots.pop(0) if writes_tail else None, sink, coded, first_coded, new_slots)

    def _give_back(self, growth: Sequence[_Growth]) -> None:
        for group, grown in zip(self.groups, growth, strict=False):
            for block in grown.coded:
                group.coded.release(block)
            for slot in grown.new_slots:
                group.exact.release(slot)

    def view(self, layer: int, span: Span, rows: slice, position: int) -> CacheSpan:
        """What the ops need to know of `span` in one layer, for the rows that start at `position`."""
        index = self._group_of[layer]
        cache, table, n = self.cache(layer), span.sequence.tables[index], self.shape.block_size
        now_k, now_v = span.buffer or self._slot(cache, span.growth[index])
        now_start = span.start // n * n
        return CacheSpan(
            rows=rows,
            position=position,
            now_start=now_start,
            now_k=now_k,
            now_v=now_v,
            sink=table.sink if now_start else None,
            table=table.coded,
            table_start=(1 + table.dropped) * n,
            now_as_codes=span.now_as_codes and now_start > 0,
        )

    def _slot(self, cache: LayerCache, grown: _Growth) -> tuple[Array, Array]:
        slot = grown.sink if grown.sink is not None else grown.tail
        return cache.exact_k[slot], cache.exact_v[slot]

    def cache(self, layer: int) -> LayerCache:
        return self.groups[self._group_of[layer]].caches[layer]

    def begin_layer(self, layer: int, span: Span) -> None:
        """Bring the current block's earlier tokens into the span's buffer, if it has one."""
        filled = span.start % self.shape.block_size
        if span.buffer is None or filled == 0:
            return
        cache, table = self.cache(layer), span.sequence.tables[self._group_of[layer]]
        span.buffer[0][:, :filled] = cache.exact_k[table.tail][:, :filled]
        span.buffer[1][:, :filled] = cache.exact_v[table.tail][:, :filled]

    def seal(self, layer: int, span: Span) -> None:
        """All K/V of the span are appended: encode its complete blocks, keep the rest in full precision."""
        n = self.shape.block_size
        index = self._group_of[layer]
        cache, grown = self.cache(layer), span.growth[index]
        now_k, now_v = span.buffer or self._slot(cache, grown)
        base = span.start // n  # number of the block at now[:, 0]
        if grown.coded:
            rows = slice((grown.first_coded - base) * n, (grown.first_coded - base + len(grown.coded)) * n)
            shape = (now_k.shape[0], len(grown.coded), n, now_k.shape[2])
            self.ops.encode_blocks(cache, grown.coded, now_k[:, rows].reshape(shape), now_v[:, rows].reshape(shape))
        if span.buffer is None:
            return
        if grown.sink is not None:
            self.ops.copy_exact(cache, grown.sink, now_k[:, :n], now_v[:, :n])
        if grown.tail is not None:
            rest = slice(((span.start + span.count) // n - base) * n, None)
            self.ops.copy_exact(cache, grown.tail, now_k[:, rest], now_v[:, rest])

    def commit(self, span: Span) -> None:
        """Every layer is sealed: the sequence has grown, and blocks that left the window are given back."""
        sequence, n = span.sequence, self.shape.block_size
        sequence.length += span.count
        complete, rest = divmod(sequence.length, n)
        for group, table, grown in zip(self.groups, sequence.tables, span.growth, strict=True):
            if table.tail is not None and table.tail not in (grown.tail, grown.sink):
                group.exact.release(table.tail)
            table.tail = grown.tail
            if table.tail is not None and rest == 0:
                group.exact.release(table.tail)
                table.tail = None
            if grown.sink is not None:
                table.sink = grown.sink
            oldest = group.oldest_visible(sequence.length)
            if table.sink is not None and oldest >= n:
                group.exact.release(table.sink)
                table.sink = None
            gone = min(len(table.coded), max(0, oldest // n - 1 - table.dropped))
            for block in table.coded[:gone]:
                group.coded.release(block)
            table.coded = table.coded[gone:] + grown.coded
            table.dropped = max(0, complete - 1) - len(table.coded)

    def abort(self, span: Span) -> None:
        """Forget a span before its commit; the sequence is as it was."""
        self._give_back(span.growth)

    # -- what it takes -----------------------------------------------------------------------------------------

    def bytes_held(self, sequence: SequenceKV) -> int:
        """Bytes of the blocks and slots that a sequence holds, shared ones included."""
        total = 0
        for group, table in zip(self.groups, sequence.tables, strict=True):
            exact = (table.sink is not None) + (table.tail is not None)
            total += len(group.layers) * (len(table.coded) * self.shape.coded_bytes + exact * self.shape.exact_bytes)
        return total

"""The KV store: where every sequence's K/V lies, and what becomes codes when.

A sequence is cut into blocks of N tokens. Its first block (the sink) and the block it is filling (the tail) stay in
full precision, in *exact slots*; every complete block between them is encoded. New tokens pass through a `Span`:

    span = store.open(sequence, count)      blocks are reserved, or OutOfBlocks and nothing has changed
    for every layer:                        begin_layer, append and attend (any number of chunks); once all is appended
        store.seal(layer, span)             complete blocks become codes, the rest goes to the tail
    store.commit(span)                      the sequence is longer now       (or store.abort(span))

A span of one token writes straight into the tail; a longer one keeps one layer's new K/V in a buffer of its own until
that layer is sealed. Layers that see the same window share block tables, and blocks that no later token of a group can
see are given back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.backends.ops import Buffer, Cache, CacheSpan, Ops, Place
from engine.codecs import NotFinite
from engine.errors import EngineError
from engine.kv.blocks import OutOfBlocks
from engine.kv.plan import StorePlan
from engine.kv.tables import BlockTable, Growth, TableGroup
from engine.quantization.conditioning import Conditioning
from engine.quantization.metric import Metric
from engine.sampling.sample import NOT_FINITE

# What an error of a layer's keys and of its values costs; None where the nearest code is taken.
Metrics = tuple[Metric | None, Metric | None]


@dataclass
class SequenceKV:
    """A sequence in the store: how many tokens it holds, one block table per group, and what its blocks are known by.

    hashes: of the complete blocks that others may find, and root, where these begin if it is not the usual
    place; see `engine.kv.prefix`.
    """

    length: int
    tables: list[BlockTable]
    hashes: list[bytes] = field(default_factory=list)
    root: bytes = b""


@dataclass
class Span:
    """`count` new tokens of a sequence, from position `start`, on their way into the store."""

    sequence: SequenceKV
    start: int
    count: int
    growth: list[Growth]
    buffer: Buffer | None  # K/V of the layer in work, from the start of the current block; None: write to the tail
    round_trip: bool = False


class KVStore:
    """All block storage of a model. Not thread-safe; the engine lets one thread in at a time."""

    def __init__(
        self, ops: Ops, plan: StorePlan, conditioning: Sequence[Conditioning], metrics: Sequence[Metrics] | None = None
    ):
        """conditioning, metrics: one of each layer; without metrics every codec takes the nearest code."""
        self.ops = ops
        self.plan = plan
        self.shape = plan.shape
        self.conditioning = conditioning
        self.groups: list[TableGroup] = []
        self._group_of: dict[int, int] = {}
        self._caches: dict[int, Cache] = {}
        for (window, layers), coded in zip(plan.shape.groups, plan.coded_blocks, strict=True):
            for layer in layers:
                self._group_of[layer] = len(self.groups)
                form = plan.shape.form(layer, *((None, None) if metrics is None else metrics[layer]))
                self._caches[layer] = ops.cache(form, coded, plan.exact_slots, list(self._caches.values()))
            self.groups.append(TableGroup(plan.shape.block_size, window, coded, plan.exact_slots))

    def cache(self, layer: int) -> Cache:
        """What the ops have made of one layer."""
        return self._caches[layer]

    def group_of(self, layer: int) -> int:
        """The number of the group of layers that share block tables with this one."""
        return self._group_of[layer]

    # -- sequences ---------------------------------------------------------------------------------------------

    def new_sequence(self) -> SequenceKV:
        return SequenceKV(0, [BlockTable() for _ in self.groups])

    def release(self, sequence: SequenceKV) -> None:
        """Give back everything the sequence holds; it is empty afterwards."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.release(table)
        sequence.length, sequence.tables, sequence.hashes = 0, [BlockTable() for _ in self.groups], []

    # -- growing a sequence ------------------------------------------------------------------------------------

    def open(self, sequence: SequenceKV, count: int, *, round_trip: bool = False) -> Span:
        """Reserve room for `count` more tokens. Raises OutOfBlocks and changes nothing.

        round_trip: the new tokens, which must not go beyond the current block, will be seen through `round_trip`.
        """
        growth: list[Growth] = []
        try:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                growth.append(group.grow(table, sequence.length, count))
        except OutOfBlocks:
            for group, grown in zip(self.groups, growth, strict=False):
                group.abort(grown)
            raise
        rows = sequence.length % self.shape.block_size + count
        buffer = None if count == 1 and not round_trip else self.ops.buffer(self.shape.form(0), rows)
        return Span(sequence, sequence.length, count, growth, buffer, round_trip)

    def view(self, layer: int, span: Span, rows: slice, position: int) -> CacheSpan:
        """What the ops need to know of `span` for the rows that start at `position`, in a layer and all its group."""
        table, n = span.sequence.tables[self._group_of[layer]], self.shape.block_size
        now_start = span.start // n * n
        return CacheSpan(
            rows=rows,
            position=position,
            now=self._now(layer, span),
            now_start=now_start,
            sink=table.sink if now_start else None,
            table=table.coded,
            table_start=(1 + table.dropped) * n,
        )

    def begin_layer(self, layer: int, span: Span) -> None:
        """Bring the current block's earlier tokens into the span's buffer, if it has one."""
        filled = span.start % self.shape.block_size
        if span.buffer is None or filled == 0:
            return
        tail = span.sequence.tables[self._group_of[layer]].tail
        assert tail is not None
        self.ops.copy_exact(self.cache(layer), Place(span.buffer, 0), Place(None, tail), filled)

    def seal(self, layer: int, span: Span) -> None:
        """All K/V of the span are appended: encode its complete blocks, keep the rest in full precision.

        Raises EngineError ("model_damaged") where a complete block holds NaN or infinity and the device looks for it.
        """
        n = self.shape.block_size
        cache, grown = self.cache(layer), span.growth[self._group_of[layer]]
        buffer, first = self._now(layer, span)
        base = span.start // n  # number of the block that `now` begins with
        if grown.coded:
            begin = first + grown.first_coded - base
            sources = [Place(buffer, begin + i) for i in range(len(grown.coded))]
            with _damage_as_error():
                self.ops.encode_blocks([cache], grown.coded, sources)
        if buffer is None:
            return
        complete, rest = divmod(span.start + span.count, n)
        if grown.sink is not None:
            self.ops.copy_exact(cache, Place(None, grown.sink), Place(buffer, 0), n)
        if grown.tail is not None:
            self.ops.copy_exact(cache, Place(None, grown.tail), Place(buffer, complete - base), rest)

    def seal_steps(self, spans: Sequence[Span]) -> None:
        """Encode the blocks that spans of one token have filled, all layers and sequences; raises as `seal` does."""
        for group, (_, layers) in enumerate(self.shape.groups):
            filled = [(block, self._now(layers[0], span)) for span in spans for block in span.growth[group].coded]
            if filled:
                blocks, slots = zip(*filled, strict=True)
                with _damage_as_error():
                    self.ops.encode_blocks([self.cache(layer) for layer in layers], blocks, slots)

    def round_trip(self, layer: int, span: Span) -> None:
        """Replace the K/V in the buffer of a sealed span by what its block reads back as once it is encoded.

        The first block of a sequence is never encoded, and stays as it is. Raises EngineError as `seal` does.
        """
        n = self.shape.block_size
        if span.start >= n:
            tokens = span.start % n + span.count
            with _damage_as_error():
                self.ops.round_trip(self.cache(layer), Place(span.buffer, 0), tokens)

    def commit(self, span: Span) -> None:
        """Every layer is sealed: the sequence has grown, and blocks that left the window are given back."""
        sequence = span.sequence
        sequence.length += span.count
        for group, table, grown in zip(self.groups, sequence.tables, span.growth, strict=True):
            group.commit(table, grown, sequence.length)

    def abort(self, span: Span) -> None:
        """Forget a span before its commit; the sequence is as it was."""
        for group, grown in zip(self.groups, span.growth, strict=True):
            group.abort(grown)

    def _now(self, layer: int, span: Span) -> Place:
        """Where the block that the span begins in lies: at the start of its buffer, or in the slot of a step."""
        if span.buffer is not None:
            return Place(span.buffer, 0)
        grown = span.growth[self._group_of[layer]]
        slot = grown.tail if grown.sink is None else grown.sink
        assert slot is not None
        return Place(None, slot)

    # -- what it takes -----------------------------------------------------------------------------------------

    def bytes_held(self, sequence: SequenceKV) -> int:
        """Bytes of the blocks and slots that a sequence holds, shared ones included."""
        shape, total = self.shape, 0
        for (_, layers), table in zip(shape.groups, sequence.tables, strict=True):
            exact = (table.sink is not None) + (table.tail is not None)
            total += len(table.coded) * shape.coded_bytes(layers) + len(layers) * exact * shape.exact_bytes
        return total


@contextmanager
def _damage_as_error() -> Iterator[None]:
    """EngineError ("model_damaged") for K/V that no codec can encode: the weights that they come from are damaged."""
    try:
        yield
    except NotFinite:
        raise EngineError(NOT_FINITE, "model_damaged") from None

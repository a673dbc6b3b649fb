"""The KV store: where every sequence's K/V lies, and what becomes codes when.

A sequence is cut into blocks of N tokens. Its first block (the sink) and the block it is filling (the current block)
stay in full precision, in *full-precision slots*; every complete block between them is encoded. New tokens pass
through a `Span`. Those of a prompt keep one layer's new K/V in a buffer of their own until that layer is sealed:

    span = store.open(sequence, count)      blocks are reserved, or OutOfBlocks and nothing has changed
    for every layer:                        begin_layer, append and attend (any number of chunks); once all is appended
        store.seal(layer, span)             complete blocks become codes, the rest goes to the current block
    store.commit(span)                      the sequence is longer now       (or store.abort(span))

Those of a step go straight to the slots of their blocks and stay in full precision until it is known how many of them
are kept:

    span = store.open_step(sequence, count)
    for every layer:                        append and attend
    store.commit(span, kept)                the first `kept` rows are the sequence's, and complete blocks are encoded

Layers that see the same window share block tables, and blocks that no later token of a group can see are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.backends.ops import STEP_ROWS, Buffer, Cache, Ops, Place, SpanView
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
    """`count` new tokens of a sequence, from position `start`, on their way into the store.

    growth: what is reserved, for each group; empty once it is committed or aborted. buffer: where the K/V of a prompt's
    layer in work go, from the start of the current block; None: a step, whose rows go to the slots of their blocks.
    """

    sequence: SequenceKV
    start: int
    count: int
    growth: list[Growth]
    buffer: Buffer | None
    round_trip: bool = False


class _Step(NamedTuple):
    """A span of a step, by its number among others, and the tokens that its sequence will have."""

    number: int
    span: Span
    length: int


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
        for (window, layers), quantized in zip(plan.shape.groups, plan.quantized_blocks, strict=True):
            for layer in layers:
                self._group_of[layer] = len(self.groups)
                format = plan.shape.format(layer, *((None, None) if metrics is None else metrics[layer]))
                self._caches[layer] = ops.cache(format, quantized, plan.full_slots, list(self._caches.values()))
            self.groups.append(TableGroup(plan.shape.block_size, window, quantized, plan.full_slots))

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
        """Reserve room for `count` more tokens of a prompt. Raises OutOfBlocks and changes nothing.

        round_trip: the new tokens, which must not go beyond the current block, will be seen through `round_trip`.
        """
        growth = self._reserve(sequence, lambda group, table: group.grow(table, sequence.length, count))
        rows = sequence.length % self.shape.block_size + count
        try:
            buffer = self.ops.buffer(self.shape.format(0), rows)
        except BaseException:  # there is no memory for it
            for group, grown in zip(self.groups, growth, strict=True):
                group.abort(grown)
            raise
        return Span(sequence, sequence.length, count, growth, buffer, round_trip)

    def open_step(self, sequence: SequenceKV, count: int = 1) -> Span:
        """Reserve room for `count` ≤ STEP_ROWS rows of a step. Raises OutOfBlocks and changes nothing."""
        assert 1 <= count <= STEP_ROWS
        growth = self._reserve(sequence, lambda group, table: group.grow_in_place(table, sequence.length, count))
        return Span(sequence, sequence.length, count, growth, None)

    def _reserve(self, sequence: SequenceKV, grow: Callable[[TableGroup, BlockTable], Growth]) -> list[Growth]:
        growth: list[Growth] = []
        try:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                growth.append(grow(group, table))
        except OutOfBlocks:
            for group, grown in zip(self.groups, growth, strict=False):
                group.abort(grown)
            raise
        return growth

    def view(self, layer: int, span: Span, rows: slice, position: int) -> SpanView:
        """What the ops need to know of `span` for the rows that start at `position`, in a layer and all its group."""
        index, n = self._group_of[layer], self.shape.block_size
        table, first = span.sequence.tables[index], span.start // n
        if span.buffer is None:
            slot, *following = span.growth[index].slots.values()
            current = Place(None, slot)
        else:
            current, following = Place(span.buffer, 0), []
        return SpanView(
            rows=rows,
            position=position,
            current=current,
            current_start=first * n,
            sink=table.sink if first else None,
            table=table.quantized,
            table_start=(1 + table.dropped) * n,
            following=following,
        )

    def begin_layer(self, layer: int, span: Span) -> None:
        """Bring the current block's earlier tokens into the span's buffer, if it has one."""
        filled = span.start % self.shape.block_size
        if span.buffer is None or filled == 0:
            return
        current = span.sequence.tables[self._group_of[layer]].current
        assert current is not None
        self.ops.copy_full(self.cache(layer), Place(span.buffer, 0), Place(None, current), filled)

    def seal(self, layer: int, span: Span) -> None:
        """All K/V of the span are appended: encode a prompt's complete blocks, and keep the rest in full precision.

        Raises EngineError ("model_damaged") where a complete block holds NaN or infinity and the device looks for it.
        """
        if span.buffer is None:
            return
        n = self.shape.block_size
        cache, grown = self.cache(layer), span.growth[self._group_of[layer]]
        base = span.start // n  # number of the block that the buffer begins with
        if grown.quantized:
            sources = [Place(span.buffer, number - base) for number in grown.quantized]
            with _damage_as_error():
                self.ops.encode_blocks([cache], list(grown.quantized.values()), sources)
        for number, slot in grown.slots.items():
            tokens = min(n, span.start + span.count - number * n)
            self.ops.copy_full(cache, Place(None, slot), Place(span.buffer, number - base), tokens)

    def round_trip(self, layer: int, span: Span) -> None:
        """Replace the K/V in the buffer of a sealed span by what its block reads back as once it is encoded.

        The first block of a sequence is never encoded, and stays as it is. Raises EngineError as `seal` does.
        """
        n = self.shape.block_size
        if span.start >= n:
            tokens = span.start % n + span.count
            with _damage_as_error():
                self.ops.round_trip(self.cache(layer), Place(span.buffer, 0), tokens)

    def commit(self, span: Span, kept: int | None = None) -> None:
        """The sequence has grown by the first `kept` tokens of `span`, all of them for None; it is as if the others had
        never been there. Of a prompt all are kept.

        Encodes the blocks that a step has filled. Raises EngineError ("model_damaged") where one of them holds NaN or
        infinity and the device looks for it; the sequence has grown all the same.
        """
        for error in self.commit_steps([span], [kept]).values():
            raise error

    def commit_steps(self, spans: Sequence[Span], kept: Sequence[int | None] | None = None) -> dict[int, EngineError]:
        """`commit` of many spans, whose blocks are encoded together → the errors of those with a damaged block, by
        their numbers.

        Codes are written before any table changes: after an exception all spans can be aborted.
        """
        lengths = []
        for span, count in zip(spans, kept or [None] * len(spans), strict=True):
            count = span.count if count is None else count
            assert (0 if span.buffer is None else span.count) <= count <= span.count
            lengths.append(span.start + count)
        steps = [_Step(i, span, length) for i, (span, length) in enumerate(zip(spans, lengths, strict=True))]
        damaged = self._encode_filled([step for step in steps if step.span.buffer is None])
        for _, span, length in steps:
            growth, span.growth = span.growth, []
            span.sequence.length = length
            for group, table, grown in zip(self.groups, span.sequence.tables, growth, strict=True):
                group.commit(table, grown, length)
        return damaged

    def _encode_filled(self, steps: Sequence[_Step]) -> dict[int, EngineError]:
        """Encode the blocks that steps have filled, all layers and sequences of a group at once → as `commit_steps`."""
        try:
            for index, (group, (_, layers)) in enumerate(zip(self.groups, self.shape.groups, strict=True)):
                filled = [of for step in steps for of in group.filled(step.span.growth[index], step.length)]
                if filled:
                    blocks, sources = [block for block, _ in filled], [Place(None, slot) for _, slot in filled]
                    with _damage_as_error():
                        self.ops.encode_blocks([self.cache(layer) for layer in layers], blocks, sources)
        except EngineError as error:
            if len(steps) == 1:
                return {steps[0].number: error}
            return {number: found for step in steps for number, found in self._encode_filled([step]).items()}
        return {}

    def abort(self, span: Span) -> None:
        """Forget a span before its commit; the sequence is as it was. Of a committed one there is nothing to forget."""
        growth, span.growth = span.growth, []
        for group, grown in zip(self.groups, growth, strict=False):
            group.abort(grown)

    # -- what it takes -----------------------------------------------------------------------------------------

    def bytes_held(self, sequence: SequenceKV) -> int:
        """Bytes of the blocks and slots that a sequence holds, shared ones included."""
        shape, total = self.shape, 0
        for (_, layers), table in zip(shape.groups, sequence.tables, strict=True):
            full = (table.sink is not None) + (table.current is not None)
            total += len(table.quantized) * shape.quantized_bytes(layers) + len(layers) * full * shape.full_bytes
        return total


@contextmanager
def _damage_as_error() -> Iterator[None]:
    """EngineError ("model_damaged") for K/V that no codec can encode: the weights that they come from are damaged."""
    try:
        yield
    except NotFinite:
        raise EngineError(NOT_FINITE, "model_damaged") from None

"""The KV store: the K/V of all sequences, in blocks, and when these are encoded.

A sequence is cut into blocks of N tokens. Its first block (the sink) and the block that is being filled (the current
block) stay in full precision, in *full-precision slots*; every complete block between them is encoded. New tokens enter
the store through a `Span`. The span of a prompt has a buffer for the new K/V of one layer, until that layer is sealed:

    span = store.open(sequence, count)      reserves blocks, or raises OutOfBlocks and changes nothing
    for every layer:                        begin_layer, append and attend in any number of chunks; after the last one
        store.seal(layer, span)             encodes complete blocks and copies the rest to the current block
    store.commit(span)                      the sequence is `count` tokens longer       (or store.abort(span))

The rows of a step are appended to the slots of their blocks. They stay in full precision until it is known how many of
them are kept:

    span = store.open_step(sequence, count)
    for every layer:                        append and attend
    store.commit(span, kept)                keeps the first `kept` rows and encodes complete blocks

Layers with the same window share block tables. Blocks that no later token of a group can see are released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from polarlm.engine.backends.kv import Buffer, Cache, FilledBlocks, Place, SpanView
from polarlm.engine.backends.ops import STEP_ROWS, Ops
from polarlm.engine.codecs import NotFinite
from polarlm.engine.errors import EngineError
from polarlm.engine.kv.blocks import OutOfBlocks
from polarlm.engine.kv.plan import StorePlan
from polarlm.engine.kv.tables import BlockTable, Growth, TableGroup
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.metric import Metric
from polarlm.engine.sampling.sample import NOT_FINITE

# The error metrics of a layer's keys and of its values; None rounds to the nearest code.
Metrics = tuple[Metric | None, Metric | None]


@dataclass
class SequenceKV:
    """A sequence in the store: its number of tokens, and one block table per group.

    hashes: the chained hashes of its complete blocks in the prefix cache. root: the hash that the chain starts from,
    for a sequence with a cache salt; see `engine.kv.prefix`.
    """

    length: int
    tables: list[BlockTable]
    hashes: list[bytes] = field(default_factory=list)
    root: bytes = b""


@dataclass
class Span:
    """`count` new tokens of a sequence, from position `start`.

    growth: the reserved blocks, for each group; empty after commit or abort. buffers: for each group the K/V of a
    prompt's layer, from the start of the current block on (groups of one shape share one); none for a step, whose rows
    go to the slots of their blocks. round_trip: whether attention reads the span's K/V as `KVStore.round_trip` leaves
    them.
    """

    sequence: SequenceKV
    start: int
    count: int
    growth: list[Growth]
    buffers: Sequence[Buffer] = ()
    round_trip: bool = False


class _Step(NamedTuple):
    """A span of a step, its number among those of the step, and the tokens that its sequence will have."""

    number: int
    span: Span
    length: int


class KVStore:
    """The blocks of all layers, and the block tables of all sequences. Not thread-safe: the engine's lock guards it."""

    def __init__(
        self, ops: Ops, plan: StorePlan, conditioning: Sequence[Conditioning], metrics: Sequence[Metrics] | None = None
    ):
        """conditioning, metrics: one for each layer; without metrics every codec rounds to the nearest code."""
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
        """The cache of one layer, for the ops."""
        return self._caches[layer]

    def group_of(self, layer: int) -> int:
        """The number of a layer's group, whose layers share block tables."""
        return self._group_of[layer]

    # -- sequences ---------------------------------------------------------------------------------------------

    def new_sequence(self) -> SequenceKV:
        """An empty sequence."""
        return SequenceKV(0, [BlockTable() for _ in self.groups])

    def release(self, sequence: SequenceKV) -> None:
        """Release all blocks of a sequence; it is empty afterwards."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.release(table)
        sequence.length, sequence.tables, sequence.hashes = 0, [BlockTable() for _ in self.groups], []

    # -- growing a sequence ------------------------------------------------------------------------------------

    def open(self, sequence: SequenceKV, count: int, *, round_trip: bool = False, as_steps: bool = False) -> Span:
        """A span for `count` more tokens of a prompt. Raises OutOfBlocks and changes nothing.

        round_trip: see `Span`; the new tokens must not reach beyond the current block then. as_steps: keep the new K/V
        in the precision of slots, as steps do.
        """
        growth = self._reserve(sequence, lambda group, table: group.grow(table, sequence.length, count))
        rows = sequence.length % self.shape.block_size + count
        try:
            buffers = self._buffers(rows, as_slots=as_steps)
        except BaseException:  # there is no memory for it
            for group, grown in zip(self.groups, growth, strict=True):
                group.abort(grown)
            raise
        return Span(sequence, sequence.length, count, growth, buffers, round_trip)

    def _buffers(self, rows: int, *, as_slots: bool) -> list[Buffer]:
        made: dict[tuple[int, int], Buffer] = {}
        formats = [self.shape.format(layers[0]) for _, layers in self.shape.groups]
        for format in formats:
            if (format.kv_heads, format.head_dim) not in made:
                made[format.kv_heads, format.head_dim] = self.ops.buffer(format, rows, as_slots=as_slots)
        return [made[format.kv_heads, format.head_dim] for format in formats]

    def open_step(self, sequence: SequenceKV, count: int = 1) -> Span:
        """A span for `count` ≤ STEP_ROWS rows of a step. Raises OutOfBlocks and changes nothing."""
        assert 1 <= count <= STEP_ROWS
        growth = self._reserve(sequence, lambda group, table: group.grow_in_place(table, sequence.length, count))
        return Span(sequence, sequence.length, count, growth)

    def rows_of_block(self, sequence: SequenceKV) -> int:
        """The most rows of a step whose tokens go to the current block: behind it, rows attend to its codes."""
        block = self.shape.block_size
        return min(block - sequence.length % block, STEP_ROWS)

    def first_of_block(self, sequence: SequenceKV) -> int:
        """The position of the first token in the current block; of the next token if that block is still empty."""
        return sequence.length // self.shape.block_size * self.shape.block_size

    def truncate(self, sequence: SequenceKV, length: int) -> None:
        """Forget the tokens from position `length` on, which lie in the current block.

        A block that has left a window stays away, though a token that is not forgotten may see it.
        """
        assert self.first_of_block(sequence) <= length <= sequence.length
        sequence.length = length

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
        """`rows` of `span`, which start at `position`, as a layer and all others of its group see them."""
        index, n = self._group_of[layer], self.shape.block_size
        table, first = span.sequence.tables[index], span.start // n
        if span.buffers:
            current, following = Place(span.buffers[index], 0), []
        else:
            slot, *following = span.growth[index].slots.values()
            current = Place(None, slot)
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
        """Copy the current block's earlier tokens to the span's buffer, if it has one."""
        filled = span.start % self.shape.block_size
        if not span.buffers or filled == 0:
            return
        group = self._group_of[layer]
        current = span.sequence.tables[group].current
        assert current is not None
        self.ops.copy_full(self.cache(layer), Place(span.buffers[group], 0), Place(None, current), filled)

    def seal(self, layer: int, span: Span) -> None:
        """Encode the complete blocks in a prompt's buffer and copy the rest to slots. All of its K/V must be appended.

        Raises EngineError ("model_damaged") if a complete block holds NaN or infinity and the device detects it.
        """
        if not span.buffers:
            return
        n, group = self.shape.block_size, self._group_of[layer]
        cache, grown, buffer = self.cache(layer), span.growth[group], span.buffers[group]
        base = span.start // n  # number of the buffer's first block
        if grown.quantized:
            sources = [Place(buffer, number - base) for number in grown.quantized]
            with _damage_as_error():
                self.ops.encode_blocks([FilledBlocks([cache], list(grown.quantized.values()), sources)])
        for number, slot in grown.slots.items():
            tokens = min(n, span.start + span.count - number * n)
            self.ops.copy_full(cache, Place(None, slot), Place(buffer, number - base), tokens)

    def round_trip(self, layer: int, span: Span) -> None:
        """Replace the K/V in a sealed span's buffer by what they are after encoding and decoding.

        The first block of a sequence is never encoded and stays as it is. Raises EngineError as `seal` does.
        """
        n = self.shape.block_size
        if span.start >= n:
            tokens = span.start % n + span.count
            with _damage_as_error():
                self.ops.round_trip(self.cache(layer), Place(span.buffers[self._group_of[layer]], 0), tokens)

    def commit(self, span: Span, kept: int | None = None) -> None:
        """Keep the first `kept` tokens of `span` (None: all, as for every prompt) and forget the others.

        Encodes the blocks that a step has filled. Raises EngineError ("model_damaged") if one of them holds NaN or
        infinity and the device detects it; the tokens are kept all the same.
        """
        for error in self.commit_steps([span], [kept]).values():
            raise error

    def commit_steps(self, spans: Sequence[Span], kept: Sequence[int | None] | None = None) -> dict[int, EngineError]:
        """`commit` for many spans, whose blocks are encoded together → errors of damaged blocks, by the span's number.

        Codes are written before any table changes, so that all spans can be aborted after an exception.
        """
        lengths = []
        for span, count in zip(spans, kept or [None] * len(spans), strict=True):
            count = span.count if count is None else count
            assert (span.count if span.buffers else 0) <= count <= span.count
            lengths.append(span.start + count)
        steps = [_Step(i, span, length) for i, (span, length) in enumerate(zip(spans, lengths, strict=True))]
        damaged = self._encode_filled([step for step in steps if not step.span.buffers])
        for _, span, length in steps:
            growth, span.growth = span.growth, []
            span.sequence.length = length
            for group, table, grown in zip(self.groups, span.sequence.tables, growth, strict=True):
                group.commit(table, grown, length)
        return damaged

    def _encode_filled(self, steps: Sequence[_Step]) -> dict[int, EngineError]:
        """Encode the blocks that steps have filled, all at once → errors as for `commit_steps`."""
        filled = []
        for index, (group, (_, layers)) in enumerate(zip(self.groups, self.shape.groups, strict=True)):
            pairs = [pair for step in steps for pair in group.filled(step.span.growth[index], step.length)]
            if pairs:
                blocks, sources = [block for block, _ in pairs], [Place(None, slot) for _, slot in pairs]
                filled.append(FilledBlocks([self.cache(layer) for layer in layers], blocks, sources))
        if not filled:
            return {}
        try:
            with _damage_as_error():
                self.ops.encode_blocks(filled)
        except EngineError as error:
            if len(steps) == 1:
                return {steps[0].number: error}
            return {number: found for step in steps for number, found in self._encode_filled([step]).items()}
        return {}

    def abort(self, span: Span) -> None:
        """Forget an open span; its sequence is as it was. Does nothing after `commit`."""
        growth, span.growth = span.growth, []
        for group, grown in zip(self.groups, growth, strict=False):
            group.abort(grown)

    # -- memory ------------------------------------------------------------------------------------------------

    def bytes_held(self, sequence: SequenceKV) -> int:
        """Bytes of the blocks and slots that a sequence holds, shared ones included."""
        shape, total = self.shape, 0
        for (_, layers), table in zip(shape.groups, sequence.tables, strict=True):
            full = (table.sink is not None) + (table.current is not None)
            total += len(table.quantized) * shape.quantized_bytes(layers) + full * shape.full_bytes(layers)
        return total


@contextmanager
def _damage_as_error() -> Iterator[None]:
    """Raise EngineError ("model_damaged") for K/V that are not finite: they come from damaged weights."""
    try:
        yield
    except NotFinite:
        raise EngineError(NOT_FINITE, "model_damaged") from None

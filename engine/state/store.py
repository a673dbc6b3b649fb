"""The KV store: holds the K/V of all sequences in blocks, and encodes them.

A sequence is split into blocks of N tokens. Its first block (the sink), its newest complete blocks (the recent blocks)
and the block that is being filled (the current block) are in full precision, in *full-precision slots*; all others are
encoded. New tokens enter the store through a `Span`. The span of a prompt has buffers for the new K/V of the layers
that are sealed together:

    span = store.open(sequence, count)      reserves blocks, or raises OutOfBlocks and changes nothing
    for every layer:                        begin_layer, append and attend in any number of chunks; after the last one
        store.seal(layer, span)             encodes old blocks and copies the others to slots
    store.commit(span)                      the sequence is `count` tokens longer       (or store.abort(span))

The rows of a step are appended to the slots of their blocks. They stay in full precision until the number of rows to
keep is known:

    span = store.open_step(sequence, count)
    for every layer:                        append and attend
    store.commit(span, kept)                keeps the first `kept` rows and encodes old blocks

Layers with the same window share block tables. Blocks that no later token of a group can see are released. Recent
blocks of all sequences share the slots: without a free one, the oldest recent block of some sequence is encoded early.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from polarlm.engine.backends.kv import Array, Cache, FilledBlocks, Spans, SpanView, layers_together
from polarlm.engine.backends.ops import STEP_ROWS, Ops
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.metric import Metric
from polarlm.engine.state.blocks import OutOfBlocks, OutOfSlots
from polarlm.engine.state.image_positions import ImagePositions
from polarlm.engine.state.kv_blocks import KVBlocks, encode
from polarlm.engine.state.layer_shapes import LayerShape, RecurrentShape
from polarlm.engine.state.layer_state import Buffers, LayerState, TableVersion, describe_layers, table_version_after
from polarlm.engine.state.plan import StorePlan
from polarlm.engine.state.tables import BlockTable, Reservation

T = TypeVar("T")
# The error metrics of a layer's keys and of its values; None rounds to the nearest code.
Metrics = tuple[Metric | None, Metric | None]

_SEALED_BLOCKS = 64  # of a KV head, at least, are encoded at once: Python takes as long for fewer of them


class RowAdapter(NamedTuple):
    """An adapter by its number among the model's adapters, and the factor of what it adds."""

    number: int
    scale: float


@dataclass
class SequenceKV:
    """A sequence in the store: its number of tokens, and one block table per group.

    hashes: the chained hashes of its complete blocks in the prefix cache. root: the hash that the chain starts from,
    for a sequence with a cache salt; see `engine.state.prefix`. adapter: the one that its tokens are computed with.
    image_positions: where its images are.
    """

    length: int
    tables: list[BlockTable]
    hashes: list[bytes] = field(default_factory=list)
    root: bytes = b""
    adapter: RowAdapter | None = None
    table_version: TableVersion | None = None  # None: the next step may change a table
    image_positions: ImagePositions | None = None  # None: a sequence without images
    hidden: Array | None = None  # (E,) float32: of the last token, for `MtpLayer`; None: unknown
    coded: int = 1  # the number of the first block whose codes the prefix cache does not know
    open_spans: int = 0


@dataclass
class Span:
    """`count` new tokens of a sequence, from position `start`, or rows of a step. reservations: the reserved blocks,
    for each group; empty after commit or abort, and in a step that changes no table. rows_before: rows of the
    open span before these, see `part`. round_trip: whether attention reads the K/V encoded and decoded."""

    sequence: SequenceKV
    start: int
    count: int
    reservations: list[Reservation]
    is_step: bool = False
    rows_before: int = 0
    round_trip: bool = False
    layers_per_seal: int = 1  # layers with K/V that are sealed together
    layers_to_seal: list[int] = field(default_factory=list)  # which wait for the others of these; one list for a batch
    is_open: bool = True
    hidden: Array | None = field(default=None, compare=False)  # of the rows of a step, or of a prompt's last one

    def part(self, first: int, count: int) -> Span:
        """Rows of an open span, to be computed. The span itself is sealed and committed."""
        return replace(self, start=self.start + first, count=count, rows_before=first)


# A span to commit, its index among the spans, and the length that its sequence will have.
_Step = tuple[int, Span, int]


class KVStore:
    """The blocks of all layers, and the block tables of all sequences. Not thread-safe: the engine's lock guards it."""

    def __init__(
        self,
        ops: Ops,
        plan: StorePlan,
        conditioning: Sequence[Conditioning],
        metrics: Sequence[Metrics] | None = None,
        *,
        keeps_recent: bool = False,
    ):
        """conditioning, metrics: one for each layer; without metrics every codec rounds to the nearest code.
        keeps_recent: never quantize a block early, so that what a token reads depends on its position alone."""
        self.ops, self.plan, self.shape, self.keeps_recent = ops, plan, plan.shape, keeps_recent
        self._source = [plan.shape.source(layer) for layer in range(len(plan.shape.layers))]
        self.conditioning = [conditioning[source] for source in self._source]
        groups = {layer: index for index, (_, layers) in enumerate(plan.shape.groups) for layer in layers}
        self.group_of = groups.__getitem__  # a layer → the number of its group, whose layers share block tables
        firsts = [plan.shape.layers[layers[0]] for _, layers in plan.shape.groups]
        slots = [first.slots(plan.full_slots, plan.more_slots, plan.recent_slots) for first in firsts]
        sizes, caches = [*zip(plan.quantized_blocks, slots, strict=True)], dict[int, Cache]()
        for layer in plan.shape.kv_layers:
            format = plan.shape.format(layer, *((None, None) if metrics is None else metrics[layer]))
            blocks = sizes[self.group_of(layer)]
            caches[layer] = ops.layer_ops(layer).cache(format, *blocks, [*caches.values()])
        self._last_kv = max(plan.shape.kv_layers, default=-1)
        self._images_whole = [first.images_whole for first in firsts]
        # Whether rows of an image see its later rows in some layers: all keys of it must be there before they do.
        self.sees_whole_images = any(self._images_whole)
        self.groups: list[LayerState] = []
        for (_, layers), shape, blocks in zip(plan.shape.groups, firsts, sizes, strict=True):
            layers = tuple(layer for layer in layers if self._source[layer] == layer)
            if isinstance(shape, LayerShape):
                self.groups.append(KVBlocks(ops, plan.shape, layers, [caches[layer] for layer in layers], blocks))
            else:
                assert isinstance(shape, RecurrentShape)
                self.groups.append(shape.state(ops, plan.shape.block_size, layers, blocks))
        # The groups whose state is sparse, as bits.
        self.sparse_groups = sum(1 << index for index, group in enumerate(self.groups) if group.is_sparse)
        # Sequences with recent blocks, by their identities.
        self._with_recent: dict[int, SequenceKV] = {}

    def cache(self, layer: int) -> Any:
        """Return the cache of one layer, for the ops; see `LayerState.cache`."""
        return self.groups[self.group_of(layer)].cache(self._source[layer])

    def numpy_fallbacks(self) -> list[str]:
        """Return what NumPy computes where kernels are missing: a clause for each reason, with its layers."""
        layers: dict[tuple[str, str], list[int]] = {}
        for layer in self.shape.kv_layers:
            for reason in self.ops.numpy_fallbacks(self.cache(layer)).items():
                layers.setdefault(reason, []).append(layer)
        all_layers = len(self.shape.layers)
        return [
            f"NumPy computes {what} in {describe_layers(numbers, all_layers)}, more slowly: {why}"
            for (what, why), numbers in layers.items()
        ]

    @property
    def batch_rows(self) -> int:
        """The most rows of prompts in a batch, as many as a prompt may have, whose memory is planned; 0 without
        batches: where `Ops.batch_rows` says so, and with recurrent layers."""
        has_kv_alone = all(isinstance(group, KVBlocks) for group in self.groups)
        return min(self.ops.batch_rows, self.plan.tokens) if has_kv_alone else 0

    # -- sequences ---------------------------------------------------------------------------------------------

    def new_sequence(self) -> SequenceKV:
        return SequenceKV(0, [group.new_table() for group in self.groups])

    def release(self, sequence: SequenceKV) -> None:
        """Release all blocks of a sequence; it is empty afterwards."""
        self._with_recent.pop(id(sequence), None)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.release(table)
        sequence.length, sequence.tables, sequence.hashes, sequence.coded = 0, self.new_sequence().tables, [], 1
        sequence.adapter = sequence.table_version = sequence.image_positions = sequence.hidden = None

    # -- growing a sequence ------------------------------------------------------------------------------------

    def open(self, sequence: SequenceKV, count: int, *, round_trip: bool = False, as_steps: bool = False) -> Span:
        """Open a span of `count` more tokens of a prompt. If it raises OutOfBlocks, nothing has changed.

        round_trip: see `Span`; the new tokens must then fit into the current block. as_steps: keep the new K/V in the
        precision of slots, as steps do.
        """
        buffers = self._buffers([(sequence, count)], 1 if round_trip else None)
        return self._open(sequence, count, buffers, round_trip=round_trip, as_steps=as_steps)

    def open_batch(self, prompts: Sequence[tuple[SequenceKV, int]], *, as_steps: bool = False) -> list[Span]:
        """Open spans of prompts that are computed together, each as `open` does: of the first ones that there is room
        for. If it raises OutOfBlocks, there is none for the first one, and nothing has changed."""
        buffers, spans, layers_to_seal = self._buffers(prompts), list[Span](), list[int]()
        with self.abort_on_error(spans):
            for sequence, count in prompts:
                try:
                    span = self._open(sequence, count, buffers, as_steps=as_steps, layers_to_seal=layers_to_seal)
                    spans.append(span)
                except OutOfBlocks:
                    if not spans:
                        raise
                    break
        return spans

    def _buffers(self, prompts: Sequence[tuple[SequenceKV, int]], layers: int | None = None) -> Buffers:
        """layers: that are sealed together; None for as many as are worth a launch, 1 if something changes the K/V of a
        layer before the next one comes."""
        n = self.shape.block_size
        rows = sum(-(-self.buffer_rows(sequence, count) // n) * n for sequence, count in prompts)
        kv_heads = [shape.kv_heads for shape in self.shape.kv_layers.values()]
        least = max(self.ops.encoded_at_once, _SEALED_BLOCKS)
        return Buffers(rows, layers or layers_together(least, kv_heads, -(-rows // n)))

    def buffer_rows(self, sequence: SequenceKV, count: int) -> int:
        """Return the rows of a prompt's `count` tokens in its buffer, behind those of the blocks in full precision."""
        tables = zip(self.groups, sequence.tables, strict=True)
        firsts = [group.first_full(table, sequence.length) for group, table in tables if isinstance(group, KVBlocks)]
        return sequence.length - min(firsts, default=0) * self.shape.block_size + count

    def _open(
        self, sequence: SequenceKV, count: int, buffers: Buffers, *, as_steps: bool = False, **fields: Any
    ) -> Span:
        start, n = sequence.length, self.shape.block_size
        reservations = self._reserve(
            sequence, lambda group, table: group.open(table, start, count, buffers, as_steps=as_steps)
        )
        buffers.first += -(-self.buffer_rows(sequence, count) // n)
        sequence.open_spans += 1
        return Span(sequence, start, count, reservations, layers_per_seal=buffers.layers, **fields)

    def open_step(self, sequence: SequenceKV, count: int = 1) -> Span:
        """Open a span of `count` rows of a step: STEP_ROWS, or `rows_of_block` if a group is sparse; or without such a
        group, and if their next tokens are known, up to the end of the block. If it raises OutOfBlocks, nothing has
        changed."""
        n = self.shape.block_size
        assert 1 <= count <= STEP_ROWS or sequence.length % n + count <= n
        reservations: list[Reservation] = []
        if sequence.table_version is None or sequence.length + count > sequence.table_version.end:
            reservations = self._reserve(sequence, lambda group, table: group.open_step(table, sequence.length, count))
        sequence.open_spans += 1
        return Span(sequence, sequence.length, count, reservations, is_step=True)

    def plan_snapshots(self, sequence: SequenceKV, stop: int) -> None:
        """Let steps keep what prompts keep of tokens up to position `stop`: snapshots of recurrent layers."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.plan_snapshots(table, sequence.length, stop)

    def rows_of_block(self, sequence: SequenceKV) -> int:
        """Return the most rows of a step that fit into the current block: later rows must attend to its codes."""
        block = self.shape.block_size
        return min(block - sequence.length % block, STEP_ROWS)

    def first_of_block(self, sequence: SequenceKV) -> int:
        """Return the position of the current block's first token, which is the next token if the block is empty."""
        return sequence.length // self.shape.block_size * self.shape.block_size

    def truncate(self, sequence: SequenceKV, length: int) -> None:
        """Discard the tokens from position `length` on, which must be in the current block. Blocks that have left a
        window are not restored: the next token attends to fewer tokens, by at most the number of discarded ones."""
        assert self.first_of_block(sequence) <= length <= sequence.length
        sequence.length, sequence.table_version, sequence.hidden = length, None, None

    def _reserve(
        self, sequence: SequenceKV, grow: Callable[[LayerState, BlockTable], Reservation]
    ) -> list[Reservation]:
        reservations: list[Reservation] = []
        try:
            for group, table in zip(self.groups, sequence.tables, strict=True):
                reservations.append(self.with_slots(group, partial(grow, group, table)))
        except BaseException:  # OutOfBlocks, or no memory for a buffer
            for group, reservation in zip(self.groups, reservations, strict=False):
                group.abort(reservation)
            raise
        return reservations

    def spans(self, spans: Sequence[Span], rows: slice) -> list[Spans]:
        """Return the parts of `spans` that are in `rows` of all their rows, for the ops: one value for each group."""
        cuts, end = [], 0
        for span in spans:
            begin, end = end, end + span.count  # the span's rows
            first, last = max(begin, rows.start), min(end, rows.stop)
            if first < last:
                cuts.append((span, slice(first - rows.start, last - rows.start), span.start + first - begin))
        parts = []
        if self.sees_whole_images:
            parts = [
                (span, *part)
                for span, *cut in cuts
                for part in (span.sequence.image_positions or ImagePositions(())).cut(*cut)
            ]
        return [
            group.spans([self.view(group.layers[0], *cut) for cut in (parts if whole else cuts)])
            for group, whole in zip(self.groups, self._images_whole, strict=True)
        ]

    def view(self, layer: int, span: Span, rows: slice, position: int, sees: int = 0) -> SpanView:
        """Return a view of `rows` of `span`, which start at `position`. It serves all layers in the layer's group."""
        group, table, reservation = self._group_of_span(layer, span)
        view = group.view(layer, table, reservation, span.start - span.rows_before, rows, position)
        return replace(view, sees=sees) if sees else view

    def begin_layer(self, layer: int, span: Span) -> None:
        """Prepare the span of a prompt for a layer's rows, and for the layers that are sealed with it."""
        kv_layers, layers = self.shape.kv_layers, [layer]
        if layer in kv_layers:
            rest = [] if span.layers_to_seal else [number for number in kv_layers if number >= layer]
            layers = rest[: span.layers_per_seal]
        for group, table, reservation, in_group in self._parts(span, layers):
            group.begin(in_group, table, reservation, span.start)

    def seal(self, layer: int, *spans: Span) -> None:
        """Keep the K/V of a layer of a prompt, or of all prompts of a batch, whose rows have all been appended. As many
        layers as `layers_per_seal` encode their old blocks at once, the last ones at commit, before which logits may
        be asked for. Raises EngineError ("model_damaged") if one holds NaN or infinity and the device detects it.
        """
        if layer not in self.shape.kv_layers:
            self._seal(spans, [layer])
            return
        layers = spans[0].layers_to_seal
        layers.append(layer)
        if len(layers) == spans[0].layers_per_seal and (layer != self._last_kv or spans[0].round_trip):
            self._seal(spans, layers)

    def _seal(self, spans: Sequence[Span], layers: list[int]) -> None:
        filled: list[FilledBlocks] = []
        for span in spans:
            for group, _, reservation, in_group in self._parts(span, layers):
                filled += group.seal(in_group, reservation, span.start, span.count)
        if filled:
            encode(self.ops, filled)
        layers.clear()

    def _parts(
        self, span: Span, layers: Sequence[int]
    ) -> Iterator[tuple[LayerState, BlockTable, Reservation, list[int]]]:
        """Yield each group that has a state of `layers`, with the span's part of it and these layers."""
        for group, table, reservation in zip(self.groups, span.sequence.tables, span.reservations, strict=False):
            if in_group := [layer for layer in layers if layer in group.layers]:
                yield group, table, reservation, in_group

    def round_trip(self, layer: int, span: Span) -> None:
        """Encode and decode, in place, the K/V that a sealed span attends to. Raises EngineError as `seal` does."""
        group, _, reservation = self._group_of_span(layer, span)
        if self._source[layer] == layer:
            group.round_trip(layer, reservation, span.start, span.count)

    def _group_of_span(self, layer: int, span: Span) -> tuple[LayerState, BlockTable, Reservation]:
        index = self.group_of(layer)
        group, table = self.groups[index], span.sequence.tables[index]
        if span.reservations:
            return group, table, span.reservations[index]
        return group, table, group.reservation(table, span.sequence.length)  # of a step that changes no table

    def commit(self, span: Span, kept: int | None = None) -> None:
        """Keep the first `kept` tokens of `span` (None: all, as for every prompt) and discard the others.

        Encodes the blocks that a step makes old. Raises EngineError ("model_damaged") if one of them holds NaN or
        infinity and the device detects it; the tokens are kept nevertheless.
        """
        for error in self.commit_steps([span], [kept]).values():
            raise error

    def commit_steps(self, spans: Sequence[Span], kept: Sequence[int | None] | None = None) -> dict[int, EngineError]:
        """Commit many spans, encoding their blocks together, and return errors of damaged blocks by the span's index.
        Codes are written before any table changes, so that all spans can be aborted after an exception."""
        both = [*zip(spans, kept or [None] * len(spans), strict=True)]
        lengths = [span.start + (span.count if count is None else count) for span, count in both]
        if prompts := [span for span in spans if span.layers_to_seal]:
            self._seal(prompts, prompts[0].layers_to_seal)
        growing = [step for step in zip(range(len(spans)), spans, lengths, strict=True) if step[1].reservations]
        damaged = self._encode_filled([step for step in growing if step[1].is_step])
        for span, length in zip(spans, lengths, strict=True):
            span.sequence.length = length
            span.sequence.open_spans -= span.is_open
            span.is_open = False
            if span.hidden is not None and length > span.start:
                span.sequence.hidden = span.hidden[length - span.start - span.count - 1]
        for _, span, length in growing:
            reservations, span.reservations = span.reservations, []
            for group, table, reservation in zip(self.groups, span.sequence.tables, reservations, strict=True):
                group.commit(table, reservation, length)
            self.note_recent(span.sequence)
            version = table_version_after(self.groups, self.shape.block_size, length) if span.is_step else None
            span.sequence.table_version = version
        return damaged

    def _encode_filled(self, steps: Sequence[_Step]) -> dict[int, EngineError]:
        """Encode the blocks that steps make old, all at once, and return errors as `commit_steps` does."""
        filled: list[FilledBlocks] = []
        for index, group in enumerate(self.groups):
            filled += group.filled_blocks([(span.reservations[index], length) for _, span, length in steps])
        if not filled:
            return {}
        try:
            encode(self.ops, filled)
        except EngineError as error:
            if len(steps) == 1:
                return {steps[0][0]: error}
            return {number: cause for step in steps for number, cause in self._encode_filled([step]).items()}
        return {}

    def abort(self, span: Span) -> None:
        """Discard an open span; its sequence is as it was before. Does nothing after `commit`."""
        reservations, span.reservations = span.reservations, []
        span.sequence.open_spans -= span.is_open
        span.is_open = False
        for group, reservation in zip(self.groups, reservations, strict=False):
            group.abort(reservation)

    @contextmanager
    def abort_on_error(self, spans: Iterable[Span]) -> Iterator[None]:
        """A context in which an exception aborts `spans`, also those that are added to them inside it."""
        try:
            yield
        except BaseException:
            for span in spans:
                self.abort(span)
            raise

    # -- recent blocks -----------------------------------------------------------------------------------------

    def note_recent(self, sequence: SequenceKV) -> None:
        """Note which recent blocks a sequence has."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            if isinstance(group, KVBlocks) and table.recent:
                self._with_recent[id(sequence)] = sequence
                group.note_oldest(table)

    def encode_ahead(self) -> None:
        """Encode some layers of the blocks that running sequences quantize next, so that the step that makes these old
        need not wait for all layers."""
        with suppress(EngineError):  # a damaged block, which the step that quantizes it reports
            for group in self.groups:
                if isinstance(group, KVBlocks):
                    group.encode_ahead()

    def encode_recent(self, sequence: SequenceKV) -> None:
        """Quantize all complete blocks of a sequence but the first one. Raises OutOfBlocks."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            while table.recent and isinstance(group, KVBlocks):
                group.encode_recent(table)
        sequence.table_version = None

    def with_slots(self, group: LayerState, allocate: Callable[[], T]) -> T:
        """Return what `allocate` returns, which allocates slots of a group. Without enough of them, recent blocks are
        quantized, first of conversations that no request continues, before blocks are lost that could be found."""
        full, index = group.full, self.groups.index(group)
        full.gives_up = not group.recent_blocks
        try:
            while True:
                try:
                    return allocate()
                except OutOfSlots:
                    if full.gives_up:
                        raise
                    full.gives_up = not self._quantize_recent(index)
        finally:
            full.gives_up = True

    def _quantize_recent(self, index: int) -> bool:
        """Quantize the oldest recent block in a group of the sequence that has the most, among those without an open
        span; return whether there was one."""
        group, sequences = self.groups[index], [one for one in self._with_recent.values() if not one.open_spans]
        sequence = max(sequences, key=lambda one: len(one.tables[index].recent), default=None)
        if self.keeps_recent or sequence is None or not sequence.tables[index].recent:
            return False
        assert isinstance(group, KVBlocks)
        with suppress(OutOfBlocks):
            group.encode_recent(sequence.tables[index])
            sequence.table_version = None
            return True
        return False

    # -- memory ------------------------------------------------------------------------------------------------

    def bytes_held(self, sequence: SequenceKV) -> int:
        """Return the bytes of the blocks and slots that a sequence holds, shared ones included."""
        return sum(group.bytes(table) for group, table in zip(self.groups, sequence.tables, strict=True))

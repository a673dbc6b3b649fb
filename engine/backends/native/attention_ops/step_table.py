"""The spans of a step as kernels read them: tables at fixed addresses."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import SpanView, table_width
from polarlm.engine.backends.native.kernels.attention.partials import FullBlock, RowPlace, SpanHeader, Unit
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.jit.run.buffers import aligned_bytes
from polarlm.model_loaders.forks import cached_property

NO_WINDOW = 1 << 40  # the window of layers without one, in tokens
CHUNK_TOKENS = 512  # least tokens of a chunk of quantized blocks
MOST_CHUNKS = 64  # most chunks of the quantized blocks of a sequence
HEADER, FULL, UNIT, PLACE = (len(record._fields) for record in (SpanHeader, FullBlock, Unit, RowPlace))  # in int64


class StepTable:
    """The spans of a step's B sequences, and the arrays that kernels read.

    unit_counts: chunks of all sequences, for each kind of blocks. With two kinds, the high-precision blocks of a
    sequence are its first chunks, and its others the next ones. A kernel for one kind is given the chunks of that kind,
    and a header in which the blocks of the table end with that kind's.
    """

    def __init__(self, views: Sequence[SpanView], block_size: int) -> None:
        """views: as for `engine.backends.ops.Ops.spans`; all of their new tokens go to full-precision slots."""
        self.views = views
        n = block_size
        rows_of_all = views[-1].rows.stop - views[0].rows.start
        self.most_rows = max(view.rows.stop - view.rows.start for view in views)
        kinds = 1 if views[0].high_precision is None else 2
        chunked = [_block_chunks(view, n) for view in views]
        width = table_width(max(chunks.ends[-1] for chunks in chunked))
        self.key = n, len(views), rows_of_all, self.most_rows, width, kinds
        """Tables with equal keys have the same shapes: `copy_from` works between them."""
        most_full = FULL * _most_full(n)
        headers: list[list[int]] = [[] for _ in range(kinds)]
        units: list[list[int]] = [[] for _ in range(kinds)]
        ids: list[int] = []
        full: list[int] = []
        sequences: list[int] = []
        places: list[int] = []
        for number, (view, chunks) in enumerate(zip(views, chunked, strict=True)):
            rows = view.rows.stop - view.rows.start
            # Where blocks have two kinds, the first high-precision ones, which are few, share chunk 0.
            first_quantized = 0 if view.high_precision and view.table else 1
            ends = [max(1, first_quantized + -(-end // chunks.chunk_blocks)) for end in chunks.ends]
            slots = [view.current.block, *view.following]
            full_blocks = [] if view.sink is None else [view.sink, 0]
            for i, slot in enumerate(slots):
                full_blocks += slot, view.current_start + n * i
            table_fields = view.table_start, chunks.chunk_blocks, first_quantized, ends[-1], len(full_blocks) // FULL
            for kind, quantized in enumerate(chunks.ends):
                headers[kind] += SpanHeader(len(sequences), rows, view.position, quantized, *table_fields)
                for chunk in range(ends[kind - 1] if kind else 1, ends[kind]):
                    units[kind] += number, chunk
            ids += chunks.ids
            ids += [0] * (width - len(chunks.ids))
            full += full_blocks
            full += [0] * (most_full - len(full_blocks))
            sequences += [number] * rows
            first = view.position - view.current_start
            for i in range(first, first + rows):
                places += slots[i // n], i % n
        # The short units (chunk 0) come last: whatever starts last decides how long other threads wait.
        for number in range(len(views)):
            units[0] += number, 0
        self.unit_counts = [len(one) // UNIT for one in units]
        words = [ids, full, sequences, places, *headers]
        for one in units[:-1]:
            words += one, [0] * (len(views) * most_chunks(n, width) * UNIT - len(one))
        self._contents = array("q", itertools.chain(*words, units[-1]))

    @property
    def most_chunk_blocks(self) -> int:
        """The most blocks of a chunk in tables of the same `key`."""
        block_size, width = self.key[0], self.key[4]
        return _chunk_blocks(width, block_size)

    @cached_property
    def arrays(self) -> Arrays:
        """The arrays, allocated on first use: `copy_from` another table needs only that table's contents."""
        arrays = Arrays.from_key(*self.key)
        arrays.memory[: len(self._contents)] = self._contents
        return arrays

    def copy_from(self, other: StepTable) -> None:
        """Overwrite this table with the contents of another that has the same `key`."""
        assert self.key == other.key
        self.arrays.memory[: len(other._contents)] = other._contents
        self.unit_counts, self.views = other.unit_counts, other.views

    def __iter__(self) -> Iterator[SpanView]:
        return iter(self.views)


class _BlockChunks(NamedTuple):
    """The quantized blocks of a sequence, cut into chunks of `chunk_blocks`.

    ids: of the blocks. The first kind is filled up with zeros, so that chunks have blocks of one kind. ends: the index
    after the last block of each kind.
    """

    ids: Sequence[int]
    ends: list[int]
    chunk_blocks: int


def _block_chunks(view: SpanView, block_size: int) -> _BlockChunks:
    high_precision = view.high_precision or ()
    chunk_blocks = _chunk_blocks(len(high_precision) + len(view.table), block_size)
    if view.high_precision is None:
        return _BlockChunks(view.table, [len(view.table)], chunk_blocks)
    padded_ids = [*high_precision, *[0] * (-len(high_precision) % chunk_blocks * bool(view.table))]
    ends = [len(high_precision), len(padded_ids) + len(view.table)]
    return _BlockChunks([*padded_ids, *view.table], ends, chunk_blocks)


class Arrays(NamedTuple):
    """The arrays of B sequences with T rows, int64: views of `memory`.

    table (B, W): the block table, ids of quantized blocks. full (B, F, FULL): the full-precision blocks, in order of
    position. row_sequences (T,): the sequence of each row. places (T, PLACE): a `RowPlace` each. headers (kinds of
    blocks, B, HEADER): a `SpanHeader` each. units (kinds, B · most_chunks, UNIT): a `Unit` for each chunk of all
    sequences, then zeros.
    """

    memory: np.ndarray
    table: np.ndarray
    full: np.ndarray
    row_sequences: np.ndarray
    places: np.ndarray
    headers: np.ndarray
    units: np.ndarray

    @property
    def most_chunks(self) -> int:
        """The most chunks of a sequence."""
        return self.units.shape[1] // self.headers.shape[1]

    @staticmethod
    def from_key(block_size: int, count: int, rows: int, _most_rows: int, width: int, kinds: int) -> Arrays:
        """Zeros for a `StepTable.key`: `count` sequences, `rows` rows in all, up to `width` quantized blocks each."""
        shapes: tuple[tuple[int, ...], ...] = (
            (count, width),
            (count, _most_full(block_size), FULL),
            (rows,),
            (rows, PLACE),
            (kinds, count, HEADER),
            (kinds, count * most_chunks(block_size, width), UNIT),
        )
        sizes = [math.prod(shape) for shape in shapes]
        memory = aligned_bytes(8 * sum(sizes)).view(np.int64)
        ends = itertools.accumulate(sizes)
        parts = [memory[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]
        return Arrays(memory, *parts)


def most_chunks(block_size: int, width: int) -> int:
    """The most chunks of a sequence of `width` quantized blocks: one more than these fill, for chunk 0, or because a
    second kind begins a chunk."""
    return 1 + min(MOST_CHUNKS, -(-width // _least_blocks(block_size)))


def _most_full(block_size: int) -> int:
    """F: the most full-precision blocks that a sequence has in a step."""
    return 2 + (STEP_ROWS + block_size - 2) // block_size


def _chunk_blocks(blocks: int, block_size: int) -> int:
    """The blocks of a chunk of a sequence with so many quantized ones."""
    return max(_least_blocks(block_size), -(-blocks // MOST_CHUNKS))


def _least_blocks(block_size: int) -> int:
    return max(1, CHUNK_TOKENS // block_size)

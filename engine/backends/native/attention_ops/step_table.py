"""The spans of a step as kernels read them: tables at fixed addresses."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.kv import SpanView, table_width
from polarlm.engine.backends.native.kernels.attention.partials import (
    FullBlock,
    RowPlace,
    SpanHeader,
    Unit,
    full_chunk_blocks,
)
from polarlm.engine.jit.run.buffers import aligned_bytes
from polarlm.model_loaders.forks import cached_property

NO_WINDOW = 1 << 40  # the window of layers without one, in tokens
CHUNK_TOKENS = 512  # least tokens of a chunk of quantized blocks
MOST_CHUNKS = 64  # most chunks of the quantized blocks of a sequence
HEADER, FULL, UNIT, PLACE = (len(record._fields) for record in (SpanHeader, FullBlock, Unit, RowPlace))  # in int64


class StepTable:
    """The spans of a step's B sequences, and the arrays that kernels read. unit_count: chunks of all sequences."""

    def __init__(self, views: Sequence[SpanView], block_size: int) -> None:
        """views: as for `engine.backends.ops.Ops.spans`; all of their new tokens go to full-precision slots."""
        self.views = views
        n = block_size
        rows_of_all = views[-1].rows.stop - views[0].rows.start
        self.most_rows = max(view.rows.stop - view.rows.start for view in views)
        full_blocks = [_full_blocks(view, n) for view in views]
        width = table_width(max(len(view.table) for view in views))
        most_full = table_width(max(map(len, full_blocks)))
        self.key = n, len(views), rows_of_all, self.most_rows, width, most_full
        """Tables with equal keys have the same shapes: `copy_from` works between them."""
        headers: list[int] = []
        units_of_codes: list[int] = []
        units_of_full = list[tuple[int, int]]()
        ids: list[int] = []
        full: list[int] = []
        sequences: list[int] = []
        places: list[int] = []
        for number, (view, blocks) in enumerate(zip(views, full_blocks, strict=True)):
            rows, quantized = view.rows.stop - view.rows.start, len(view.table)
            chunk_blocks, full_chunks = _chunk_blocks(quantized, n), -(-len(blocks) // full_chunk_blocks(n))
            chunks = full_chunks + -(-quantized // chunk_blocks)
            chunk_fields = chunk_blocks, full_chunks, chunks, len(blocks)
            headers += SpanHeader(len(sequences), rows, view.position, quantized, view.table_start, *chunk_fields)
            for chunk in range(full_chunks, chunks):
                units_of_codes += number, chunk
            units_of_full += [(number, chunk) for chunk in range(full_chunks)]
            ids += view.table
            ids += [0] * (width - quantized)
            for block in blocks:
                full += block
            full += [0] * (FULL * (most_full - len(blocks)))
            sequences += [number] * rows
            first, slots = view.position - view.current_start, [view.current.block, *view.following]
            for i in range(first, first + rows):
                places += slots[i // n], i % n
        # Short units, the last ones in full precision, come last: whatever starts last decides how long others wait.
        units_of_full.sort(key=lambda unit: unit[1])
        units = [*units_of_codes, *itertools.chain.from_iterable(units_of_full)]
        self.unit_count = len(units) // UNIT
        self._contents = array("q", itertools.chain(ids, full, sequences, places, headers, units))

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
        self.unit_count, self.views = other.unit_count, other.views

    def __iter__(self) -> Iterator[SpanView]:
        return iter(self.views)


def _full_blocks(view: SpanView, block_size: int) -> list[FullBlock]:
    """The blocks of a sequence in full precision, in order of position."""
    sink = [] if view.sink is None else [FullBlock(view.sink, 0)]
    slots = [view.current.block, *view.following]
    return [*sink, *(FullBlock(slot, view.current_start + block_size * i) for i, slot in enumerate(slots))]


class Arrays(NamedTuple):
    """The arrays of B sequences with T rows, int64: views of `memory`.

    table (B, W): the block table, ids of quantized blocks. full (B, F, FULL): a `FullBlock` for each block in full
    precision. row_sequences (T,): the sequence of each row. places (T, PLACE): a `RowPlace` each. headers (B, HEADER):
    a `SpanHeader` each. units (B · most_chunks, UNIT): a `Unit` for each chunk of all sequences, then zeros.
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
        return len(self.units) // len(self.headers)

    @staticmethod
    def from_key(block_size: int, count: int, rows: int, _most_rows: int, width: int, most_full: int) -> Arrays:
        """Zeros for a `StepTable.key`: `count` sequences, `rows` rows in all, up to `width` quantized blocks each, and
        up to `most_full` in full precision."""
        shapes: tuple[tuple[int, ...], ...] = (
            (count, width),
            (count, most_full, FULL),
            (rows,),
            (rows, PLACE),
            (count, HEADER),
            (count * most_chunks(block_size, width, most_full), UNIT),
        )
        sizes = [math.prod(shape) for shape in shapes]
        memory = aligned_bytes(8 * sum(sizes)).view(np.int64)
        ends = itertools.accumulate(sizes)
        parts = [memory[end - size : end].reshape(shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]
        return Arrays(memory, *parts)


def most_chunks(block_size: int, width: int, most_full: int) -> int:
    """The most chunks of a sequence of `width` quantized blocks, and of `most_full` in full precision."""
    return -(-most_full // full_chunk_blocks(block_size)) + min(MOST_CHUNKS, -(-width // _least_blocks(block_size)))


def _chunk_blocks(blocks: int, block_size: int) -> int:
    """The blocks of a chunk of a sequence with so many quantized ones."""
    return max(_least_blocks(block_size), -(-blocks // MOST_CHUNKS))


def _least_blocks(block_size: int) -> int:
    return max(1, CHUNK_TOKENS // block_size)

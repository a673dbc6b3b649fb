"""The KV cache of a layer on a GPU, which is pools of records, and the table of spans that kernels read.

Letters as in `engine.backends.ops`. A pool is uint8 (records, K, bytes); see `engine.records`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device
from polarlm.engine.backends.kv import CacheFormat, SpanView, table_width
from polarlm.engine.limits import DRAFT_ROWS
from polarlm.engine.records import Layouts


class SpanHeader(NamedTuple):
    """The int32 before the block ids in a row of a `SpanTable`: the members of Span in `cuda/prelude.cuh`, in order."""

    first_row: int
    rows: int
    position: int  # position of the first row
    sink: int  # full-precision slot of the sink block, or −1
    first_quantized: int  # number of the first quantized block in the sequence
    quantized: int  # number of quantized blocks
    current: int  # of a prompt: the record of `SpanView.current`, which those of later blocks follow; −1 in a step
    current_block: int  # number of that block in the sequence
    sees: int = 0  # position up to which all of the rows see, if that is later than their own


HEADER = len(SpanHeader._fields)  # in int32


class Buffer(NamedTuple):
    """The full-precision K/V of one layer: a pool of full-precision records of keys, and one of values."""

    k: Array
    v: Array


PromptBuffer = Sequence[Buffer]  # for each of the layers that are sealed together
DeviceBuffers = dict[Device, PromptBuffer]  # on each of several GPUs, for layers that are on all of them


class SideArrays(NamedTuple):
    """The arrays with which a kernel encodes keys or values of one layer, in the order of SideArrays in
    `cuda/encode/full_block.cuh`; None where the codec or the metric has no such array.

    quantized: the pool of quantized blocks. full: the pool of full-precision records to encode, which each launch sets.
    tables: the layout's. candidates: see `candidates`. The other arrays are a `Metric`'s: feedback is in tiles,
    mean_query is its tilt_mean, residues are in place of its matrix.
    """

    quantized: Array
    full: Array | None
    tables: Array | None
    candidates: Array | None
    feedback: Array | None = None
    mean_query: Array | None = None
    residues: Array | None = None


@dataclass(frozen=True)
class LayerCache:
    """The stored K/V of one layer, on `device`. full: the full-precision slots.

    number: of the layer among the layers with K/V on the device; layers one after another take the buffers of a prompt
    in turn. Where values are keys, both sides are the same.
    """

    device: Device
    format: CacheFormat
    layouts: Layouts
    keys: SideArrays
    values: SideArrays
    full: Buffer
    full_layouts: Layouts
    number: int = 0

    @property
    def padded(self) -> int:
        """DP, which is D rounded up to a multiple of 16."""
        return self.layouts[0].record.geometry.padded

    def pools(self, buffer: PromptBuffer | DeviceBuffers | None) -> Buffer:
        """The layer's part of `buffer`, or the full-precision slots if it is None."""
        if buffer is None:
            return self.full
        on_device = buffer[self.device] if isinstance(buffer, dict) else buffer
        return on_device[self.number % len(on_device)]


@dataclass
class HostTable:
    """An int32 table that is uploaded to a device on first use. copies: what has been uploaded."""

    table: np.ndarray
    copies: dict[Device, Array] = field(default_factory=dict, kw_only=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape

    def device_table(self, device: Device) -> Array:
        if device not in self.copies:
            self.copies[device] = device.from_host(self.table)
        return self.copies[device]

    def pad_rows(self, rows: int) -> HostTable:
        """A copy of the table, padded to `rows` rows with empty ones."""
        return replace(self, table=with_rows(self.table, rows), copies={})


@dataclass
class SpanTable(HostTable):
    """The spans of B sequences.

    table: int32 (B, HEADER + W): a `SpanHeader`, then the ids of the quantized blocks; in a step then the slots of the
    blocks in full precision. most_rows: rows of the longest span. buffer: receives the new
    tokens of a prompt; None in a step, whose tokens go to full-precision slots. rows: without zeros at their ends.
    """

    most_rows: int
    buffer: PromptBuffer | DeviceBuffers | None
    rows: Sequence[np.ndarray] = ()
    _kinds: list[bool] = field(default_factory=list, kw_only=True)
    _tiles: dict[tuple[Device, bool, int, int], Array] = field(default_factory=dict, kw_only=True)

    @property
    def parts(self) -> tuple[SpanTable | None, SpanTable | None]:
        """The spans of prompts, and of a step."""
        return (None, self) if self.buffer is None else (self, None)

    def kinds(self) -> Collection[bool]:
        """Whether spans have quantized blocks: for some, or for some and not for others."""
        self._kinds = self._kinds or [*np.unique(self.column("quantized") > 0).tolist()]
        return self._kinds

    def tiles(self, device: Device, has_codes: bool, group: int, size: int) -> Array:
        """The tiles of prompts' attention, int32 (tiles, 2): a span, and the first of at most `size` rows of its
        scores.

        has_codes: whether its span has quantized blocks; the other spans have tiles of their own. group: rows of scores
        of a token.
        """
        key = device, has_codes, group, size
        if key not in self._tiles:
            counts = self.column("rows") * group
            spans = np.flatnonzero((self.column("quantized") > 0) == has_codes).tolist()
            tiles = np.array([(i, first) for i in spans for first in range(0, counts[i], size)], np.int32)
            visible_ends = (
                self.column("position")[tiles[:, 0]] + np.minimum(tiles[:, 1] + size, counts[tiles[:, 0]]) // group
            )
            self._tiles[key] = device.from_host(tiles[np.argsort(-visible_ends, kind="stable")])  # these take longest
        return self._tiles[key]

    def column(self, name: str) -> np.ndarray:
        return self.table[:, SpanHeader._fields.index(name)]


class BatchTables(NamedTuple):
    """The spans of a batch: prompts, whose rows come first, and steps."""

    prompts: SpanTable
    steps: SpanTable
    rows: int  # of prompts

    @property
    def parts(self) -> tuple[SpanTable, SpanTable]:
        return self.prompts, self.steps


def with_rows(x: np.ndarray, rows: int) -> np.ndarray:
    """x (T, …) padded with rows of zeros to (rows, …)."""
    y = np.zeros((rows, *x.shape[1:]), x.dtype)
    y[: len(x)] = x
    return y


def pack_spans(spans: Sequence[SpanView], block_size: int) -> SpanTable | BatchTables:
    """The table of `spans`: of prompts in one buffer, or of a step; or both tables of prompts with steps behind
    them."""
    prompts = sum(span.current.buffer is not None for span in spans)
    if not 0 < prompts < len(spans):
        return _pack(spans, block_size)
    steps = _pack(spans[prompts:], block_size)
    # Kernels for one row of each sequence take the number of a span for the number of its row.
    steps.most_rows = next(size for size in DRAFT_ROWS if size >= steps.most_rows)
    return BatchTables(_pack(spans[:prompts], block_size), steps, spans[prompts].rows.start)


def _pack(spans: Sequence[SpanView], block_size: int) -> SpanTable:
    return _table([_row(span, block_size) for span in spans], spans[0].current.buffer)


def next_spans(
    last: SpanTable, previous_rows: Sequence[int], views: Mapping[int, SpanView], positions: np.ndarray, block_size: int
) -> SpanTable:
    """See `KVOps.next_spans`."""
    rows = [_row(views[row], block_size) if old < 0 else last.rows[old] for row, old in enumerate(previous_rows)]
    spans = _table(rows, None)
    spans.column("first_row")[:], spans.column("position")[:] = range(len(rows)), positions
    return spans


def _table(rows: Sequence[np.ndarray], buffer: PromptBuffer | DeviceBuffers | None) -> SpanTable:
    lengths = [*map(len, rows)]
    table = np.zeros((len(rows), HEADER + table_width(max(lengths) - HEADER)), np.int32)
    for whole, row, length in zip(table, rows, lengths, strict=True):
        whole[:length] = row
    return SpanTable(table, int(table[:, SpanHeader._fields.index("rows")].max()), buffer, rows)


def _row(span: SpanView, block_size: int) -> np.ndarray:
    """A row of a `SpanTable`, without the zeros at its end."""
    is_step = span.current.buffer is None
    header = SpanHeader(
        first_row=span.rows.start,
        rows=span.rows.stop - span.rows.start,
        position=span.position,
        sink=-1 if span.sink is None else span.sink,
        first_quantized=span.table_start // block_size,
        quantized=len(span.table),
        current=-1 if is_step else span.current.block,
        current_block=span.current_start // block_size,
        sees=span.sees,
    )
    slots = (span.current.block, *span.following) if is_step else ()
    return np.array((*header, *span.table, *slots), np.int32)

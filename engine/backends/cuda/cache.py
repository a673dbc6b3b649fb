"""The KV store on a GPU: pools of records, and what kernels are told of sequences in them.

Letters as in `engine.backends.ops`. A pool is uint8 (records, K, bytes); see `engine.records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engine.backends.cuda.device import Array, Device
from engine.backends.ops import CacheFormat, SpanView
from engine.records import Layout

_LEAST_IDS = 16

Layouts = tuple[Layout, Layout]  # of keys and of values


class SpanHeader(NamedTuple):
    """What stands before the ids of a sequence's quantized blocks: the members of Span in `cuda/prelude.cuh`, in order.

    current: record of block `current_block`, with which `current` begins; next: of the one behind, and further ones
    follow that.
    """

    first_row: int
    rows: int
    position: int  # of the first row
    sink: int  # full-precision slot of the first block, or −1
    first_quantized: int  # number of the first quantized block
    quantized: int
    current: int
    current_block: int
    next: int


HEADER = len(SpanHeader._fields)  # words


class Buffer(NamedTuple):
    """Full-precision K/V of one layer: pools of full-precision records."""

    k: Array
    v: Array


@dataclass(frozen=True)
class Side:
    """Keys or values of one layer; None where the codec, or the metric, has no such thing.

    near: `candidates` of the codec's points. The rest is of a `Metric`, feedback transposed.
    """

    layout: Layout
    quantized: Array
    tables: Array | None
    near: Array | None
    feedback: Array | None = None
    matrix: Array | None = None
    tilt_second: Array | None = None
    tilt_mean: Array | None = None
    token_feedback: Array | None = None


@dataclass(frozen=True)
class LayerCache:
    """The stored K/V of one layer. exact: full precision, sinks and tails."""

    format: CacheFormat
    keys: Side
    values: Side
    full: Buffer
    full_layouts: Layouts

    @property
    def layouts(self) -> Layouts:
        return self.keys.layout, self.values.layout

    @property
    def padded(self) -> int:
        """D rounded up to what the kernels take at once."""
        return self.keys.layout.record.geometry.padded

    def pools(self, buffer: Buffer | None) -> Buffer:
        return self.full if buffer is None else buffer


@dataclass
class Told:
    """Words that the host tells the device. device: the table there, once it has been brought."""

    table: np.ndarray
    device: Array | None = field(default=None, kw_only=True)

    def on(self, device: Device) -> Array:
        if self.device is None:
            self.device = device.from_host(self.table)
        return self.device


@dataclass
class Spans(Told):
    """Descriptors of sequences.

    table: int32 (B, HEADER + W) on the host: a `SpanHeader`, then the ids of the quantized blocks.
    buffer: where the new tokens go; None in a step, whose tokens go to the full-precision slots.
    """

    rows: int  # of all sequences, and the most of one
    most: int
    buffer: Buffer | None

    def header(self, index: int) -> SpanHeader:
        return SpanHeader(*self.table[index, :HEADER].tolist())


def table_width(blocks: int) -> int:
    """Room for the ids of so many blocks: few different widths, since every one is recorded for itself."""
    return max(_LEAST_IDS, 1 << max(0, blocks - 1).bit_length())


def describe(spans: Sequence[SpanView], block_size: int) -> Spans:
    """What the kernels need to know of `spans`, of one prompt or of a step, whose rows touch two blocks at most."""
    assert all(len(span.following) <= 1 for span in spans)
    width = table_width(max(len(span.table) for span in spans))
    table = np.zeros((len(spans), HEADER + width), np.int32)
    for row, span in zip(table, spans, strict=True):
        # Blocks of a step lie in slots anywhere, those of a buffer one behind the other.
        following = span.following[0] if span.following else span.current.block + 1
        row[:HEADER] = SpanHeader(
            first_row=span.rows.start,
            rows=span.rows.stop - span.rows.start,
            position=span.position,
            sink=-1 if span.sink is None else span.sink,
            first_quantized=span.table_start // block_size,
            quantized=len(span.table),
            current=span.current.block,
            current_block=span.current_start // block_size,
            next=following,
        )
        row[HEADER : HEADER + len(span.table)] = span.table
    counts = table[:, SpanHeader._fields.index("rows")]
    return Spans(table, int(counts.sum()), int(counts.max()), spans[0].current.buffer)

"""The records that kernels of a step read in the tables of its spans (`attention_ops.step_table`)."""

from __future__ import annotations

from typing import NamedTuple

from polarlm.engine.jit.lang.records import Int64


class SpanHeader(NamedTuple):
    """A sequence of the step. Its attention is cut into chunks: chunk 0 is the full-precision blocks, each other one is
    `chunk_blocks` quantized blocks."""

    first_row: Int64
    rows: Int64
    position: Int64  # position of the first row
    quantized: Int64  # number of quantized blocks
    table_start: Int64  # position of their first token
    chunk_blocks: Int64
    chunks: Int64
    full: Int64  # number of blocks in full precision


class FullBlock(NamedTuple):
    """A block in full precision: its slot, and the position of its first token."""

    slot: Int64
    start: Int64


class Unit(NamedTuple):
    """A unit of attention over all sequences: a chunk of a sequence."""

    sequence: Int64
    chunk: Int64


class RowPlace(NamedTuple):
    """Where the keys and values of a row go: a slot, and the token's row in it."""

    slot: Int64
    offset: Int64

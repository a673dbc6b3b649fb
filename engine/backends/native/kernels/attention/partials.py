"""The records that kernels of a step read in the tables of its spans (`attention_ops.step_table`), partial results of
attention, and the kernel that merges them.

A partial result belongs to a row, a query head and the tokens of a chunk:

    row_max   the largest score                                 float32
    row_sum   the sum of the weights e^(score − row_max)        float32, then padding up to 64 bytes
    weighted  the sum of the weighted values                    float32, D rounded up to a multiple of 16
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.multiply import pieces, rotate
from polarlm.engine.jit.lang import F32, I64, Emitter, Int64, Kernel, Pointer, Value, read, vector

LOWEST = -1e30  # the score of a masked token: finite, so that differences of two are not NaN
WEIGHTED = 64  # offset in bytes of `weighted` in a partial result
FULL_CHUNK_TOKENS = 128  # of a chunk in full precision, which takes no longer than 512 as codes

_F16 = vector(F32, 16)


class SpanHeader(NamedTuple):
    """A sequence of the step. Its attention is cut into chunks: each before `first_quantized` has `full_chunk_blocks`
    blocks in full precision, or what is left of them, and each from there on `chunk_blocks` quantized blocks."""

    first_row: Int64
    rows: Int64
    position: Int64  # position of the first row
    quantized: Int64  # number of quantized blocks
    table_start: Int64  # position of their first token
    chunk_blocks: Int64
    first_quantized: Int64
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


def full_chunk_blocks(block_size: int) -> int:
    """The most blocks in full precision of a chunk."""
    return max(1, FULL_CHUNK_TOKENS // block_size)


def padded(head_dim: int) -> int:
    """Bytes of D float32, with D rounded up to a multiple of 16."""
    return -(-head_dim // 16) * 64


def partial_bytes(head_dim: int) -> int:
    """Bytes of a partial result."""
    return WEIGHTED + padded(head_dim)


class MergeArguments(NamedTuple):
    parts: Pointer
    headers: Pointer
    row_sequences: Pointer
    scale_back: Pointer
    sink_scores: Pointer
    input_signs: Pointer
    memory: Pointer
    out: Pointer
    heads: Int64
    most_chunks: Int64


@cache
def merge(head_dim: int, order: int, *, is_scaled: bool, has_sink_scores: bool) -> Kernel[MergeArguments]:
    """Partial results → out (T, H, D) float32, one unit per row and head.

    With has_sink_scores, sink_scores (H,) are scores whose values are 0. A result is multiplied by scale_back (H,) if
    is_scaled, and then rotated; order, memory, input_signs: see `Rotation`.
    """

    def emit(e: Emitter, args: MergeArguments, begin: Value, end: Value, scratch: Value) -> None:
        size, offsets = partial_bytes(head_dim), range(0, padded(head_dim), 64)
        with e.loop(begin, end) as unit:
            sequence = e.load(args.row_sequences + (unit // args.heads) * 8, I64)
            chunks = read(e, SpanHeader, args.headers, sequence).chunks
            partials = args.parts + unit * args.most_chunks * size
            address = args.sink_scores + (unit % args.heads) * 4
            score = e.load(address, F32) if has_sink_scores else e.constant(F32, LOWEST)
            row_max = e.variable(score)
            with e.loop(0, chunks) as chunk:
                row_max.set(e.fmax(row_max.get(), e.load(partials + chunk * size, F32)))
            row_sum = e.variable(e.exp(score - row_max.get()) if has_sink_scores else e.zero(F32))
            sums = [e.variable(e.zero(_F16)) for _ in offsets]
            with e.loop(0, chunks) as chunk:
                part = partials + chunk * size
                rescale = e.exp(e.load(part, F32) - row_max.get())
                row_sum.set(e.fma(rescale, e.load(part, F32, 4), row_sum.get()))
                for offset, weighted in zip(offsets, sums, strict=True):
                    weighted.set(e.fma(e.load(part, _F16, WEIGHTED + offset), rescale, weighted.get()))
            factor = e.const_like(1.0, row_sum.get()) / row_sum.get()
            if is_scaled:
                factor = factor * e.load(args.scale_back + (unit % args.heads) * 4, F32)
            for offset, weighted in zip(offsets, sums, strict=True):
                e.store(weighted.get() * factor, scratch, offset)
            if order > 1:
                for channel, lanes in pieces(head_dim):
                    signs = e.load(args.input_signs, vector(F32, lanes), 4 * channel)
                    e.store(e.load(scratch, signs.type, 4 * channel) * signs, scratch, 4 * channel)
            rotate(e, scratch, args.out + unit * (4 * head_dim), args.memory, head_dim, order)

    name = f"merge_{head_dim}_order{order}{'_scaled' * is_scaled}{'_sink_scores' * has_sink_scores}"
    return Kernel(name, emit, MergeArguments)

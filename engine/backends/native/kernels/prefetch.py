"""Prefetches of full-precision blocks, by the products before the attention that reads them.

Products of several rows are bound by arithmetic; attention over full-precision blocks is bound by memory. So products
prefetch those blocks into the cores' caches, a few lines with each step of their inner loop.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native.kernels.attention.partials import FullBlock, SpanHeader
from polarlm.engine.jit.lang import I64, Emitter, Int64, Kernel, Pointer, Value, read
from polarlm.engine.jit.lang.records import words

PIECE = 4096  # bytes of a piece, the unit in which prefetches are handed out

_STEP = 256  # bytes to prefetch with 32 inputs of a weight tile: many lines at once stall the core
STEPS = PIECE // _STEP  # steps of a product that prefetch one piece

_EMPTY = np.zeros(1, np.int64)


class PrefetchHint(NamedTuple):
    """The prefetch hint of a product: the listed pieces of keys and of values, from number `first` on.

    pieces: see `list_pieces`. Piece 2i is of keys, 2i + 1 of values.
    """

    keys: Pointer
    values: Pointer
    pieces: Pointer
    first: Int64


NO_HINT = words(PrefetchHint(keys=None, values=None, pieces=_EMPTY, first=0))


class Prefetch:
    def __init__(self, e: Emitter, hint: Value) -> None:
        self._e = e
        self._keys, self._values, self._pieces, self._first = read(e, PrefetchHint, hint)
        self._count = e.load(self._pieces, I64) * 2

    def step(self, step: Value) -> None:
        """Prefetch the bytes of step number `step` of the product; a piece takes STEPS steps."""
        e = self._e
        number = self._first + step // STEPS
        with e.when(number < self._count):
            base = e.select((number & 1).equals(0), self._keys, self._values)
            offset = e.load(self._pieces + number // 2 * 8, I64, 8)
            e.prefetch(base + offset + step % STEPS * _STEP, _STEP)


class PieceArguments(NamedTuple):
    headers: Pointer
    full: Pointer
    pieces: Pointer
    sequences: Int64
    most_full: Int64
    kv_heads: Int64
    block_bytes: Int64
    token_bytes: Int64
    window: Int64


@cache
def list_pieces() -> Kernel[PieceArguments]:
    """Lists the pieces of the full-precision blocks that the sequences of a step attend to; one unit.

    headers, full: of a `StepTable`, whose F is most_full. pieces, the result: their number P, then P offsets in bytes,
    which hold for keys and for values. block_bytes, token_bytes: per KV head. A row at position p sees positions
    > p − window.
    """

    def emit(e: Emitter, args: PieceArguments, begin: Value, end: Value, scratch: Value) -> None:
        block_bytes, token_bytes = args.block_bytes, args.token_bytes
        count = e.variable(e.i64(0))
        with e.loop(0, args.sequences) as sequence:
            header = read(e, SpanHeader, args.headers, sequence)
            with e.loop(0, header.full) as number:
                slot, start = read(e, FullBlock, args.full, sequence * args.most_full + number)
                tokens_end = (header.position + header.rows - start) * token_bytes
                is_seen = start * token_bytes + block_bytes > (header.position - args.window + 1) * token_bytes
                with e.when(is_seen), e.loop(0, args.kv_heads) as head:
                    first = (slot * args.kv_heads + head) * block_bytes
                    with e.loop(0, e.imin(tokens_end, block_bytes), PIECE) as offset:
                        e.store(first + offset, args.pieces + count.get() * 8, 8)
                        count.add(e.i64(1))
        e.store(count.get(), args.pieces)

    return Kernel("list_pieces", emit, PieceArguments)

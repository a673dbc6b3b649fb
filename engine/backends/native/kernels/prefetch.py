"""Prefetches of blocks in full precision by the products before the attention that reads them.

Products of several rows compute for longer than they read; attention over blocks in full precision reads for longer
than it computes. So the products of a step bring those blocks into the cores' caches, a step's bytes at a time.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native.spans import FullBlock, SpanHeader
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Int64, Pointer, read, words
from polarlm.engine.jit.lang.values import I64, Value

PIECE = 4096
"""Bytes that are prefetched together."""

_STEP = 256  # bytes that are prefetched with 32 inputs of a tile of weights: many lines at once stall a core
STEPS = PIECE // _STEP
"""Steps in which a product prefetches a piece."""

_EMPTY = np.zeros(1, np.int64)


class Ahead(NamedTuple):
    """What a product prefetches: pieces of `full_k` and `full_v` in a list, from the one with a number on."""

    keys: Pointer
    values: Pointer
    pieces: Pointer
    first: Int64


NOTHING = words(Ahead(keys=None, values=None, pieces=_EMPTY, first=0))


class Prefetch:
    """Emits the prefetches of a product."""

    def __init__(self, e: Emitter, ahead: Value) -> None:
        """ahead: an `Ahead`."""
        self._e = e
        self._keys, self._values, self._pieces, self._first = read(e, Ahead, ahead)
        self._count = e.load(self._pieces, I64) * 2

    def step(self, step: Value) -> None:
        """Prefetch the bytes of a step of the product; there are STEPS for each piece."""
        e = self._e
        number = self._first + step // STEPS
        with e.when(number < self._count):
            base = e.select((number & 1).equals(0), self._keys, self._values)
            offset = e.load(self._pieces + number // 2 * 8, I64, 8)
            e.prefetch(base + offset + step % STEPS * _STEP, _STEP)


class PieceArguments(NamedTuple):
    """Of `list_pieces`."""

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
    """The pieces of the blocks in full precision that the sequences of a step attend to. One unit.

    headers, full: of a `StepTable`, with rows of `most_full`. pieces: their number P, then P offsets in bytes from the
    first key, or value. block_bytes, token_bytes: of a head. A row sees the positions above its own minus `window`.
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
                    with e.loop(0, e.least(tokens_end, block_bytes), PIECE) as offset:
                        e.store(first + offset, args.pieces + count.get() * 8, 8)
                        count.add(e.i64(1))
        e.store(count.get(), args.pieces)

    return Kernel("list_pieces", emit, PieceArguments)

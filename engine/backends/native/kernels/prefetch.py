"""Prefetches of blocks in full precision by the products before the attention that reads them.

Products of several rows compute for longer than they read; attention over blocks in full precision reads for longer
than it computes. So the products of a step bring those blocks into the cores' caches, a step's bytes at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.native.spans import FULL, HEADER, SpanHeader
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I64, POINTER, Value

PIECE = 4096
"""Bytes that are prefetched together."""

_STEP = 256  # bytes that are prefetched with 32 inputs of a tile of weights: many lines at once stall a core
STEPS = PIECE // _STEP
"""Steps in which a product prefetches a piece."""

_EMPTY = np.zeros(1, np.int64)
NOTHING = np.array([0, 0, _EMPTY.ctypes.data, 0], np.int64)
"""The words that tell a product what to prefetch: the addresses of `full_k`, of `full_v` and of a list of pieces, and
the number of its first piece. These say: nothing."""


class Offer(NamedTuple):
    """A product's words, and the number of pieces that it can prefetch."""

    ahead: np.ndarray
    pieces: int


def assign(offers: Sequence[Offer], keys: np.ndarray, values: np.ndarray, pieces: np.ndarray) -> None:
    """Let products prefetch `pieces`, from `list_pieces`, of `full_k` and `full_v`.

    The last product takes the first pieces, as many as it can, since what is prefetched early may be lost again.
    """
    first = 0
    for offer in reversed(offers):
        offer.ahead[:] = keys.ctypes.data, values.ctypes.data, pieces.ctypes.data, first
        first += offer.pieces


class Prefetch:
    """Emits the prefetches of a product."""

    def __init__(self, e: Emitter, ahead: Value) -> None:
        """ahead: words as `NOTHING`."""
        self._e = e
        self._keys, self._values, self._pieces = (e.load(ahead, POINTER, 8 * i) for i in range(3))
        self._first = e.load(ahead, I64, 24)
        self._count = e.load(self._pieces, I64) * 2

    def step(self, step: Value) -> None:
        """Prefetch the bytes of a step of the product; there are STEPS for each piece."""
        e = self._e
        number = self._first + step // STEPS
        with e.when(number < self._count):
            base = e.select((number & 1).equals(0), self._keys, self._values)
            offset = e.load(self._pieces + number // 2 * 8, I64, 8)
            e.prefetch(base + offset + step % STEPS * _STEP, _STEP)


@cache
def list_pieces() -> Kernel:
    """The pieces of the blocks in full precision that the sequences of a step attend to. One unit.

    headers, full: of a `StepTable`, with rows of `most_full`. pieces: their number P, then P offsets in bytes from the
    first key, or value. block_bytes, token_bytes: of a head. A row sees the positions above its own minus `window`.
    """

    def emit(e: Emitter, *args: Value, begin: Value, end: Value, scratch: Value) -> None:
        headers, full, pieces, sequences, most_full, kv_heads, block_bytes, token_bytes, window = args
        count = e.variable(e.i64(0))
        with e.loop(0, sequences) as sequence:
            words = (e.load(headers + sequence * (8 * HEADER), I64, 8 * i) for i in range(HEADER))
            header: Any = SpanHeader._make(words)
            with e.loop(0, header.full) as number:
                at = full + (sequence * most_full + number) * (8 * FULL)
                slot, start = e.load(at, I64), e.load(at, I64, 8)
                tokens_end = (header.position + header.rows - start) * token_bytes
                is_seen = start * token_bytes + block_bytes > (header.position - window + 1) * token_bytes
                with e.when(is_seen), e.loop(0, kv_heads) as head:
                    first = (slot * kv_heads + head) * block_bytes
                    with e.loop(0, e.least(tokens_end, block_bytes), PIECE) as offset:
                        e.store(first + offset, pieces + count.get() * 8, 8)
                        count.add(e.i64(1))
        e.store(count.get(), pieces)

    integers = ("sequences", "most_full", "kv_heads", "block_bytes", "token_bytes", "window")
    return Kernel("list_pieces", emit, ("headers", "full", "pieces"), integers)

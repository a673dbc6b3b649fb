"""Dot products of bytes and of int16, and lookups in tables of bytes: what LLVM does not find by itself.

Each level of CPU features has its own code for them, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I8, I32, Value, expect, vector


def dot4(e: Emitter, total: Value, unsigned: Value, signed: Value, *, fits: bool = False) -> Value:
    """total + Σ unsigned · signed over the 4 bytes of each int32 lane, exact.

    fits: the sum of two products fits an int16, as with unsigned bytes up to 128. On x86 without VNNI that is faster.
    """
    _expect_words(total, unsigned, signed)
    return e.level.dot4(e, total, unsigned, signed, fits)


def dot4_signed(e: Emitter, total: Value, a: Value, b: Value) -> Value:
    """total + Σ a · b over the 4 bytes of each int32 lane, both signed, exact. b must not be -128.

    Where the level's `signed_dots` says so, it is faster than `dot4`, also for unsigned bytes below 128.
    """
    _expect_words(total, a, b)
    return e.level.dot4_signed(e, total, a, b)


def dot2(e: Emitter, total: Value, a: Value, b: Value) -> Value:
    """total + Σ a · b over the 2 int16 of each int32 lane, exact."""
    _expect_words(total, a, b)
    return e.level.dot2(e, total, a, b)


LARGEST_SPLIT = 127 * 256 + 127
"""The largest int16 that is 256 times a signed byte, and a signed byte."""


class SplitSums:
    """Sums of products of signed bytes with int16 of magnitude up to `LARGEST_SPLIT`, as int32, exact. Where the
    level's `splits_words` says so, they are faster than `dot2`."""

    def __init__(self, e: Emitter, start: Value) -> None:
        self._e = e
        self._parts = e.level.split_start(e, start)

    def add(self, codes: Sequence[Value], words: Value) -> None:
        """Add, for each lane, the products of its 8 bytes with the same 8 int16.

        codes: two vectors of int32 lanes, of 4 bytes each. words: 8 high bytes, and then 8 low bytes, both signed, so
        that an int16 is 256 times the one plus the other.
        """
        e = self._e
        expect(len(codes) == 2 and words.type == vector(I8, 16), "two vectors, and 16 bytes", *codes, words)
        self._parts = e.level.split_add(e, self._parts, codes, words)

    @property
    def total(self) -> Value:
        return self._e.level.split_end(self._e, self._parts)


def _expect_words(total: Value, a: Value, b: Value) -> None:
    expect(
        total.lanes > 0 and total.lanes % 8 == 0 and total.type == a.type == b.type and total.element == I32,
        "three times int32 lanes, a multiple of 8",
        *(total, a, b),
    )


def pair_products(e: Emitter, unsigned: Value, signed: Value) -> Value:
    """Sums of adjacent pairs of products unsigned · signed: two vectors of bytes → int16. The sums must fit, and the
    unsigned bytes be below 128."""
    return e.level.pair_products(e, unsigned, signed)


def scaled_product(e: Emitter, a: Value, b: Value) -> Value:
    """a · b / 2¹⁵ of int16, rounded to nearest, ties upwards. a and b must not both be -2¹⁵."""
    return e.level.scaled_product(e, a, b)


def join_words(e: Emitter, low: Value, high: Value) -> Value:
    """int16 from 0 to 255 → bytes: each 128-bit lane has the 8 values of `low`'s lane, then the 8 of `high`'s."""
    return e.level.join_words(e, low, high)


def lookup_in_lanes(e: Emitter, table: Value, index: Value) -> Value:
    """In each 128-bit lane, the entries of `table`'s lane at the indices (< 16) of `index`'s lane: 32 or 64 bytes."""
    expect(table.type == index.type and index.lanes in (32, 64), "twice as many bytes, 32 or 64", table, index)
    return e.level.lookup_in_lanes(e, table, index)


class Table:
    """A table of bytes, prepared for the level's lookups."""

    def __init__(self, emitter: Emitter, pointer: Value, entries: int) -> None:
        self._find = emitter.level.table(emitter, pointer, entries)

    def __getitem__(self, index: Value) -> Value:
        """index: up to 64 bytes, each below the number of entries (at most 256) → the table's bytes."""
        expect(index.element == I8 and 0 < index.lanes <= 64, "up to 64 bytes", index)
        return self._find(index)


class PairTable:
    """Two tables of bytes with the same index and 16, 64, 128 or 256 entries each."""

    def __init__(self, emitter: Emitter, first: bytes, second: bytes) -> None:
        self._find = emitter.level.pair_table(emitter, first, second)

    def __getitem__(self, index: Value) -> tuple[Value, Value]:
        """index: 64 bytes, each below the number of entries → the bytes of the first table, and of the second."""
        expect(index.element == I8 and index.lanes == 64, "64 bytes", index)
        return self._find(index)

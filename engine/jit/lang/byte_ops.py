"""Dot products of bytes and of 16-bit words, and tables of bytes: the instructions that the kernels exist for.

LLVM does not find these by itself. Each level of CPU features has its own code for them, with the same results.
"""

from __future__ import annotations

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I8, I32, Value, expect


def dot4(e: Emitter, total: Value, unsigned: Value, signed: Value, *, fits: bool = False) -> Value:
    """total + the products of 4 bytes each: int32 lanes of unsigned and of signed bytes, exact.

    fits: pairs of products fit an int16, as with unsigned bytes up to 128. Without VNNI on x86 that is faster.
    """
    _expect_words(total, unsigned, signed)
    return e.level.dot4(e, total, unsigned, signed, fits)


def dot2(e: Emitter, total: Value, a: Value, b: Value) -> Value:
    """total + the products of 2 words each: int32 lanes of signed words, exact."""
    _expect_words(total, a, b)
    return e.level.dot2(e, total, a, b)


def _expect_words(total: Value, a: Value, b: Value) -> None:
    expect(
        total.lanes > 0 and total.lanes % 8 == 0 and total.type == a.type == b.type and total.element == I32,
        "three times int32 lanes, a multiple of 8",
        *(total, a, b),
    )


def pair_products(e: Emitter, unsigned: Value, signed: Value) -> Value:
    """The products of 2 bytes each, added: vectors of unsigned and of signed bytes → int16. The sums must fit."""
    return e.level.pair_products(e, unsigned, signed)


def scaled_product(e: Emitter, a: Value, b: Value) -> Value:
    """a · b / 2¹⁵ of int16, rounded to the nearest; a tie upwards. Not for two times -2¹⁵."""
    return e.level.scaled_product(e, a, b)


def join_words(e: Emitter, low: Value, high: Value) -> Value:
    """int16 from 0 to 255 as bytes: in each 16 bytes first those of 8 words of `low`, then those of 8 of `high`."""
    return e.level.join_words(e, low, high)


def lookup_in_lanes(e: Emitter, table: Value, index: Value) -> Value:
    """For each 16 bytes of `index`, all below 16, the entries of the same 16 bytes of `table`: 32 or 64 bytes."""
    expect(table.type == index.type and index.lanes in (32, 64), "twice as many bytes, 32 or 64", table, index)
    return e.level.lookup_in_lanes(e, table, index)


class Table:
    """A table of bytes in the form in which the level looks them up."""

    def __init__(self, emitter: Emitter, pointer: Value, entries: int) -> None:
        self._find = emitter.level.table(emitter, pointer, entries)

    def __getitem__(self, index: Value) -> Value:
        """index: up to 64 bytes below the number of entries, at most 256 → the bytes of the table."""
        expect(index.element == I8 and 0 < index.lanes <= 64, "up to 64 bytes", index)
        return self._find(index)


class PairTable:
    """Two tables of bytes that are looked up with the same index; 16, 64, 128 or 256 entries each."""

    def __init__(self, emitter: Emitter, first: bytes, second: bytes) -> None:
        self._find = emitter.level.pair_table(emitter, first, second)

    def __getitem__(self, index: Value) -> tuple[Value, Value]:
        """index: 64 bytes below the number of entries → the bytes of the first table, and of the second."""
        expect(index.element == I8 and index.lanes == 64, "64 bytes", index)
        return self._find(index)

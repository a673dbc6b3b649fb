"""Dot products of bytes and of 16-bit words, and tables of bytes: the instructions that the kernels exist for.

LLVM does not find these by itself. Each has code for every level of CPU features, with the same results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import I8, I16, I32, I64, Type, Value, expect, vector


def dot4(e: Emitter, total: Value, unsigned: Value, signed: Value, *, fits: bool = False) -> Value:
    """total + the products of 4 bytes each: int32 lanes of unsigned and of signed bytes, exact.

    fits: pairs of products fit an int16, as with unsigned bytes up to 128. Without VNNI on x86 that is faster.
    """
    _expect_bytes(total, unsigned, signed)
    lanes = total.lanes
    if e.level.adds_dot_products and 4 * lanes == e.level.byte_register == 64:
        return e.intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, total, unsigned, signed)
    if e.level.adds_dot_products:
        return e.by_parts(8, partial(_dot4_vnni256, e), total, unsigned, signed)
    if e.level.byte_register and not fits:
        return _dot4_words(e, total, unsigned, signed)
    if 4 * lanes == e.level.byte_register == 64:
        return _dot4_pairs(e, "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512", total, unsigned, signed)
    if e.level.byte_register:
        return e.by_parts(8, partial(_dot4_avx2, e), total, unsigned, signed)
    return _dot4_generic(total, unsigned, signed)


def _expect_bytes(total: Value, a: Value, b: Value) -> None:
    expect(
        total.lanes > 0 and total.lanes % 8 == 0 and total.type == a.type == b.type and total.element == I32,
        "three times int32 lanes, a multiple of 8",
        *(total, a, b),
    )


def _dot4_vnni256(e: Emitter, total: Value, unsigned: Value, signed: Value) -> Value:
    return e.intrinsic("llvm.x86.avx512.vpdpbusd.256", total.type, total, unsigned, signed)


def _dot4_avx2(e: Emitter, total: Value, unsigned: Value, signed: Value) -> Value:
    return _dot4_pairs(e, "avx2.pmadd.ub.sw", "avx2.pmadd.wd", total, unsigned, signed)


def _dot4_words(e: Emitter, total: Value, unsigned: Value, signed: Value) -> Value:
    """By bytes as words: those of even numbers, and those of odd ones."""
    words = vector(I16, 2 * total.lanes)
    a, b = unsigned.bits(words), signed.bits(words)
    total = dot2(e, total, (a & 255).bits(total.type), (b << 8).ashr(8).bits(total.type))
    return dot2(e, total, (a >> 8).bits(total.type), b.ashr(8).bits(total.type))


def _dot4_pairs(e: Emitter, pairs: str, quads: str, total: Value, unsigned: Value, signed: Value) -> Value:
    lanes = total.lanes
    bytes_, words = vector(I8, 4 * lanes), vector(I16, 2 * lanes)
    products = e.intrinsic(f"llvm.x86.{pairs}", words, unsigned.bits(bytes_), signed.bits(bytes_))
    return total + e.intrinsic(f"llvm.x86.{quads}", total.type, products, e.constant(words, 1))


def _dot4_generic(total: Value, unsigned: Value, signed: Value) -> Value:
    for shift in (0, 8, 16, 24):
        total = total + ((unsigned >> shift) & 255) * (signed << (24 - shift)).ashr(24)
    return total


def dot2(e: Emitter, total: Value, a: Value, b: Value) -> Value:
    """total + the products of 2 words each: int32 lanes of signed words, exact."""
    if e.level.adds_dot_products and 4 * total.lanes == e.level.byte_register == 64:
        return e.intrinsic("llvm.x86.avx512.vpdpwssd.512", total.type, total, a, b)
    if e.level.adds_dot_products:
        return e.by_parts(8, partial(_dot2_vnni256, e), total, a, b)
    if 4 * total.lanes == e.level.byte_register == 64:
        return _dot2_words(e, "avx512.pmaddw.d.512", total, a, b)
    if e.level.byte_register:
        return e.by_parts(8, partial(_dot2_words, e, "avx2.pmadd.wd"), total, a, b)
    return total + (a << 16).ashr(16) * (b << 16).ashr(16) + a.ashr(16) * b.ashr(16)


def _dot2_vnni256(e: Emitter, total: Value, a: Value, b: Value) -> Value:
    return e.intrinsic("llvm.x86.avx512.vpdpwssd.256", total.type, total, a, b)


def _dot2_words(e: Emitter, name: str, total: Value, a: Value, b: Value) -> Value:
    words = vector(I16, 2 * total.lanes)
    return total + e.intrinsic(f"llvm.x86.{name}", total.type, a.bits(words), b.bits(words))


def pair_products(e: Emitter, unsigned: Value, signed: Value) -> Value:
    """The products of 2 bytes each, added: vectors of unsigned and of signed bytes → int16. The sums must fit."""
    words = vector(I16, unsigned.lanes // 2)
    if e.level.byte_register:
        return _by_registers(e, "pmadd.ub.sw", "pmaddubs.w.512", words, unsigned, signed)
    a, b = unsigned.bits(words), signed.bits(words)
    return (a & 255) * (b << 8).ashr(8) + (a >> 8) * b.ashr(8)


def scaled_product(e: Emitter, a: Value, b: Value) -> Value:
    """a · b / 2¹⁵ of int16, rounded to the nearest; a tie upwards. Not for two times -2¹⁵."""
    if e.level.byte_register:
        return _by_registers(e, "pmul.hr.sw", "pmul.hr.sw.512", a.type, a, b)
    return ((a.sext(I32) * b.sext(I32) + (1 << 14)).ashr(15)).trunc(I16)


def join_words(e: Emitter, low: Value, high: Value) -> Value:
    """int16 from 0 to 255 as bytes: in each 16 bytes first those of 8 words of `low`, then those of 8 of `high`."""
    bytes_ = vector(I8, 2 * low.lanes)
    if e.level.byte_register:
        return _by_registers(e, "packuswb", "packuswb.512", bytes_, low, high)
    lanes = [first + 2 * (i % 8) + i // 8 * bytes_.count for first in range(0, bytes_.count, 16) for i in range(16)]
    return e.shuffle(low.bits(bytes_), high.bits(bytes_), lanes)


def _by_registers(e: Emitter, avx2: str, avx512: str, result: Type, a: Value, b: Value) -> Value:
    """An instruction on registers of 32 or 64 bytes; result: the type of the whole."""
    if result.count * result.element.width == 8 * e.level.byte_register == 512:
        return e.intrinsic(f"llvm.x86.avx512.{avx512}", result, a, b)
    part = vector(result.element, 256 // result.element.width)
    return e.by_parts(256 // a.element.width, lambda x, y: e.intrinsic(f"llvm.x86.avx2.{avx2}", part, x, y), a, b)


_PARTS = 8  # of 16 entries each: 128 entries, up to which an index is not negative as a signed byte


class Table:
    """A table of bytes in the form in which the level looks them up.

    With VBMI one instruction looks up 128 entries. Otherwise a table is cut into parts of 16 for `pshufb`, which gives
    0 for an index with its highest bit set. A part holds its entries, by exclusive or with those of the part before.
    From part to part the index is reduced by 16, and the exclusive or of all that is found is the entry: parts above
    the index's own find 0, since the reduced index is negative there.
    """

    def __init__(self, emitter: Emitter, pointer: Value, entries: int) -> None:
        self._e, self._pointer = emitter, pointer
        level = emitter.level
        self._is_wide = level.wide_tables and entries > 16
        if self._is_wide:
            self.parts = [emitter.load(pointer, vector(I8, 64), first) for first in range(0, entries, 64)]
        elif width := level.byte_register:
            lines = [emitter.load(pointer, vector(I8, 16), first) for first in range(0, entries, 16)]
            steps = [line ^ lines[i - 1] if i % _PARTS else line for i, line in enumerate(lines)]
            self.parts = [emitter.shuffle(step, step, [i % 16 for i in range(width)]) for step in steps]
        else:
            self._place = emitter.stack(64)

    def __getitem__(self, index: Value) -> Value:
        """index: up to 64 bytes below the number of entries, at most 256 → the bytes of the table."""
        e = self._e
        expect(index.element == I8 and 0 < index.lanes <= 64, "up to 64 bytes", index)
        if self._is_wide:
            return e.by_parts(64, self._wide, index)
        if e.level.byte_register:
            return _pshufb(e, [self], index)[0]
        e.store(index, self._place)
        with e.loop(0, index.lanes) as lane:
            entry = self._pointer + e.load(self._place + lane, I8).zext(I64)
            e.store(e.load(entry, I8), self._place + lane)
        return e.load(self._place, index.type)

    def _wide(self, index: Value) -> Value:
        e, parts = self._e, self.parts
        if len(parts) == 1:
            return e.intrinsic("llvm.x86.avx512.permvar.qi.512", index.type, parts[0], index)
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        low = e.intrinsic(name, index.type, parts[0], index, parts[1])
        if len(parts) == 2:
            return low
        high = e.intrinsic(name, index.type, parts[2], index, parts[3])
        return e.select(index < 0, high, low)


def _pshufb(e: Emitter, tables: Sequence[Table], index: Value) -> list[Value]:
    """The bytes of each table. A part is loaded once for the whole index, in as many registers as it takes."""
    width = e.level.byte_register
    name = "llvm.x86.avx512.pshuf.b.512" if width == 64 else "llvm.x86.avx2.pshuf.b"
    pieces = [e.part(index, first, width) for first in range(0, index.lanes, width)]
    halves = range(0, len(tables[0].parts), _PARTS)
    low = [piece & 127 for piece in pieces] if len(halves) > 1 else pieces
    totals: dict[tuple[Table, int, int], Value] = {}
    for number in range(min(_PARTS, len(tables[0].parts))):
        own = [piece - 16 * number for piece in low] if number else low
        for table, first in product(tables, halves):
            for i, piece in enumerate(own):
                entry = e.intrinsic(name, piece.type, table.parts[first + number], piece)
                before = totals.get((table, first, i))
                totals[table, first, i] = entry if before is None else before ^ entry
    found = []
    for table in tables:
        own = [totals[table, 0, i] for i in range(len(pieces))]
        if len(halves) > 1:
            own = [e.select(piece < 0, totals[table, _PARTS, i], own[i]) for i, piece in enumerate(pieces)]
        found.append(e.join(own))
    return found


def lookup_in_lanes(e: Emitter, table: Value, index: Value) -> Value:
    """For each 16 bytes of `index`, all below 16, the entries of the same 16 bytes of `table`: 32 or 64 bytes."""
    expect(table.type == index.type and index.lanes in (32, 64), "twice as many bytes, 32 or 64", table, index)
    if e.level.byte_register:
        width = min(e.level.byte_register, index.lanes)
        name = "llvm.x86.avx512.pshuf.b.512" if width == 64 else "llvm.x86.avx2.pshuf.b"
        return e.by_parts(width, lambda a, b: e.intrinsic(name, a.type, a, b), table, index)
    entries, places = e.stack(64), e.stack(64)
    e.store(table, entries)
    e.store(index, places)
    with e.loop(0, index.lanes) as lane:
        place = (lane & -16) + e.load(places + lane, I8).zext(I64)
        e.store(e.load(entries + place, I8), places + lane)
    return e.load(places, index.type)


class PairTable:
    """Two tables of bytes that are looked up with the same index; 16, 64, 128 or 256 entries each.

    AVX-512 without VBMI looks up 64 words at a time: both bytes of an entry together, of 32 indices.
    """

    def __init__(self, emitter: Emitter, first: bytes, second: bytes) -> None:
        self._e = emitter
        level, entries = emitter.level, len(first)
        self._is_words = level.byte_register == 64 and not level.wide_tables and entries >= 64
        if self._is_words:
            both = emitter.constant_bytes(bytes(byte for entry in zip(first, second, strict=True) for byte in entry))
            self._parts = [emitter.load(both, vector(I16, 32), 64 * i) for i in range(entries // 32)]
        else:
            self._tables = [Table(emitter, emitter.constant_bytes(side), entries) for side in (first, second)]

    def __getitem__(self, index: Value) -> tuple[Value, Value]:
        """index: 64 bytes below the number of entries → the bytes of the first table, and of the second."""
        e = self._e
        if self._is_words:
            even = index.bits(vector(I16, 32))
            low, high = self._entries(even), self._entries(even >> 8)
            first, second = (low & 255) | (high << 8), (low >> 8) | (high & -256)
            return first.bits(index.type), second.bits(index.type)
        a, b = self._tables
        if e.level.byte_register and not e.level.wide_tables:
            first, second = _pshufb(e, self._tables, index)
            return first, second
        return a[index], b[index]

    def _entries(self, index: Value) -> Value:
        """index: words, of which the low bytes count → the entries."""
        e, name, found = self._e, "llvm.x86.avx512.vpermi2var.hi.512", self._parts
        parts = [e.intrinsic(name, index.type, a, index, b) for a, b in zip(found[::2], found[1::2], strict=True)]
        bit = 64
        while len(parts) > 1:
            beyond = (index & bit).equals(bit)
            parts = [e.select(beyond, b, a) for a, b in zip(parts[::2], parts[1::2], strict=True)]
            bit *= 2
        return parts[0]

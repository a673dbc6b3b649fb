"""A level of CPU features; `engine.jit.isa` has a class for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from polarlm.engine.jit.lang.values import F32, I8, I16, I32, I64, Value, Values, vector

LARGEST_SPLIT = 127 * 256 + 127  # the largest int16 that is 256 times a signed byte, and a signed byte


class ByteSum:
    """A sum of products of vectors of bytes, in int32 lanes. at_once: vectors that a turn of a loop should add."""

    at_once = 2

    def __init__(self, add: Callable[[Value, Value, Value], Value], start: Value) -> None:
        """add(total, a, b): total plus the products of the 4 bytes of each lane."""
        self._add, self._total = add, start

    def add(self, a: Value, b: Value) -> None:
        self._total = self._add(self._total, a, b)

    def end(self) -> Value:
        return self._total


class Level:
    """A level of CPU features: the sizes of its registers, and its code for what LLVM does not find by itself.

    Operations take e, the `Emitter`, and give the same results at every level. Here they are made of LLVM's own
    instructions; a level overrides the operations that its CPU has instructions for.
    """

    name: str
    machine = ""  # LLVM's name of the machine that has the instructions, as `compile.target.machine`; empty for any
    cpu = ""  # LLVM's name of a CPU that has the features; empty for any CPU
    needs: tuple[str, ...] = ()  # LLVM's names of the features that the host must have
    wishes: tuple[str, ...] = ()  # tuning flags for LLVM

    lanes = 4  # 32-bit numbers per register
    registers = 16  # number of vector registers
    code_tiles: tuple[tuple[int, int], ...] = ((2, 1),)
    """Register tiles (rows, 16-column vectors) of products with codes: one that covers few rows completely, and one
    that minimises loads for many rows."""
    code_outputs = 16  # outputs of a tile, 16 or 8, that products of codes with several rows sum at once
    keeps_order = False
    """Whether `keep_order` and `black_box` do something. Kernels of such a level read again what has no place in
    registers, and compute a few sums after the other, where others would compute all of them together."""
    orders_sums = False
    """Whether `order_sum` does something: sums of several rows are computed in the order in which they are emitted, and
    stay in registers. Where those are few, LLVM would write products to the stack and add them later."""
    float_tile = 2, 1  # rows and 16-column vectors of a register tile of products of float32
    byte_register = 0  # bytes of the registers of byte and int16 instructions; 0 if the level has no such instructions
    fuses = False  # whether multiply-add of floats is one instruction with one rounding
    signed_dots = False
    """Whether signed bytes times signed bytes take fewer instructions than unsigned bytes times signed bytes."""
    most_code = 0
    """The largest code whose products with inputs of 8 bits take less time than with 16 bits; 0 if there is none."""
    splits_words = False  # whether products of bytes with int16 are faster as products with the two bytes of each int16
    split_rows = 0
    """Rows up to which products of unsigned bytes with int16 are faster as products with the two bytes of each int16:
    codes need not become words then, which more rows would share."""
    near_rows = 0
    """Rows up to which loops that read codes prefetch those that they read next, in the order of memory: it is all that
    the hardware needs to prefetch the following ones. Loops of more rows, which are slower, prefetch codes that lie
    some kilobytes later."""
    unpacks_first = False
    """Whether products of many rows with codes are faster if the codes were unpacked to words in memory before."""
    multiplies_words = False
    """Whether more words than float32 are multiplied at a time: numbers of 16 bits then become words, and prompts
    attend by words."""
    halves_products = False
    """Whether sums of words cost so little that half as many products, of sums, are faster (Winograd)."""
    matrices: Any = None
    """Registers that hold matrices, and are multiplied by one instruction (`isa.x86.AmxTiles`); None if the level has
    none."""
    wide_tables = False
    """Whether one instruction looks up 64 bytes in a table of 64 or 128. It ignores higher bits of the index."""

    @property
    def features(self) -> str:
        """Features and tuning flags as LLVM reads them."""
        return ",".join([*(f"+{name}" for name in self.needs), *self.wishes])

    @property
    def has_room(self) -> bool:
        """Whether registers hold at least 16 vectors of 16 numbers: the sums of several rows and their operands."""
        return self.registers * self.lanes >= 16 * 16

    def dot4(self, e: Any, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        """total + Σ unsigned · signed over the 4 bytes of each int32 lane, exact. The lanes are a multiple of 8.

        fits: the sum of two products fits an int16, as with unsigned bytes up to 128. On x86 without VNNI that is
        faster.
        """
        for shift in (0, 8, 16, 24):
            total = total + ((unsigned >> shift) & 255) * (signed << (24 - shift)).ashr(24)
        return total

    def dot4_signed(self, e: Any, total: Value, a: Value, b: Value) -> Value:
        """total + Σ a · b over the 4 bytes of each int32 lane, both signed, exact. b must not be -128.

        With `signed_dots` it is faster than `dot4`, also for unsigned bytes below 128.
        """
        for shift in (0, 8, 16, 24):
            total = total + (a << (24 - shift)).ashr(24) * (b << (24 - shift)).ashr(24)
        return total

    def dot2(self, e: Any, total: Value, a: Value, b: Value) -> Value:
        """total + Σ a · b over the 2 int16 of each int32 lane, exact."""
        return total + (a << 16).ashr(16) * (b << 16).ashr(16) + a.ashr(16) * b.ashr(16)

    def sum_of_bytes(self, e: Any, start: Value, most: int) -> ByteSum:
        """start + products of bytes with signed bytes, exact, in int32 lanes. most: the largest magnitude of a product.
        The former are unsigned; with `signed_dots` signed, and the latter above -128."""
        return ByteSum(partial(self.dot4_signed if self.signed_dots else self.dot4, e), start)

    def split_start(self, e: Any, high: Value, low: Value) -> list[Value]:
        """What `split_add` adds to: two sums, with a start value for each lane, of products of signed bytes with two
        rows of signed bytes. With `splits_words` the rows may be the high and the low bytes of int16 of magnitude up to
        `LARGEST_SPLIT`, which is faster than `dot2`."""
        return [high, low]

    def split_add(self, e: Any, sums: Values, codes: Values, words: Value) -> list[Value]:
        """Add, for each lane, the products of its 8 bytes with the same 8 bytes of both rows.

        codes: two vectors of int32 lanes, of 4 bytes each. words (16,): 8 bytes of the first row, and then of the
        second.
        """
        fours, totals = words.bits(vector(I32, 4)), []
        for part, total in enumerate(sums):
            for i, code in enumerate(codes):
                total = self.dot4_signed(e, total, code, e.splat(e.extract(fours, 2 * part + i), code.lanes))
            totals.append(total)
        return totals

    def split_end(self, e: Any, sums: Values) -> list[Value]:
        """Both sums, int32."""
        return list(sums)

    def to_bfloat(self, e: Any, low: Value, high: Value) -> Value:
        """Two vectors of float32 (n,) → the nearest bfloat16 (2 n,), ties to even, as int16: low's, then high's."""
        halves = []
        for x in (low, high):
            bits = x.bits(vector(I32, x.lanes))
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)
            halves.append((e.select(x.equals(x), rounded, bits | 0x400000) >> 16).trunc(I16))
        return e.join(halves)

    def times_power(self, e: Any, x: Value, n: Value) -> Value:
        """x · 2^n of vectors of float32, n whole numbers up to 127; 0 where n is below -126."""
        power = e.round(e.select(n < -127.0, e.const_like(-127.0, n), n)) + 127
        return x * (power << 23).bits(x.type)

    def pair_products(self, e: Any, unsigned: Value, signed: Value) -> Value:
        """Sums of adjacent pairs of products unsigned · signed: two vectors of bytes → int16. The sums must fit, and
        the unsigned bytes be below 128."""
        words = vector(I16, unsigned.lanes // 2)
        a, b = unsigned.bits(words), signed.bits(words)
        return (a & 255) * (b << 8).ashr(8) + (a >> 8) * b.ashr(8)

    def scaled_product(self, e: Any, a: Value, b: Value) -> Value:
        """a · b / 2¹⁵ of int16, rounded to nearest, ties upwards. a and b must not both be -2¹⁵."""
        return ((a.sext(I32) * b.sext(I32) + (1 << 14)).ashr(15)).trunc(I16)

    def join_words(self, e: Any, low: Value, high: Value) -> Value:
        """int16 from 0 to 255 → bytes: each 128-bit lane has the 8 values of `low`'s lane, then the 8 of `high`'s."""
        bytes_ = vector(I8, 2 * low.lanes)
        lanes = [first + 2 * (i % 8) + i // 8 * bytes_.count for first in range(0, bytes_.count, 16) for i in range(16)]
        return e.shuffle(low.bits(bytes_), high.bits(bytes_), lanes)

    def lookup_in_lanes(self, e: Any, table: Value, index: Value) -> Value:
        """In each lane of 128 bits, the entries of `table` at the indices (< 16) in `index`: 32 or 64 bytes."""
        entries, places = e.stack(64), e.stack(64)
        e.store(table, entries)
        e.store(index, places)
        with e.loop(0, index.lanes) as lane:
            place = (lane & -16) + e.load(places + lane, I8).zext(I64)
            e.store(e.load(entries + place, I8), places + lane)
        return e.load(places, index.type)

    def table(self, e: Any, pointer: Value, entries: int) -> Callable[[Value], Value]:
        """A function that looks up to 64 indices, bytes below `entries` ≤ 256, up in the bytes at a pointer."""
        place = e.stack(64)

        def find(index: Value) -> Value:
            e.store(index, place)
            with e.loop(0, index.lanes) as lane:
                entry = pointer + e.load(place + lane, I8).zext(I64)
                e.store(e.load(entry, I8), place + lane)
            return e.load(place, index.type)

        return find

    def pair_table(self, e: Any, first: bytes, second: bytes) -> Callable[[Value], tuple[Value, Value]]:
        """A function that looks 64 indices up in two tables of 16, 64, 128 or 256 bytes."""
        a, b = (self.table(e, e.constant_bytes(side), len(side)) for side in (first, second))
        return lambda index: (a(index), b(index))

    def float_table(self, e: Any, entries: Sequence[float]) -> Callable[[Value], Value] | None:
        """A function that looks up int32 (16,) in up to 256 float32 that lie in registers; None where a level would not
        find them faster there than in memory."""
        return None

    def half_to_float(self, e: Any, bits: Value) -> Value:
        wide = bits.zext(I32)
        magnitude = ((wide & 0x7FFF) << 13).bits(vector(F32, bits.lanes) if bits.lanes else F32) * 2.0**112
        # Magnitudes ≥ 65536 stand for infinity or NaN, whose exponent bits are all ones.
        other = e.select(magnitude >= 65536.0, e.const_like(0x7F800000, wide), e.const_like(0, wide))
        sign = (wide & 0x8000) << 16
        return (magnitude.bits(wide.type) | other | sign).bits(magnitude.type)

    def float_to_half(self, e: Any, x: Value) -> Value:
        bits = x.bits(vector(I32, x.lanes) if x.lanes else I32)
        magnitude = bits & 0x7FFFFFFF
        even = (magnitude >> 13) & 1
        normal = (magnitude + even + (0xFFF - (112 << 23))) >> 13
        small = (magnitude.bits(x.type) + 0.5).bits(bits.type) - 0x3F000000  # multiples of 2⁻²⁴
        half = e.select(magnitude < 113 << 23, small, normal)
        return (half | ((bits >> 16) & 0x8000)).trunc(I16)

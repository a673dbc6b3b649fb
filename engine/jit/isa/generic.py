"""The level of any CPU that LLVM knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.level import Level
from polarlm.engine.jit.lang.values import F16, F32, I8, I16, I32, I64, Value, vector


class Generic(Level):
    """All operations, made of LLVM's own instructions."""

    name = "generic"

    def dot4(self, e: Emitter, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        for shift in (0, 8, 16, 24):
            total = total + ((unsigned >> shift) & 255) * (signed << (24 - shift)).ashr(24)
        return total

    def dot4_signed(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        for shift in (0, 8, 16, 24):
            total = total + (a << (24 - shift)).ashr(24) * (b << (24 - shift)).ashr(24)
        return total

    def dot2(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        return total + (a << 16).ashr(16) * (b << 16).ashr(16) + a.ashr(16) * b.ashr(16)

    def split_start(self, e: Emitter, start: Value) -> list[Value]:
        return [e.zero(start.type), start]

    def split_add(self, e: Emitter, sums: Sequence[Value], codes: Sequence[Value], words: Value) -> list[Value]:
        fours, found = words.bits(vector(I32, 4)), []
        for part, total in enumerate(sums):
            for i, own in enumerate(codes):
                total = self.dot4_signed(e, total, own, e.splat(e.extract(fours, 2 * part + i), own.lanes))
            found.append(total)
        return found

    def split_end(self, e: Emitter, sums: Sequence[Value]) -> Value:
        high, low = sums
        return (high << 8) + low

    def pair_products(self, e: Emitter, unsigned: Value, signed: Value) -> Value:
        words = vector(I16, unsigned.lanes // 2)
        a, b = unsigned.bits(words), signed.bits(words)
        return (a & 255) * (b << 8).ashr(8) + (a >> 8) * b.ashr(8)

    def scaled_product(self, e: Emitter, a: Value, b: Value) -> Value:
        return ((a.sext(I32) * b.sext(I32) + (1 << 14)).ashr(15)).trunc(I16)

    def join_words(self, e: Emitter, low: Value, high: Value) -> Value:
        bytes_ = vector(I8, 2 * low.lanes)
        lanes = [first + 2 * (i % 8) + i // 8 * bytes_.count for first in range(0, bytes_.count, 16) for i in range(16)]
        return e.shuffle(low.bits(bytes_), high.bits(bytes_), lanes)

    def lookup_in_lanes(self, e: Emitter, table: Value, index: Value) -> Value:
        entries, places = e.stack(64), e.stack(64)
        e.store(table, entries)
        e.store(index, places)
        with e.loop(0, index.lanes) as lane:
            place = (lane & -16) + e.load(places + lane, I8).zext(I64)
            e.store(e.load(entries + place, I8), places + lane)
        return e.load(places, index.type)

    def table(self, e: Emitter, pointer: Value, entries: int) -> Callable[[Value], Value]:
        place = e.stack(64)

        def find(index: Value) -> Value:
            e.store(index, place)
            with e.loop(0, index.lanes) as lane:
                entry = pointer + e.load(place + lane, I8).zext(I64)
                e.store(e.load(entry, I8), place + lane)
            return e.load(place, index.type)

        return find

    def pair_table(self, e: Emitter, first: bytes, second: bytes) -> Callable[[Value], tuple[Value, Value]]:
        a, b = (self.table(e, e.constant_bytes(side), len(side)) for side in (first, second))
        return lambda index: (a(index), b(index))

    def half_to_float(self, e: Emitter, bits: Value) -> Value:
        wide = bits.zext(I32)
        magnitude = ((wide & 0x7FFF) << 13).bits(vector(F32, bits.lanes) if bits.lanes else F32) * 2.0**112
        # Magnitudes ≥ 65536 stand for infinity or NaN, whose exponent bits are all ones.
        other = e.select(magnitude >= 65536.0, e.like(0x7F800000, wide), e.like(0, wide))
        sign = (wide & 0x8000) << 16
        return (magnitude.bits(wide.type) | other | sign).bits(magnitude.type)

    def float_to_half(self, e: Emitter, x: Value) -> Value:
        bits = x.bits(vector(I32, x.lanes) if x.lanes else I32)
        magnitude = bits & 0x7FFFFFFF
        even = (magnitude >> 13) & 1
        normal = (magnitude + even + (0xFFF - (112 << 23))) >> 13
        small = (magnitude.bits(x.type) + 0.5).bits(bits.type) - 0x3F000000  # multiples of 2⁻²⁴
        half = e.select(magnitude < 113 << 23, small, normal)
        return (half | ((bits >> 16) & 0x8000)).trunc(I16)


class ConvertsHalves(Generic):
    """The same for CPUs that have instructions for float16, which LLVM finds."""

    def half_to_float(self, e: Emitter, bits: Value) -> Value:
        half = bits.bits(vector(F16, bits.lanes) if bits.lanes else F16)
        return Value(e, e.builder.fpext(half.ir, vector(F32, bits.lanes) if bits.lanes else F32))

    def float_to_half(self, e: Emitter, x: Value) -> Value:
        half = e.builder.fptrunc(x.ir, vector(F16, x.lanes) if x.lanes else F16)
        return Value(e, half).bits(vector(I16, x.lanes) if x.lanes else I16)


LEVELS = (Generic(),)

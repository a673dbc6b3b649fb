"""The levels of AArch64: NEON, with or without dot products of bytes and products of matrices of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from polarlm.engine.jit.isa.generic import NativeHalves
from polarlm.engine.jit.lang import I8, I16, I32, Emitter, Value, Values, vector

_BYTES, _WORDS, _LANES = vector(I8, 16), vector(I16, 8), vector(I32, 4)  # a register's contents
_TABLE_BYTES = 64  # bytes of a table in the four registers of a `tbl`


class Neon(NativeHalves):
    """NEON of every AArch64 CPU. It multiplies bytes to int16 and adds pairs of those to int32."""

    name = "neon"
    machine = "aarch64"
    needs: tuple[str, ...] = ("neon",)
    registers = 32
    code_tiles: tuple[tuple[int, int], ...] = ((3, 1),)
    keeps_order = True
    float_tile = 6, 1
    byte_register = 16
    fuses = True
    signed_dots = True

    def dot4(self, e: Emitter, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        """Bytes of even index and of odd index as int16."""

        def add(total: Value, unsigned: Value, signed: Value) -> Value:
            a, b = unsigned.bits(_WORDS), signed.bits(_WORDS)
            even, odd = (a & 255) * (b << 8).ashr(8), (a >> 8) * b.ashr(8)
            return _add_pairs(e, total, even + odd) if fits else _add_pairs(e, _add_pairs(e, total, even), odd)

        return e.map_parts(4, add, total, unsigned, signed)

    def dot4_signed(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        def add(total: Value, a: Value, b: Value) -> Value:
            return _add_pairs(e, total, self.pair_products(e, a.bits(_BYTES), b.bits(_BYTES)))

        return e.map_parts(4, add, total, a, b)

    def dot2(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        """Words of even index and of odd index, so that LLVM finds `smlal`: the product of words, added to int32."""
        words = vector(I16, 2 * total.lanes)
        a, b = a.bits(words), b.bits(words)
        for first in (0, 1):
            lanes = range(first, words.count, 2)
            total = total + e.shuffle(a, a, lanes).sext(I32) * e.shuffle(b, b, lanes).sext(I32)
        return total

    def pair_products(self, e: Emitter, unsigned: Value, signed: Value) -> Value:
        def multiply(a: Value, b: Value) -> Value:
            low, high = (e.part(a, first, 8).sext(I16) * e.part(b, first, 8).sext(I16) for first in (0, 8))
            return e.intrinsic("llvm.aarch64.neon.addp.v8i16", _WORDS, low, high)

        return e.map_parts(16, multiply, unsigned, signed)

    def scaled_product(self, e: Emitter, a: Value, b: Value) -> Value:
        return e.map_parts(8, partial(e.intrinsic, "llvm.aarch64.neon.sqrdmulh.v8i16", _WORDS), a, b)

    def lookup_in_lanes(self, e: Emitter, table: Value, index: Value) -> Value:
        return e.map_parts(16, lambda line, table_address: _lookup(e, [line], table_address), table, index)

    def table(self, e: Emitter, pointer: Value, entries: int) -> Callable[[Value], Value]:
        """A lookup among four registers, and another one for each further four, which leaves the bytes found before.
        Registers of a large table are loaded for each vector of indices: they would leave none for anything else."""
        few = [e.load(pointer, _BYTES)] if entries == _BYTES.count else []

        def find(index: Value) -> Value:
            parts = [e.part(index, lane, 16) for lane in range(0, index.lanes, 16)]
            results: list[Value | None] = [None for _ in parts]
            for first in range(0, entries, _TABLE_BYTES):
                lines, table_address = few, pointer if few else e.black_box(pointer)
                if not few:
                    e.keep_order()
                    lines = [
                        e.load(table_address, _BYTES, line)
                        for line in range(first, min(entries, first + _TABLE_BYTES), 16)
                    ]
                parts = [e.black_box(part) - _TABLE_BYTES if first else part for part in parts]
                results = [_lookup(e, lines, part, result) for part, result in zip(parts, results, strict=True)]
            return e.join([result for result in results if result is not None])

        def map_registers(index: Value) -> Value:
            if index.lanes >= 16:
                return find(index)
            wide = e.shuffle(index, index, [lane % index.lanes for lane in range(16)])
            return e.part(find(wide), 0, index.lanes)

        return map_registers


def _lookup(e: Emitter, lines: Values, index: Value, fallback: Value | None = None) -> Value:
    """The bytes of up to four registers at the indices of a register; where one is beyond them, `fallback`, or 0."""
    name = f"llvm.aarch64.neon.tb{'l' if fallback is None else 'x'}{len(lines)}.v16i8"
    return e.intrinsic(name, _BYTES, *([] if fallback is None else [fallback]), *lines, index)


def _add_pairs(e: Emitter, total: Value, words: Value) -> Value:
    """total (4,) plus the sums of adjacent pairs of int16 (8,). LLVM would add several such sums in an order of its
    own, and keep all of them until then."""
    sums = total + e.intrinsic("llvm.aarch64.neon.saddlp.v4i32.v8i16", _LANES, words)
    return e.black_box(sums, has_own_value=False)


class NeonDot(Neon):
    name = "neon-dot"
    needs = (*Neon.needs, "dotprod")
    code_outputs = 8
    splits_words = True
    most_code = 255

    def dot4(self, e: Emitter, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        """Unsigned bytes less 128 are signed. What that lacks does not depend on them, so it is shared by products."""

        def add(total: Value, unsigned: Value, signed: Value) -> Value:
            half, zero = e.constant(_BYTES, 64), e.zero(_LANES)
            a, b = unsigned.bits(_BYTES), signed.bits(_BYTES)
            lacks = _dot(e, "sdot", _dot(e, "sdot", zero, half, b), half, b)
            return _dot(e, "sdot", total, a ^ -128, b) + lacks

        return e.map_parts(4, add, total, unsigned, signed)

    def dot4_signed(self, e: Emitter, total: Value, a: Value, b: Value) -> Value:
        return _dots(e, "sdot", total, a, b)


class NeonI8mm(NeonDot):
    """NEON with dot products and products of matrices of bytes, signed and mixed."""

    name = "neon-i8mm"
    needs = (*NeonDot.needs, "i8mm")
    code_tiles = ((3, 1),)

    def split_start(self, e: Emitter, high: Value, low: Value) -> list[Value]:
        """Sums of both rows in turn, since a product of matrices is of two lanes with both."""
        return [e.shuffle(high, low, [i for lane in range(low.lanes) for i in (lane, lane + low.lanes)])]

    def split_add(self, e: Emitter, sums: Values, codes: Values, words: Value) -> list[Value]:
        even, odd = codes
        both = e.shuffle(even, odd, [i for lane in range(even.lanes) for i in (lane, lane + even.lanes)])

        def add(total: Value, pairs: Value) -> Value:
            return _dot(e, "smmla", total, pairs.bits(_BYTES), words)

        return [e.map_parts(4, add, *sums, both)]

    def split_end(self, e: Emitter, sums: Values) -> list[Value]:
        (both,) = sums
        return [e.shuffle(both, both, range(first, both.lanes, 2)) for first in (0, 1)]

    def dot4(self, e: Emitter, total: Value, unsigned: Value, signed: Value, fits: bool = False) -> Value:
        return _dots(e, "usdot", total, unsigned, signed)


def _dots(e: Emitter, name: str, total: Value, a: Value, b: Value) -> Value:
    def add(total: Value, a: Value, b: Value) -> Value:
        return _dot(e, name, total, a.bits(_BYTES), b.bits(_BYTES))

    return e.map_parts(4, add, total, a, b)


def _dot(e: Emitter, name: str, total: Value, a: Value, b: Value) -> Value:
    return e.intrinsic(f"llvm.aarch64.neon.{name}.v4i32.v16i8", _LANES, total, a, b)


# In ascending order. A level is a subset of every later one.
LEVELS = Neon(), NeonDot(), NeonI8mm()

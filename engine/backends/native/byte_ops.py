"""Dot products of bytes, and tables of bytes: the instructions that the kernels exist for.

LLVM does not find these by itself. Each has code for every level of CPU features, with the same results.
"""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from engine.backends.native.emit import Emitter
from engine.backends.native.values import I1, I8, I16, I64, Value, vector


def dot4(e: Emitter, total: Value, unsigned: Value, signed: Value) -> Value:
    """total + the products of 4 bytes each: int32 lanes of unsigned and of signed bytes, exact.

    Without VNNI on x86, pairs of products must fit an int16: unsigned bytes up to 128.
    """
    lanes = total.lanes
    if lanes == 16 and e.level.has("avx512vnni"):
        return e.intrinsic("llvm.x86.avx512.vpdpbusd.512", total.type, total, unsigned, signed)
    if e.level.has("avxvnni") or e.level.has("avx512vnni"):
        return e.by_parts(8, partial(_dot4_vnni256, e), total, unsigned, signed)
    if lanes == 16 and e.level.has("avx512bw"):
        return _dot4_pairs(e, "avx512.pmaddubs.w.512", "avx512.pmaddw.d.512", total, unsigned, signed)
    if e.level.has("avx2"):
        return e.by_parts(8, partial(_dot4_avx2, e), total, unsigned, signed)
    return _dot4_generic(e, total, unsigned, signed)


def _dot4_vnni256(e: Emitter, total: Value, unsigned: Value, signed: Value) -> Value:
    return e.intrinsic("llvm.x86.avx512.vpdpbusd.256", total.type, total, unsigned, signed)


def _dot4_avx2(e: Emitter, total: Value, unsigned: Value, signed: Value) -> Value:
    return _dot4_pairs(e, "avx2.pmadd.ub.sw", "avx2.pmadd.wd", total, unsigned, signed)


def _dot4_pairs(e: Emitter, pairs: str, quads: str, total: Value, unsigned: Value, signed: Value) -> Value:
    lanes = total.lanes
    bytes_, words = vector(I8, 4 * lanes), vector(I16, 2 * lanes)
    products = e.intrinsic(f"llvm.x86.{pairs}", words, unsigned.bits(bytes_), signed.bits(bytes_))
    return total + e.intrinsic(f"llvm.x86.{quads}", total.type, products, e.constant(words, 1))


def dot4_signed(e: Emitter, total: Value, a: Value, b: Value) -> Value:
    """total + the products of 4 bytes each: int32 lanes of signed bytes above -128, exact."""
    if not e.level.has("avx2"):
        return _dot4_generic(e, total, a, b, is_signed=True)
    bytes_ = vector(I8, 4 * total.lanes)
    signs, b = a.bits(bytes_) < 0, b.bits(bytes_)
    magnitude = e.same("abs", a.bits(bytes_), Value(e, ir.Constant(I1, 0)))
    return dot4(e, total, magnitude.bits(total.type), e.select(signs, -b, b).bits(total.type))


def _dot4_generic(e: Emitter, total: Value, a: Value, signed: Value, is_signed: bool = False) -> Value:
    for shift in (0, 8, 16, 24):
        low = (a << (24 - shift)).ashr(24) if is_signed else (a >> shift) & 255
        high = (signed << (24 - shift)).ashr(24)
        total = total + low * high
    return total


class Table:
    """A table of bytes in the form in which the level looks them up.

    With VBMI one instruction looks up 128 entries. Otherwise a table is cut into tables of 16 for `pshufb`, which
    gives 0 for an index with its highest bit set: all tables are looked up, with saturated indices, and or-ed.
    """

    def __init__(self, emitter: Emitter, pointer: Value, entries: int) -> None:
        self._e, self._pointer, self._entries = emitter, pointer, entries
        level = emitter.level
        self._is_vbmi = level.has("avx512vbmi") and entries > 16
        if self._is_vbmi:
            self._parts = [emitter.load(pointer, vector(I8, 64), first) for first in range(0, entries, 64)]
        elif level.has("avx2"):
            width = 4 * level.lanes
            lines = [emitter.load(pointer, vector(I8, 16), first) for first in range(0, entries, 16)]
            self._parts = [emitter.shuffle(line, line, [i % 16 for i in range(width)]) for line in lines]
        else:
            self._place = emitter.stack(64)

    def __getitem__(self, index: Value) -> Value:
        """index: up to 64 bytes below `entries` → the bytes of the table."""
        e = self._e
        if self._is_vbmi:
            return e.by_parts(64, self._vbmi, index)
        if e.level.has("avx2"):
            return e.by_parts(4 * e.level.lanes, self._pshufb, index)
        e.store(index, self._place)
        with e.loop(0, index.lanes) as lane:
            entry = self._pointer + e.load(self._place + lane, I8).zext(I64)
            e.store(e.load(entry, I8), self._place + lane)
        return e.load(self._place, index.type)

    def _vbmi(self, index: Value) -> Value:
        e, parts = self._e, self._parts
        if len(parts) == 1:
            return e.intrinsic("llvm.x86.avx512.permvar.qi.512", index.type, parts[0], index)
        name = "llvm.x86.avx512.vpermi2var.qi.512"
        low = e.intrinsic(name, index.type, parts[0], index, parts[1])
        if len(parts) == 2:
            return low
        high = e.intrinsic(name, index.type, parts[2], index, parts[3])
        return e.select(index < 0, high, low)

    def _pshufb(self, index: Value) -> Value:
        e = self._e
        name = "llvm.x86.avx512.pshuf.b.512" if index.lanes == 64 else "llvm.x86.avx2.pshuf.b"
        if len(self._parts) == 1:
            return e.intrinsic(name, index.type, self._parts[0], index)
        found = None
        for number, part in enumerate(self._parts):
            own = e.same("uadd.sat", index - 16 * number, 0x70)
            entry = e.intrinsic(name, index.type, part, own)
            found = entry if found is None else found | entry
        assert found is not None
        return found

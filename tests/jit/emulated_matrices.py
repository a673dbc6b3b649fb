"""Registers of matrices for CPUs without AMX: memory, and loops over what its instructions are said to read."""

from __future__ import annotations

from polarlm.engine.jit.isa.x86 import AmxTiles, Avx512Amx, Avx512Vbmi
from polarlm.engine.jit.lang import F32, I16, I32, Emitter, Value, vector

_BYTES, _ROW = 1024, 64


class EmulatedTiles(AmxTiles):
    def begin(self, e: Emitter) -> None:
        self._memory = e.stack(8 * _BYTES)

    def end(self, e: Emitter) -> None:
        pass

    def _copy(self, e: Emitter, source: Value, target: Value, strides: tuple[Value | int, Value | int]) -> None:
        with e.loop(0, 16) as row:
            e.store(e.load(source + row * strides[0], vector(I32, 16)), target + row * strides[1])

    def clear(self, e: Emitter, number: int) -> None:
        for offset in range(0, _BYTES, _ROW):
            e.store(e.zero(vector(I32, 16)), self._memory, _BYTES * number + offset)

    def load(self, e: Emitter, number: int, address: Value, stride: Value | int = _ROW) -> None:
        self._copy(e, address, self._memory + _BYTES * number, (stride, _ROW))

    def store(self, e: Emitter, number: int, address: Value, stride: Value | int = _ROW) -> None:
        self._copy(e, self._memory + _BYTES * number, address, (_ROW, stride))

    def add_product(self, e: Emitter, total: int, left: int, right: int) -> None:
        sums, rows, pairs = (self._memory + _BYTES * number for number in (total, left, right))
        with e.loop(0, 16) as row:
            value = e.variable(e.load(sums + row * _ROW, vector(F32, 16)))
            with e.loop(0, 16) as pair:
                a = e.broadcast(rows + row * _ROW + pair * 4, I32, 16)
                b = e.load(pairs + pair * _ROW, vector(I32, 16))
                for shift in (16, 0):
                    x, y = ((half << shift & -65536).bits(vector(F32, 16)) for half in (a, b))
                    value.set(e.fma(x, y, value.get()))
            e.store(value.get(), sums + row * _ROW)

    def to_bfloat(self, e: Emitter, low: Value, high: Value) -> Value:
        def rounded(x: Value) -> Value:
            bits = x.bits(vector(I32, 16))
            whole = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
            return e.select(x <= x, whole, (bits >> 16) | 0x40).trunc(I16)

        return e.join([rounded(low), rounded(high)])


class EmulatedAmx(Avx512Amx):
    """Its `matrices` on CPUs without AMX."""

    name = "avx512-amx-tiles-emulated"
    needs = Avx512Vbmi.needs
    matrices = EmulatedTiles()

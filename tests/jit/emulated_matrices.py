"""A level that multiplies matrices of bfloat16, for CPUs that cannot."""

from __future__ import annotations

from polarlm.engine.jit.isa.x86 import AmxTiles, Avx512Amx, Avx512Vbmi
from polarlm.engine.jit.lang import F32, I32, Emitter, Level, Value, vector


class EmulatedTiles(AmxTiles):
    """Registers of matrices in memory, for CPUs without AMX: what its instructions are said to do."""

    def begin(self, e: Emitter) -> None:
        self._registers = e.stack(8 * 1024)

    def end(self, e: Emitter) -> None:
        pass

    def clear(self, e: Emitter, number: int) -> None:
        for row in range(16):
            e.store(e.zero(vector(F32, 16)), self._registers, 1024 * number + 64 * row)

    def load(self, e: Emitter, number: int, address: Value, stride: Value | int = 64) -> None:
        with e.loop(0, 16) as row:
            e.store(e.load(address + row * stride, vector(I32, 16)), self._registers + row * 64, 1024 * number)

    def store(self, e: Emitter, number: int, address: Value, stride: Value | int = 64) -> None:
        with e.loop(0, 16) as row:
            e.store(e.load(self._registers + row * 64, vector(I32, 16), 1024 * number), address + row * stride)

    def add_product(self, e: Emitter, total: int, left: int, right: int) -> None:
        with e.loop(0, 16) as row:
            own = self._registers + row * 64
            summed = e.load(own, vector(F32, 16), 1024 * total)
            for word in range(16):
                a = e.broadcast(own, I32, 16, 1024 * left + 4 * word)
                b = e.load(self._registers, vector(I32, 16), 1024 * right + 64 * word)
                for shift in (0, 16):
                    x, y = ((side << 16 - shift & -65536).bits(summed.type) for side in (a, b))
                    summed = e.fma(x, y, summed)
            e.store(summed, own, 1024 * total)


class EmulatedAmx(Avx512Amx):
    name = "avx512-amx-emulated"
    needs = Avx512Vbmi.needs
    matrices = EmulatedTiles()
    to_bfloat = Level.to_bfloat

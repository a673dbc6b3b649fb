"""The level of any CPU that LLVM knows."""

from __future__ import annotations

from polarlm.engine.jit.lang import F32, I16, Emitter, Level, Value, vector
from polarlm.engine.jit.lang.values import F16


class Generic(Level):
    name = "generic"


class NativeHalves(Level):
    """The same for CPUs that have instructions for float16, which LLVM finds."""

    def half_to_float(self, e: Emitter, bits: Value) -> Value:
        half = bits.bits(vector(F16, bits.lanes) if bits.lanes else F16)
        return Value(e, e.builder.fpext(half.ir, vector(F32, bits.lanes) if bits.lanes else F32))

    def float_to_half(self, e: Emitter, x: Value) -> Value:
        half = e.builder.fptrunc(x.ir, vector(F16, x.lanes) if x.lanes else F16)
        return Value(e, half).bits(vector(I16, x.lanes) if x.lanes else I16)


LEVELS = (Generic(),)

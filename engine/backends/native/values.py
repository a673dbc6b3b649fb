"""Values of the kernel language: what `engine.backends.native.emit.Emitter` computes with."""

from __future__ import annotations

from typing import Any, TypeAlias

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()

Type: TypeAlias = ir.Type
Number: TypeAlias = "Value | int | float"


def vector(element: Type, lanes: int) -> Type:
    """The type of a vector."""
    return ir.VectorType(element, lanes)


class Value:
    """An SSA value: a scalar, a vector or a pointer. Integers have no sign; shifts to the right fill with zeros."""

    __slots__ = ("emitter", "ir")

    def __init__(self, emitter: Any, value: Any) -> None:
        self.emitter = emitter
        self.ir = value

    @property
    def type(self) -> Type:
        return self.ir.type

    @property
    def lanes(self) -> int:
        """Elements of a vector; 0 for a scalar."""
        return self.type.count if isinstance(self.type, ir.VectorType) else 0

    @property
    def element(self) -> Type:
        return self.type.element if self.lanes else self.type

    @property
    def is_float(self) -> bool:
        return isinstance(self.element, (ir.HalfType, ir.FloatType, ir.DoubleType))

    def _binary(self, other: Number, integer: str, floating: str | None) -> Value:
        name = floating if self.is_float else integer
        assert name is not None, "no such operation on floats"
        right = self.emitter.like(other, self)
        return Value(self.emitter, getattr(self.emitter.builder, name)(self.ir, right.ir))

    def __add__(self, other: Number) -> Value:
        if isinstance(self.type, ir.PointerType):
            return self.emitter.offset(self, other)
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Number) -> Value:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Number) -> Value:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Number) -> Value:
        return self._binary(other, "", "fdiv")

    def __floordiv__(self, other: Number) -> Value:
        """Of unsigned integers."""
        return self._binary(other, "udiv", None)

    def __mod__(self, other: Number) -> Value:
        """Of unsigned integers."""
        return self._binary(other, "urem", None)

    def __and__(self, other: Number) -> Value:
        return self._binary(other, "and_", None)

    def __or__(self, other: Number) -> Value:
        return self._binary(other, "or_", None)

    def __xor__(self, other: Number) -> Value:
        return self._binary(other, "xor", None)

    def __lshift__(self, other: Number) -> Value:
        return self._binary(other, "shl", None)

    def __rshift__(self, other: Number) -> Value:
        return self._binary(other, "lshr", None)

    def __invert__(self) -> Value:
        """All bits of integers flipped."""
        return Value(self.emitter, self.emitter.builder.not_(self.ir))

    def __neg__(self) -> Value:
        return self.emitter.like(0, self) - self

    def _compare(self, sign: str, other: Number) -> Value:
        right, builder = self.emitter.like(other, self), self.emitter.builder
        compare = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Value(self.emitter, compare(sign, self.ir, right.ir))

    def __lt__(self, other: Number) -> Value:
        """Signed, as all comparisons."""
        return self._compare("<", other)

    def __le__(self, other: Number) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Number) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Number) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Number) -> Value:
        return self._compare("==", other)

    def _converted(self, element: Type, name: str) -> Value:
        target = vector(element, self.lanes) if self.lanes else element
        if target == self.type:
            return self
        return Value(self.emitter, getattr(self.emitter.builder, name)(self.ir, target))

    def sext(self, element: Type) -> Value:
        """Wider integers, with the sign."""
        return self._converted(element, "sext")

    def zext(self, element: Type) -> Value:
        """Wider integers, filled with zeros."""
        return self._converted(element, "zext")

    def trunc(self, element: Type) -> Value:
        """The low bits of integers."""
        return self._converted(element, "trunc")

    def to_float(self) -> Value:
        """Signed integers as float32."""
        return self._converted(F32, "sitofp")

    def to_int(self) -> Value:
        """Floats as int32, towards zero."""
        return self._converted(I32, "fptosi")

    def ashr(self, other: Number) -> Value:
        """Shifted to the right, with the sign."""
        return self._binary(other, "ashr", None)

    def bits(self, target: Type) -> Value:
        """The same bits as another type of the same size."""
        return self if target == self.type else Value(self.emitter, self.emitter.builder.bitcast(self.ir, target))


class Variable:
    """A value that changes: in loops, for example. LLVM keeps it in a register."""

    def __init__(self, emitter: Any, start: Value) -> None:
        self._emitter, self._type = emitter, start.type
        with emitter.builder.goto_entry_block():
            self._slot = emitter.builder.alloca(start.type)
        self.set(start)

    def get(self) -> Value:
        return Value(self._emitter, self._emitter.builder.load(self._slot, typ=self._type))

    def set(self, value: Value) -> None:
        assert value.type == self._type, (value.type, self._type)
        self._emitter.builder.store(value.ir, self._slot)

    def add(self, value: Number) -> None:
        self.set(self.get() + value)

"""The values of the kernel language, which `engine.jit.lang.emit.Emitter` computes with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class _BFloat(ir.Type):
    """bfloat16, which llvmlite has no type for: only the operand or result of intrinsics."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16 = _BFloat()
POINTER = ir.PointerType()

Type: TypeAlias = ir.Type
Number: TypeAlias = "Value | int | float"
Values: TypeAlias = "Sequence[Value]"


@cache
def vector(element: Type, lanes: int) -> Type:
    return ir.VectorType(element, lanes)


def expect(holds: bool, what: str, *values: Value) -> None:
    """Raises TypeError unless `holds`: an operation does not take these values."""
    if not holds:
        raise TypeError(f"{what} expected, given {', '.join(str(value.type) for value in values)}")


def check_constant(type: Type, number: Any) -> None:
    """Raises TypeError if the type cannot hold the number, or the numbers of its lanes."""
    numbers = number if isinstance(number, (list, tuple)) else [number]
    lanes, element = (type.count, type.element) if isinstance(type, ir.VectorType) else (1, type)
    if isinstance(element, ir.IntType):
        low, high = -(1 << (element.width - 1)), 1 << element.width
        fits = all(isinstance(n, (int, np.integer)) and low <= n < high for n in numbers)
    else:
        fits = all(isinstance(n, (float, int, np.floating)) for n in numbers)
    if not fits or len(numbers) != lanes:
        raise TypeError(f"{type} has no constant {number}")


def _size(type: Type) -> int:
    lanes, element = (type.count, type.element) if isinstance(type, ir.VectorType) else (1, type)
    return lanes * (element.width if isinstance(element, ir.IntType) else {F16: 16, BF16: 16, F32: 32}.get(element, 64))


def _operator(integer: str | None, floating: str | None) -> Callable[[Value, Number], Value]:
    """An operator, by the builder's names for integers and for floats; None where there is none."""
    return lambda self, other: self._binary(other, integer, floating)


def _shift(name: str) -> Callable[[Value, Number], Value]:
    def shifted(self: Value, other: Number) -> Value:
        size = _size(self.element)
        expect(isinstance(other, Value) or 0 <= other < size, f"a number that can be shifted by {other}", self)
        return self._binary(other, name, None)

    return shifted


def _comparison(sign: str) -> Callable[[Value, Number], Value]:
    def compare(self: Value, other: Number) -> Value:
        right, builder = self.emitter.const_like(other, self), self.emitter.builder
        expect(self.type == right.type, "two numbers of one type", self, right)
        emit = builder.fcmp_ordered if self.is_float else builder.icmp_signed
        return Value(self.emitter, emit(sign, self.ir, right.ir))

    return compare


class Value:
    """An SSA value: a scalar, a vector or a pointer. Operators say how they treat the sign of integers."""

    __slots__ = ("emitter", "ir")

    def __init__(self, emitter: Any, value: Any) -> None:
        self.emitter = emitter
        self.ir = value

    @property
    def type(self) -> Type:
        return self.ir.type

    @property
    def lanes(self) -> int:
        """The number of elements of a vector; 0 for a scalar."""
        return self.type.count if isinstance(self.type, ir.VectorType) else 0

    @property
    def element(self) -> Type:
        return self.type.element if self.lanes else self.type

    @property
    def is_float(self) -> bool:
        return isinstance(self.element, (ir.HalfType, ir.FloatType, ir.DoubleType))

    def _binary(self, other: Number, integer: str | None, floating: str | None) -> Value:
        name = floating if self.is_float else integer
        right = self.emitter.const_like(other, self)
        expect(name is not None and self.type == right.type, "two numbers of one type with this operation", self, right)
        assert name is not None
        return Value(self.emitter, getattr(self.emitter.builder, name)(self.ir, right.ir))

    def __add__(self, other: Number) -> Value:
        if isinstance(self.type, ir.PointerType):
            return self.emitter.offset(self, other)
        return self._binary(other, "add", "fadd")

    __sub__ = _operator("sub", "fsub")
    __mul__ = _operator("mul", "fmul")
    __truediv__ = _operator(None, "fdiv")
    __floordiv__ = _operator("udiv", None)  # the quotient of unsigned integers
    __mod__ = _operator("urem", None)  # and its remainder
    __and__ = _operator("and_", None)
    __or__ = _operator("or_", None)
    __xor__ = _operator("xor", None)
    __lshift__ = _shift("shl")
    __rshift__ = _shift("lshr")  # fills with zeros
    ashr = _shift("ashr")  # copies the sign bit

    # Integers compare as signed.
    __lt__ = _comparison("<")
    __le__ = _comparison("<=")
    __gt__ = _comparison(">")
    __ge__ = _comparison(">=")
    equals = _comparison("==")

    def __invert__(self) -> Value:
        expect(isinstance(self.element, ir.IntType), "integers", self)
        return Value(self.emitter, self.emitter.builder.not_(self.ir))

    def __neg__(self) -> Value:
        if self.is_float:
            return Value(self.emitter, self.emitter.builder.fneg(self.ir))
        return self.emitter.const_like(0, self) - self

    def _convert(self, element: Type, name: str) -> Value:
        is_integer, floats = isinstance(self.element, ir.IntType), name == "fptosi"
        expect(is_integer != floats and (is_integer or self.is_float), "integers" if not floats else "floats", self)
        wider = {"sext": 1, "zext": 1, "trunc": -1}.get(name, 0) * (_size(element) - _size(self.element))
        expect(wider >= 0, f"a type that {name} makes {element}", self)
        target = vector(element, self.lanes) if self.lanes else element
        if target == self.type:
            return self
        return Value(self.emitter, getattr(self.emitter.builder, name)(self.ir, target))

    def sext(self, element: Type) -> Value:
        """Integers, sign-extended to a wider type."""
        return self._convert(element, "sext")

    def zext(self, element: Type) -> Value:
        """Integers, zero-extended to a wider type."""
        return self._convert(element, "zext")

    def trunc(self, element: Type) -> Value:
        """Integers, truncated to a narrower type."""
        return self._convert(element, "trunc")

    def to_float(self) -> Value:
        """Signed integers, converted to float32."""
        return self._convert(F32, "sitofp")

    def to_int(self) -> Value:
        """Floats, rounded towards zero to int32."""
        return self._convert(I32, "fptosi")

    def bits(self, target: Type) -> Value:
        """The same bits, as a value of another type of the same size."""
        expect(_size(target) == _size(self.type), f"as many bits as in {target}", self)
        return self if target == self.type else Value(self.emitter, self.emitter.builder.bitcast(self.ir, target))


class Variable:
    """A value that can be assigned again, for example in loops. LLVM keeps it in a register."""

    def __init__(self, emitter: Any, start: Value) -> None:
        self._emitter, self._type = emitter, start.type
        with emitter.builder.goto_entry_block():
            self._slot = emitter.builder.alloca(start.type)
        self.set(start)

    def get(self) -> Value:
        return Value(self._emitter, self._emitter.builder.load(self._slot, typ=self._type))

    def set(self, value: Value) -> None:
        expect(value.type == self._type, str(self._type), value)
        self._emitter.builder.store(value.ir, self._slot)

    def add(self, value: Number) -> None:
        self.set(self.get() + value)

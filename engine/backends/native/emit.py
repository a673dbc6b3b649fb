"""A small language for kernels: Python that writes LLVM IR.

`Emitter` appends instructions to a function; `Value` is the result of one, with Python's operators. Python's own `for`
and `if` run while a kernel is emitted: they unroll and specialize. `Emitter.loop` and `Emitter.when` emit loops and
branches. What LLVM cannot be trusted to find by itself (dot products of bytes, table lookups) has a method here, with
code for each level of CPU features and the same results on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from engine.backends.native.target import Level
from engine.backends.native.values import (
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    POINTER,
    Number,
    Type,
    Value,
    Variable,
    check_constant,
    expect,
    vector,
)

# Of the polynomial q in e^r = 1 + r + r² · q(r), lowest power first: see scripts/fit_exp.py.
EXP_COEFFICIENTS = (0.49999994, 0.166665211, 0.041668389, 0.00836871471, 0.00138146256)

_OF_FLOATS = {"fma", "fmuladd", "maxnum", "minnum", "fabs", "sqrt", "floor", "ceil", "trunc", "copysign"}


class Emitter:
    """Writes the body of one function for one level of CPU features."""

    def __init__(self, level: Level, function: ir.Function) -> None:
        self.level = level
        self.function = function
        self.builder = ir.IRBuilder(function.append_basic_block("entry"))

    @property
    def is_x86(self) -> bool:
        return self.builder.module.triple.startswith(("x86_64", "i686"))

    # -- constants, memory ----------------------------------------------------------------------------------------

    def constant(self, type: Type, number: Any) -> Value:
        """A constant; one number fills all lanes of a vector. Raises TypeError for one that the type does not have."""
        if isinstance(type, ir.VectorType) and not isinstance(number, (list, tuple)):
            number = [number] * type.count
        check_constant(type, number)
        return Value(self, ir.Constant(type, list(number) if isinstance(number, tuple) else number))

    def like(self, number: Number, other: Value) -> Value:
        """`number` with the type of `other`: a constant, or a scalar in all lanes."""
        if isinstance(number, Value):
            return self.splat(number, other.lanes) if other.lanes and not number.lanes else number
        return self.constant(other.type, float(number) if other.is_float else number)

    def zero(self, type: Type) -> Value:
        scalar = type.element if isinstance(type, ir.VectorType) else type
        return self.constant(type, 0.0 if isinstance(scalar, (ir.HalfType, ir.FloatType, ir.DoubleType)) else 0)

    def i64(self, number: int) -> Value:
        """An int64."""
        return self.constant(I64, number)

    def offset(self, pointer: Value, nbytes: Number) -> Value:
        """The pointer plus a number of bytes (int64)."""
        step = nbytes if isinstance(nbytes, Value) else self.i64(nbytes)  # type: ignore[arg-type]
        expect(pointer.type == POINTER and step.type == I64, "a pointer and an int64", pointer, step)
        return Value(self, self.builder.gep(pointer.ir, [step.ir], source_etype=I8))

    def load(self, pointer: Value, type: Type, offset: int = 0, align: int = 1) -> Value:
        """The value at `pointer` + `offset` bytes."""
        expect(pointer.type == POINTER, "a pointer", pointer)
        load = self.builder.load(self.offset(pointer, offset).ir if offset else pointer.ir, typ=type)
        load.align = align
        return Value(self, load)

    def store(self, value: Value, pointer: Value, offset: int = 0, align: int = 1) -> None:
        expect(pointer.type == POINTER, "a pointer", pointer)
        store = self.builder.store(value.ir, self.offset(pointer, offset).ir if offset else pointer.ir)
        store.align = align

    def constant_bytes(self, content: bytes) -> Value:
        """Pointer to constant bytes, aligned to 64."""
        kind = ir.ArrayType(I8, len(content))
        module = self.builder.module
        constant = ir.GlobalVariable(module, kind, module.get_unique_name("bytes"))
        constant.linkage, constant.global_constant, constant.align = "internal", True, 64
        constant.initializer = ir.Constant(kind, bytearray(content))
        return self._untyped(constant)

    def stack(self, nbytes: int) -> Value:
        """Pointer to memory of the running function, aligned to 64: a few KiB at most."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(I8, nbytes))
            memory.align = 64
            return self._untyped(memory)

    def prefetch(self, pointer: Value, nbytes: int) -> None:
        """Start to load bytes into the core's cache; lines of 64 bytes."""
        function = "llvm.prefetch.p0"
        for offset in range(0, nbytes, 64):
            at = self.offset(pointer, offset)
            options = (self.constant(I32, number) for number in (0, 3, 1))  # to be read, often, data
            self.intrinsic(function, None, at, *options)

    def _untyped(self, pointer: Any) -> Value:
        """llvmlite would take the pointer as one to values of the type that it was made for only."""
        return Value(self, self.builder.inttoptr(self.builder.ptrtoint(pointer, I64), POINTER))

    def load_atomic(self, pointer: Value) -> Value:
        """The int64 at `pointer`, and all that was written before it was (sequentially consistent)."""
        expect(pointer.type == POINTER, "a pointer", pointer)
        return Value(self, self.builder.load_atomic(pointer.ir, "seq_cst", 8, typ=I64))

    def store_atomic(self, number: Value, pointer: Value) -> None:
        """Stores an int64, after all that this thread has written (sequentially consistent)."""
        expect(pointer.type == POINTER and number.type == I64, "a pointer and an int64", pointer, number)
        # llvmlite wants to know the type of what the pointer points to.
        typed = self.builder.inttoptr(self.builder.ptrtoint(pointer.ir, I64), I64.as_pointer())
        self.builder.store_atomic(number.ir, typed, "seq_cst", 8)

    def add_atomic(self, pointer: Value, number: Value) -> None:
        """Adds to the int64 at `pointer`, after all that this thread has written (sequentially consistent)."""
        expect(pointer.type == POINTER and number.type == I64, "a pointer and an int64", pointer, number)
        self.builder.atomic_rmw("add", pointer.ir, number.ir, "seq_cst")

    def exchange_if(self, pointer: Value, expected: Value, number: Value) -> Value:
        """Replaces the int64 at `pointer` if it is as expected → whether it was."""
        right = pointer.type == POINTER and expected.type == number.type == I64
        expect(right, "a pointer and two int64", pointer, expected, number)
        result = self.builder.cmpxchg(pointer.ir, expected.ir, number.ir, "seq_cst", "seq_cst")
        return Value(self, self.builder.extract_value(result, 1))

    def call(self, function: Value, *arguments: Value) -> None:
        """Calls the function at a pointer, which returns nothing."""
        expect(function.type == POINTER, "a pointer", function)
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        # llvmlite wants to know the type of what a called pointer points to.
        typed = self.builder.inttoptr(self.builder.ptrtoint(function.ir, I64), kind.as_pointer())
        self.builder.call(typed, [argument.ir for argument in arguments])

    def splat(self, scalar: Value, lanes: int) -> Value:
        """A scalar in all lanes."""
        expect(not scalar.lanes, "a scalar", scalar)
        empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.builder.insert_element(empty, scalar.ir, ir.Constant(I32, 0))
        return Value(self, self.builder.shuffle_vector(first, empty, self._mask([0] * lanes)))

    def broadcast(self, pointer: Value, element: Type, lanes: int, offset: int = 0) -> Value:
        """One number from memory in all lanes."""
        return self.splat(self.load(pointer, element, offset), lanes)

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of a, numbered from 0, and of b, numbered after them."""
        expect(a.lanes > 0 and a.type == b.type, "two vectors of one type", a, b)
        expect(all(0 <= lane < 2 * a.lanes for lane in lanes), f"lanes that exist, not {list(lanes)}", a, b)
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, self._mask(lanes)))

    def part(self, a: Value, first: int, count: int) -> Value:
        """Consecutive lanes of a vector."""
        expect(0 <= first < first + count <= a.lanes, f"{count} lanes from lane {first}", a)
        return a if count == a.lanes else self.shuffle(a, a, range(first, first + count))

    def join(self, parts: Sequence[Value]) -> Value:
        """Vectors of the same type one after another; their number is a power of two."""
        whole = list(parts)
        while len(whole) > 1:
            lanes = range(2 * whole[0].lanes)
            whole = [self.shuffle(a, b, lanes) for a, b in zip(whole[::2], whole[1::2], strict=True)]
        return whole[0]

    def collect(self, scalars: Sequence[Value]) -> Value:
        """A vector of scalars."""
        whole = ir.Constant(ir.VectorType(scalars[0].type, len(scalars)), ir.Undefined)
        for lane, scalar in enumerate(scalars):
            whole = self.builder.insert_element(whole, scalar.ir, ir.Constant(I32, lane))
        return Value(self, whole)

    def extract(self, a: Value, lane: int) -> Value:
        expect(0 <= lane < a.lanes, f"a lane {lane}", a)
        return Value(self, self.builder.extract_element(a.ir, ir.Constant(I32, lane)))

    def transposed(self, rows: Sequence[Value]) -> list[Value]:
        """Vectors as the rows of a square matrix, transposed; their number is a power of two."""
        square, size, step = list(rows), len(rows), 1
        while step < size:
            low = [lane - step + size if lane & step else lane for lane in range(size)]
            high = [lane + size if lane & step else lane + step for lane in range(size)]
            for i in range(size):
                if not i & step:
                    a, b = square[i], square[i + step]
                    square[i], square[i + step] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            step *= 2
        return square

    @staticmethod
    def _mask(lanes: Sequence[int]) -> Any:
        return ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))

    # -- control flow ----------------------------------------------------------------------------------------------

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    @contextmanager
    def loop(self, begin: Number, end: Number, step: int = 1) -> Iterator[Value]:
        """The body runs with begin, begin + step, … while that is below `end` (int64)."""
        first, last = (n if isinstance(n, Value) else self.constant(I64, n) for n in (begin, end))
        expect(first.type == last.type == I64, "two int64", first, last)
        before = self.builder.block
        head, body, after = (self.function.append_basic_block(name) for name in ("loop", "body", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(I64)
        index.add_incoming(first.ir, before)
        self.builder.cbranch(self.builder.icmp_signed("<", index, last.ir), body, after)
        self.builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(self.builder.add(index, ir.Constant(I64, step)), self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body runs if the condition (one bit) holds."""
        expect(condition.type == I1, "one bit", condition)
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def repeat_while(self) -> Iterator[list[Value]]:
        """The body runs again as long as the condition that it has appended to the list it is given holds."""
        body, after = (self.function.append_basic_block(name) for name in ("repeat", "after"))
        self.builder.branch(body)
        self.builder.position_at_end(body)
        condition: list[Value] = []
        yield condition
        expect(len(condition) == 1 and condition[0].type == I1, "one condition of one bit", *condition)
        self.builder.cbranch(condition[0].ir, body, after)
        self.builder.position_at_end(after)

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def intrinsic(self, name: str, result: Type | None, *arguments: Value) -> Value:
        """A call of an LLVM intrinsic. LLVM ends the process for an instruction that the level does not have."""
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result or ir.VoidType(), [argument.type for argument in arguments]), name
        )
        return Value(self, self.builder.call(function, [argument.ir for argument in arguments]))

    def suffix(self, value: Value) -> str:
        element = {F16: "f16", F32: "f32", F64: "f64"}.get(value.element) or f"i{value.element.width}"
        return f"v{value.lanes}{element}" if value.lanes else element

    def same(self, name: str, first: Value, *others: Number) -> Value:
        """An intrinsic whose arguments and result have one type."""
        expect(first.is_float == (name in _OF_FLOATS), f"a type that {name} is for", first)
        rest = [other if isinstance(other, Value) and other.type == I1 else self.like(other, first) for other in others]
        expect(all(other.type in (first.type, I1) for other in rest), "one type", first, *rest)
        return self.intrinsic(f"llvm.{name}.{self.suffix(first)}", first.type, first, *rest)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, in one rounding where the level has the instruction."""
        wide = max((a, b, c), key=lambda value: value.lanes)
        a, b, c = (self.like(value, wide) for value in (a, b, c))
        return self.same("fma" if self.level.has("fma") else "fmuladd", a, b, c)

    def maximum(self, a: Value, b: Number) -> Value:
        """Of floats; the other one if one is NaN."""
        return self.same("maxnum", a, b)

    def minimum(self, a: Value, b: Number) -> Value:
        return self.same("minnum", a, b)

    def absolute(self, a: Value) -> Value:
        """Of floats."""
        return self.same("fabs", a)

    def sqrt(self, a: Value) -> Value:
        return self.same("sqrt", a)

    def least(self, a: Value, b: Number) -> Value:
        """The minimum of signed integers."""
        return self.same("smin", a, b)

    def most(self, a: Value, b: Number) -> Value:
        """The maximum of signed integers."""
        return self.same("smax", a, b)

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """a where the condition holds, else b, by lane."""
        bits = I1 if condition.type == I1 else vector(I1, a.lanes) if a.lanes else None
        expect(
            a.type == b.type and condition.type == bits,
            "a bit for each lane and two values of one type",
            condition,
            a,
            b,
        )
        return Value(self, self.builder.select(condition.ir, a.ir, b.ir))

    def any(self, a: Value) -> Value:
        """Whether a condition holds in any lane."""
        mask = a.bits(ir.IntType(a.lanes))
        return Value(self, self.builder.icmp_unsigned("!=", mask.ir, ir.Constant(mask.type, 0)))

    def round(self, a: Value) -> Value:
        """float32 of magnitude up to 2²² → the nearest int32, ties to even."""
        expect(a.element == F32, "float32", a)
        magic = self.like(12582912.0, a)  # 1.5 · 2²³: its last bit is worth 1
        integers = vector(I32, a.lanes) if a.lanes else I32
        return (a + magic).bits(integers) - 0x4B400000

    def sum_lanes(self, a: Value) -> Value:
        """The sum of all lanes, by halves."""
        return self._reduce(a, lambda x, y: x + y)

    def maximum_lanes(self, a: Value) -> Value:
        return self._reduce(a, self.maximum)

    def _reduce(self, a: Value, combine: Any) -> Value:
        while a.lanes > 1:
            half = a.lanes // 2
            a = combine(self.part(a, 0, half), self.part(a, half, half))
        return self.extract(a, 0)

    def half_to_float(self, bits: Value) -> Value:
        """Finite float16, as int16 → float32."""
        expect(bits.element == I16, "int16", bits)
        lanes = bits.lanes
        if self.level.has("f16c"):
            half = bits.bits(vector(F16, lanes) if lanes else F16)
            return Value(self, self.builder.fpext(half.ir, vector(F32, lanes) if lanes else F32))
        wide = bits.zext(I32)
        magnitude = ((wide & 0x7FFF) << 13).bits(vector(F32, lanes) if lanes else F32) * 2.0**112
        sign = (wide & 0x8000) << 16
        return (magnitude.bits(wide.type) | sign).bits(magnitude.type)

    def exp(self, x: Value) -> Value:
        """e^x of float32, with a relative error under 1.5e-7; 0 below -86.9, and NaN of NaN.

        2^n · e^r with |r| ≤ ln 2 / 2. Twice e^r is computed, so that the other factor is finite for every finite
        result, and its exponent bits are 0 where the result is.
        """
        expect(x.element == F32, "float32", x)
        low, high = self.like(-87.5, x), self.like(89.0, x)
        x = self.select(x < low, low, x)  # unlike `maximum`, keeps NaN
        x = self.select(x > high, high, x)
        whole = self.round(x * 1.4426950408889634)
        n = whole.to_float()
        # ln 2 in two parts: n times the first is exact.
        r = self.fma(n, self.like(-0.693359375, x), x)
        r = self.fma(n, self.like(0.693359375 - math.log(2), x), r)
        y = self.like(EXP_COEFFICIENTS[-1], x)
        for coefficient in EXP_COEFFICIENTS[-2::-1]:
            y = self.fma(y, r, self.like(coefficient, x))
        y = self.fma(self.fma(y, r * r, r), self.like(2.0, x), self.like(2.0, x))
        return y * ((whole + 126) << 23).bits(x.type)

    def by_parts(self, lanes: int, operation: Callable[..., Value], *operands: Value) -> Value:
        """`operation` on parts of `lanes` lanes each, joined."""
        parts = range(0, operands[0].lanes, lanes)
        return self.join([operation(*(self.part(operand, first, lanes) for operand in operands)) for first in parts])

"""A small language for kernels: Python that writes LLVM IR.

`Emitter` appends instructions to a function; `Value` is the result of one, with Python's operators. Python's own `for`
and `if` run while a kernel is emitted: they unroll and specialize. `Emitter.loop` and `Emitter.when` emit loops and
branches. What LLVM cannot be trusted to find by itself (dot products of bytes, table lookups) has a method here, with
code for each level of CPU features and the same results on all of them.
"""

from __future__ import annotations

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
    I32,
    I64,
    POINTER,
    Number,
    Type,
    Value,
    Variable,
    vector,
)


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
        """A constant; one number fills all lanes of a vector."""
        if isinstance(type, ir.VectorType) and not isinstance(number, (list, tuple)):
            number = [number] * type.count
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
        step = nbytes if isinstance(nbytes, Value) else self.i64(int(nbytes))
        return Value(self, self.builder.gep(pointer.ir, [step.ir], source_etype=I8))

    def load(self, pointer: Value, type: Type, offset: int = 0, align: int = 1) -> Value:
        """The value at `pointer` + `offset` bytes."""
        load = self.builder.load(self.offset(pointer, offset).ir if offset else pointer.ir, typ=type)
        load.align = align
        return Value(self, load)

    def store(self, value: Value, pointer: Value, offset: int = 0, align: int = 1) -> None:
        store = self.builder.store(value.ir, self.offset(pointer, offset).ir if offset else pointer.ir)
        store.align = align

    def constant_bytes(self, content: bytes) -> Value:
        """Pointer to constant bytes, aligned to 64."""
        kind = ir.ArrayType(I8, len(content))
        module = self.builder.module
        constant = ir.GlobalVariable(module, kind, module.get_unique_name("bytes"))
        constant.linkage, constant.global_constant, constant.align = "internal", True, 64
        constant.initializer = ir.Constant(kind, bytearray(content))
        return Value(self, self.builder.gep(constant, [ir.Constant(I64, 0)], source_etype=I8))

    def stack(self, nbytes: int) -> Value:
        """Pointer to memory of the running function, aligned to 64: a few KiB at most."""
        with self.builder.goto_entry_block():
            memory = self.builder.alloca(ir.ArrayType(I8, nbytes))
            memory.align = 64
            # Through an integer, because llvmlite takes a pointer from `alloca` as one to values of that type only.
            return Value(self, self.builder.inttoptr(self.builder.ptrtoint(memory, I64), POINTER))

    def prefetch(self, pointer: Value, nbytes: int) -> None:
        """Start to load bytes into the core's cache; lines of 64 bytes."""
        function = "llvm.prefetch.p0"
        for offset in range(0, nbytes, 64):
            at = self.offset(pointer, offset)
            options = (self.constant(I32, number) for number in (0, 3, 1))  # to be read, often, data
            self.intrinsic(function, None, at, *options)

    def load_atomic(self, pointer: Value) -> Value:
        """The int64 at `pointer`, and all that was written before it was (sequentially consistent)."""
        return Value(self, self.builder.load_atomic(pointer.ir, "seq_cst", 8, typ=I64))

    def store_atomic(self, number: Value, pointer: Value) -> None:
        """Stores an int64, after all that this thread has written (sequentially consistent)."""
        # llvmlite wants to know the type of what the pointer points to.
        typed = self.builder.inttoptr(self.builder.ptrtoint(pointer.ir, I64), I64.as_pointer())
        self.builder.store_atomic(number.ir, typed, "seq_cst", 8)

    def add_atomic(self, pointer: Value, number: Value) -> None:
        """Adds to the int64 at `pointer`, after all that this thread has written (sequentially consistent)."""
        self.builder.atomic_rmw("add", pointer.ir, number.ir, "seq_cst")

    def exchange_if(self, pointer: Value, expected: Value, number: Value) -> Value:
        """Replaces the int64 at `pointer` if it is as expected → whether it was."""
        result = self.builder.cmpxchg(pointer.ir, expected.ir, number.ir, "seq_cst", "seq_cst")
        return Value(self, self.builder.extract_value(result, 1))

    def call(self, function: Value, *arguments: Value) -> None:
        """Calls the function at a pointer, which returns nothing."""
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        # llvmlite wants to know the type of what a called pointer points to.
        typed = self.builder.inttoptr(self.builder.ptrtoint(function.ir, I64), kind.as_pointer())
        self.builder.call(typed, [argument.ir for argument in arguments])

    def splat(self, scalar: Value, lanes: int) -> Value:
        """A scalar in all lanes."""
        empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.builder.insert_element(empty, scalar.ir, ir.Constant(I32, 0))
        return Value(self, self.builder.shuffle_vector(first, empty, self._mask([0] * lanes)))

    def broadcast(self, pointer: Value, element: Type, lanes: int, offset: int = 0) -> Value:
        """One number from memory in all lanes."""
        return self.splat(self.load(pointer, element, offset), lanes)

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of a, numbered from 0, and of b, numbered after them."""
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, self._mask(lanes)))

    def part(self, a: Value, first: int, count: int) -> Value:
        """Consecutive lanes of a vector."""
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
        first, last = (n if isinstance(n, Value) else self.i64(int(n)) for n in (begin, end))
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
        rest = [other if isinstance(other, Value) and other.type == I1 else self.like(other, first) for other in others]
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
        return Value(self, self.builder.select(condition.ir, a.ir, b.ir))

    def any(self, a: Value) -> Value:
        """Whether a condition holds in any lane."""
        mask = a.bits(ir.IntType(a.lanes))
        return Value(self, self.builder.icmp_unsigned("!=", mask.ir, ir.Constant(mask.type, 0)))

    def round(self, a: Value) -> Value:
        """float32 of magnitude up to 2²² → the nearest int32, ties to even."""
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
        lanes = bits.lanes
        if self.level.has("f16c"):
            half = bits.bits(vector(F16, lanes) if lanes else F16)
            return Value(self, self.builder.fpext(half.ir, vector(F32, lanes) if lanes else F32))
        wide = bits.zext(I32)
        magnitude = ((wide & 0x7FFF) << 13).bits(vector(F32, lanes) if lanes else F32) * 2.0**112
        sign = (wide & 0x8000) << 16
        return (magnitude.bits(wide.type) | sign).bits(magnitude.type)

    def exp(self, x: Value) -> Value:
        """e^x of float32 x ≤ 88, with a relative error under 2e-7; 0 below −87.3, where it would not be normal.

        2^n · e^r with |r| ≤ ln 2 / 2, and the polynomial of least squares error for e^r.
        """
        is_normal = x > -87.3
        x = self.maximum(x, -87.3)
        whole = self.round(x * 1.4426950408889634)
        n = whole.to_float()
        r = self.fma(n, self.like(-0.693359375, x), x)
        r = self.fma(n, self.like(2.12194440e-4, x), r)
        y = self.like(1.9875691500e-4, x)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5):
            y = self.fma(y, r, self.like(coefficient, x))
        y = self.fma(y, r * r, r) + 1.0
        scale = ((whole + 127) << 23).bits(x.type)
        return self.select(is_normal, y * scale, self.zero(x.type))

    def by_parts(self, lanes: int, operation: Callable[..., Value], *operands: Value) -> Value:
        """`operation` on parts of `lanes` lanes each, joined."""
        parts = range(0, operands[0].lanes, lanes)
        return self.join([operation(*(self.part(operand, first, lanes) for operand in operands)) for first in parts])

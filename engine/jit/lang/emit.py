"""A small language for kernels: Python that writes LLVM IR.

`Emitter` appends instructions to a function; `Value` is the result of one, with Python's operators. Python's own `for`
and `if` run while a kernel is emitted: they unroll and specialize. `Emitter.loop` and `Emitter.when` emit loops and
branches. Instructions that LLVM does not find by itself, such as dot products of bytes and lookups in tables, are
methods of the level (`level.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

from llvmlite import ir

from polarlm.engine.jit.lang.memory import MemoryEmitter
from polarlm.engine.jit.lang.values import (
    F16,
    F32,
    F64,
    I1,
    I16,
    I32,
    I64,
    Number,
    Type,
    Value,
    Values,
    Variable,
    expect,
    vector,
)

# Coefficients of q in e^r = 1 + r + r² · q(r), lowest power first, for |r| ≤ ln 2 / 2: least squares whose weights grow
# where the error is large (Lawson's method; scripts/fit_exp.py of commit 0db755bb).
EXP_COEFFICIENTS = (0.49999994, 0.166665211, 0.041668389, 0.00836871471, 0.00138146256)

# 2^f for |f| ≤ ½, lowest power first, likewise.
_EXP2_COEFFICIENTS = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
_MAGIC = 12582912.0  # 1.5 · 2²³: the unit of its last bit is 1

_LEAST = 1e-34  # 32767 divided by a smaller number overflows
_FLOAT_INTRINSICS = {"fma", "fmuladd", "maxnum", "minnum", "fabs", "sqrt", "floor", "ceil", "trunc", "copysign"}


def _intrinsic(name: str) -> Callable[..., Value]:
    """An operation whose operands and result have one type."""
    return lambda self, first, *others: self.same(name, first, *others)


class Emitter(MemoryEmitter):
    """Emits the body of one function for one level of CPU features."""

    # -- lanes -----------------------------------------------------------------------------------------------------

    def const_like(self, number: Number, other: Value) -> Value:
        """`number` with the type of `other`: as a constant, or a scalar value in all lanes."""
        if isinstance(number, Value):
            return self.splat(number, other.lanes) if other.lanes and not number.lanes else number
        return self.constant(other.type, float(number) if other.is_float else number)

    def splat(self, scalar: Value, lanes: int) -> Value:
        """A vector with the scalar in all lanes."""
        expect(not scalar.lanes, "a scalar", scalar)
        empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
        first = self.builder.insert_element(empty, scalar.ir, ir.Constant(I32, 0))
        return Value(self, self.builder.shuffle_vector(first, empty, self._mask([0] * lanes)))

    def broadcast(self, pointer: Value, element: Type, lanes: int, offset: int = 0) -> Value:
        """A vector with the number at `pointer` + `offset` bytes in all lanes."""
        return self.splat(self.load(pointer, element, offset), lanes)

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """A vector of the given lanes of a, numbered from 0, and of b, numbered after a's."""
        expect(a.lanes > 0 and a.type == b.type, "two vectors of one type", a, b)
        expect(all(0 <= lane < 2 * a.lanes for lane in lanes), f"lanes that exist, not {list(lanes)}", a, b)
        return Value(self, self.builder.shuffle_vector(a.ir, b.ir, self._mask(lanes)))

    def part(self, a: Value, first: int, count: int) -> Value:
        """`count` consecutive lanes of a vector."""
        expect(0 <= first < first + count <= a.lanes, f"{count} lanes from lane {first}", a)
        return a if count == a.lanes else self.shuffle(a, a, range(first, first + count))

    def join(self, parts: Values) -> Value:
        """The concatenation of vectors of the same type, whose number is a power of two."""
        whole = list(parts)
        while len(whole) > 1:
            lanes = range(2 * whole[0].lanes)
            whole = [self.shuffle(a, b, lanes) for a, b in zip(whole[::2], whole[1::2], strict=True)]
        return whole[0]

    def collect(self, scalars: Values) -> Value:
        """A vector whose lanes are these scalars."""
        whole = ir.Constant(ir.VectorType(scalars[0].type, len(scalars)), ir.Undefined)
        for lane, scalar in enumerate(scalars):
            whole = self.builder.insert_element(whole, scalar.ir, ir.Constant(I32, lane))
        return Value(self, whole)

    def extract(self, a: Value, lane: int) -> Value:
        expect(0 <= lane < a.lanes, f"a lane {lane}", a)
        return Value(self, self.builder.extract_element(a.ir, ir.Constant(I32, lane)))

    def transpose(self, rows: Values) -> list[Value]:
        """The transpose of a square matrix whose rows are vectors, its size a power of two; of several such matrices
        beside each other, if the vectors are longer."""
        square, size, lanes, step = list(rows), len(rows), rows[0].lanes, 1
        while step < size:
            low = [lane - step + lanes if lane & step else lane for lane in range(lanes)]
            high = [lane + lanes if lane & step else lane + step for lane in range(lanes)]
            for i in range(size):
                if not i & step:
                    a, b = square[i], square[i + step]
                    square[i], square[i + step] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            step *= 2
        return square

    def _mask(self, lanes: Sequence[int]) -> Any:
        return self.constant(vector(I32, len(lanes)), list(lanes)).ir

    # -- control flow ----------------------------------------------------------------------------------------------

    def variable(self, start: Value) -> Variable:
        return Variable(self, start)

    @contextmanager
    def loop(self, begin: Number, end: Number, step: int = 1) -> Iterator[Value]:
        """A loop over begin, begin + step, … < end (int64), whose body the context emits."""
        first, last = (n if isinstance(n, Value) else self.constant(I64, n) for n in (begin, end))
        expect(first.type == last.type == I64, "two int64", first, last)
        entry_block = self.builder.block
        head, body, exit_block = (self.function.append_basic_block(name) for name in ("loop", "body", "after"))
        self.builder.branch(head)
        self.builder.position_at_end(head)
        index = self.builder.phi(I64)
        index.add_incoming(first.ir, entry_block)
        self.builder.cbranch(self.builder.icmp_signed("<", index, last.ir), body, exit_block)
        self.builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(self.builder.add(index, ir.Constant(I64, step)), self.builder.block)
        self.builder.branch(head)
        self.builder.position_at_end(exit_block)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """A branch, taken if the condition (one bit) holds, whose body the context emits."""
        expect(condition.type == I1, "one bit", condition)
        with self.builder.if_then(condition.ir):
            yield

    @contextmanager
    def repeat_while(self) -> Iterator[list[Value]]:
        """A loop that runs at least once: the body appends to the list the condition under which it runs again."""
        body, exit_block = (self.function.append_basic_block(name) for name in ("repeat", "after"))
        self.builder.branch(body)
        self.builder.position_at_end(body)
        condition: list[Value] = []
        yield condition
        expect(len(condition) == 1 and condition[0].type == I1, "one condition of one bit", *condition)
        self.builder.cbranch(condition[0].ir, body, exit_block)
        self.builder.position_at_end(exit_block)

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def same(self, name: str, first: Value, *others: Number) -> Value:
        """A call of an intrinsic whose arguments and result have one type."""
        expect(first.is_float == (name in _FLOAT_INTRINSICS), f"a type that {name} is for", first)
        rest = [
            other if isinstance(other, Value) and other.type == I1 else self.const_like(other, first)
            for other in others
        ]
        expect(all(other.type in (first.type, I1) for other in rest), "one type", first, *rest)
        element = {F16: "f16", F32: "f32", F64: "f64"}.get(first.element) or f"i{first.element.width}"
        suffix = f"v{first.lanes}{element}" if first.lanes else element
        return self.intrinsic(f"llvm.{name}.{suffix}", first.type, first, *rest)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once if the level has that instruction."""
        wide = max((a, b, c), key=lambda value: value.lanes)
        a, b, c = (self.const_like(value, wide) for value in (a, b, c))
        return self.same("fma" if self.level.fuses else "fmuladd", a, b, c)

    fmax = _intrinsic("maxnum")  # floats; if one is NaN, the other
    fmin = _intrinsic("minnum")
    absolute = _intrinsic("fabs")
    sqrt = _intrinsic("sqrt")
    imin = _intrinsic("smin")  # signed integers
    imax = _intrinsic("smax")

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
        magic = self.const_like(_MAGIC, a)
        integers = vector(I32, a.lanes) if a.lanes else I32
        return (a + magic).bits(integers) - 0x4B400000

    def sum_lanes(self, a: Value) -> Value:
        """The sum of all lanes, added as a tree."""
        return self.combine_lanes(a, lambda x, y: x + y)

    def fmax_lanes(self, a: Value) -> Value:
        return self.combine_lanes(a, self.fmax)

    def imax_lanes(self, a: Value) -> Value:
        """The maximum of all lanes, signed integers."""
        return self.combine_lanes(a, self.imax)

    def combine_rows(self, rows: Values, combine: Callable[[Value, Value], Value]) -> Value:
        """n vectors of n lanes → a vector of what the lanes of each combine to."""
        while len(rows) > 1:
            evens, odds = range(0, 2 * rows[0].lanes, 2), range(1, 2 * rows[0].lanes, 2)
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [combine(self.shuffle(a, b, evens), self.shuffle(a, b, odds)) for a, b in pairs]
        return rows[0]

    def combine_lanes(self, a: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """What all lanes combine to, as a tree."""
        while a.lanes > 1:
            half = a.lanes // 2
            a = combine(self.part(a, 0, half), self.part(a, half, half))
        return self.extract(a, 0)

    def half_to_float(self, bits: Value) -> Value:
        """float16 bits as int16 → float32."""
        expect(bits.element == I16, "int16", bits)
        return self.level.half_to_float(self, bits)

    def float_to_half(self, x: Value) -> Value:
        """Finite float32 of magnitude below 65520 → the nearest float16, ties to even, as int16."""
        return self.level.float_to_half(self, x)

    def exp(self, x: Value) -> Value:
        """e^x of float32, with a relative error below 1.5e-7; 0 below -87.7, infinity above 88.37, NaN for NaN.

        It is 2^n · e^r with |r| ≤ ln 2 / 2. x is clamped to where the exponent bits of 2^n mean 0 and infinity.
        """
        expect(x.element == F32, "float32", x)
        x = self.select(x < -88.0, self.const_like(-88.0, x), x)  # unlike `fmax`, keeps NaN, and is one instruction
        x = self.select(x > 89.0, self.const_like(89.0, x), x)
        whole = self.round(x * 1.4426950408889634)
        n = whole.to_float()
        # ln 2 in two parts: n times the first is exact.
        r = self.fma(n, self.const_like(-0.693359375, x), x)
        r = self.fma(n, self.const_like(0.693359375 - math.log(2), x), r)
        y = self.const_like(EXP_COEFFICIENTS[-1], x)
        for coefficient in EXP_COEFFICIENTS[-2::-1]:
            y = self.fma(y, r, self.const_like(coefficient, x))
        y = self.fma(y, r * r, r) + 1.0
        return y * ((whole + 127) << 23).bits(x.type)

    def exp2(self, x: Value) -> Value:
        """2^x of float32 up to 127, with a relative error below 2e-7; 0 below -126.5, NaN for NaN. It takes two
        thirds of the instructions of `exp`."""
        expect(x.element == F32, "float32", x)
        x = self.select(x < -127.0, self.const_like(-127.0, x), x)
        shifted = x + _MAGIC
        f = x - (shifted - _MAGIC)
        y = self.const_like(_EXP2_COEFFICIENTS[-1], x)
        for coefficient in _EXP2_COEFFICIENTS[-2::-1]:
            y = self.fma(y, f, self.const_like(coefficient, x))
        exponent = shifted.bits(vector(I32, x.lanes) if x.lanes else I32) << 23  # what the magic number has leaves
        return y * (exponent + (127 << 23)).bits(x.type)

    def map_parts(self, lanes: int, operation: Callable[..., Value], *operands: Value) -> Value:
        """The joined results of `operation` on parts of `lanes` lanes of the operands."""
        parts = range(0, operands[0].lanes, lanes)
        return self.join([operation(*(self.part(operand, first, lanes) for operand in operands)) for first in parts])

    def order_sum(self, total: Value) -> Value:
        """Where a level `orders_sums`: the same vector, whole registers of int32, computed before what is emitted
        after it. Elsewhere the vector itself. No instruction comes of it."""
        if not self.level.orders_sums:
            return total

        def same(part: Value) -> Value:
            kept = ir.InlineAsm(ir.FunctionType(part.type, [part.type]), "", "=x,0", side_effect=True)
            return Value(self, self.builder.call(kept, [part.ir]))

        return self.map_parts(self.level.lanes, same, total)


# -- gathers, and rounding to integers: results are equal at every level ----------------------------------------------


def gather(e: Emitter, pointer: Value, index: Value, element: Type) -> Value:
    """The numbers of a table in memory at the indices `index` (int32 lanes ≥ 0), as a vector."""
    step = element.width // 8 if isinstance(element, ir.IntType) else 8 if element == F64 else 4
    lanes = [e.extract(index, lane).zext(I64) * step for lane in range(index.lanes)]
    return e.collect([e.load(pointer + lane, element) for lane in lanes])


def gather_pairs(e: Emitter, pointer: Value, index: Value) -> list[Value]:
    """`gather` of adjacent pairs of float32 → a vector of the first numbers, and one of the second."""
    lanes = index.lanes
    both = gather(e, pointer, index, F64).bits(vector(F32, 2 * lanes))
    return [e.shuffle(both, both, range(first, 2 * lanes, 2)) for first in (0, 1)]


def round_to(e: Emitter, parts: Values, limit: float) -> tuple[list[Value], Value]:
    """Vectors of float32 → int32, scaled so that the largest magnitude becomes `limit` ≤ 32767; and that magnitude.

    The int32 are all 0 if it is at most 1e-34. It is NaN if any number is, so that products with it are NaN too.
    """
    top = largest(e, parts)
    return scaled_to(e, parts, top, limit), top


def largest(e: Emitter, parts: Values) -> Value:
    """The largest magnitude of float32 in vectors; NaN if any number is."""
    bits = vector(I32, parts[0].lanes)
    # Magnitudes compare like their bits, with NaN above infinity. A maximum of floats would ignore NaN.
    magnitudes = [e.absolute(part).bits(bits) for part in parts]
    return e.imax_lanes(reduce(e.imax, magnitudes)).bits(F32)


def scaled_to(e: Emitter, parts: Values, top: Value, limit: float) -> list[Value]:
    """Vectors of float32 → int32, scaled so that `top` would become `limit` ≤ 32767; 0 if it is at most 1e-34."""
    inverse = step_inverse(e, top, limit)
    return [e.round(part * inverse) for part in parts]


def step_inverse(e: Emitter, top: Value, limit: float) -> Value:
    """What float32 are multiplied by so that `top` becomes `limit`; 0 if it is at most 1e-34."""
    return e.select(top > _LEAST, e.const_like(limit, top) / top, e.zero(top.type))

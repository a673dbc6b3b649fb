"""Ops on rows of float32: RMS norms, the gate of the feed-forward network, the soft cap of logits, and their argmax."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.numpy.rows import ERF, ERF_P
from polarlm.engine.jit.lang import F32, I32, Emitter, Float32, Int64, Kernel, Pointer, Type, Value, vector

_F16 = vector(F32, 16)
NONE = -1
LOWEST = -3.4028234663852886e38  # the least float32
_TOGETHER = 2  # independent vectors of maxima: with one, each comparison would wait for the previous one
_LANES = 16


def for_each_column(e: Emitter, columns: Value, body: Callable[[Value, Type], None]) -> None:
    """Emit body(offset in bytes, type) for vectors of 16 columns, then for each remaining column; type: float32."""
    whole = columns // 16 * 16
    with e.loop(0, whole, 16) as column:
        body(column * 4, _F16)
    with e.loop(whole, columns) as column:
        body(column * 4, F32)


def inverse_rms(e: Emitter, x: Value, columns: Value, eps: Value) -> Value:
    """1 / √(mean square of the columns at x + eps)."""
    total, rest = e.variable(e.zero(_F16)), e.variable(e.zero(F32))

    def add_square(offset: Value, kind: Type) -> None:
        value, partial = e.load(x + offset, kind), total if kind == _F16 else rest
        partial.set(e.fma(value, value, partial.get()))

    for_each_column(e, columns, add_square)
    mean = (e.sum_lanes(total.get()) + rest.get()) / columns.trunc(I32).to_float() + eps
    return e.const_like(1.0, mean) / e.sqrt(mean)


class NormArguments(NamedTuple):
    x: Pointer
    weight: Pointer
    target: Pointer
    columns: Int64
    x_stride: Int64
    stride: Int64
    eps: Float32
    weights: Int64 = 1


@cache
def norm_rows(*, adds: bool) -> Kernel[NormArguments]:
    """target = x / rms(x) * weight, or with `adds` target += that; one unit per row. target may be x.

    weight (weights, columns): rows take them in turn. x_stride, stride: bytes from row to row of x and of target.
    """

    def emit(e: Emitter, args: NormArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row:
            source, target = args.x + row * args.x_stride, args.target + row * args.stride
            weight = args.weight + row % args.weights * args.columns * 4
            factor = inverse_rms(e, source, args.columns, args.eps)

            def write(offset: Value, kind: Type) -> None:
                value = e.load(source + offset, kind) * factor * e.load(weight + offset, kind)
                e.store(e.load(target + offset, kind) + value if adds else value, target + offset)

            for_each_column(e, args.columns, write)

    return Kernel(f"norm_rows{'_add' * adds}", emit, NormArguments)


class CentreArguments(NamedTuple):
    x: Pointer
    columns: Int64
    stride: Int64


@cache
def centre_rows() -> Kernel[CentreArguments]:
    """x − mean of rows of x, in place; one unit per row. stride: bytes from row to row."""

    def emit(e: Emitter, args: CentreArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row:
            _centre(e, args.x + row * args.stride, args.columns)

    return Kernel("centre_rows", emit, CentreArguments)


def _centre(e: Emitter, x_row: Value, columns: Value) -> None:
    total, rest = e.variable(e.zero(_F16)), e.variable(e.zero(F32))

    def add(offset: Value, kind: Type) -> None:
        partial = total if kind == _F16 else rest
        partial.set(partial.get() + e.load(x_row + offset, kind))

    for_each_column(e, columns, add)
    mean = (e.sum_lanes(total.get()) + rest.get()) / columns.trunc(I32).to_float()

    def subtract(offset: Value, kind: Type) -> None:
        value = e.load(x_row + offset, kind)
        e.store(value - e.const_like(mean, value), x_row + offset)

    for_each_column(e, columns, subtract)


class LayerNormArguments(NamedTuple):
    x: Pointer
    weight: Pointer
    bias: Pointer
    columns: Int64
    stride: Int64
    eps: Float32


@cache
def layer_norm_rows() -> Kernel[LayerNormArguments]:
    """(x − mean) / √(variance + eps) * weight + bias of rows of x, in place; one unit per row.

    stride: bytes from row to row.
    """

    def emit(e: Emitter, args: LayerNormArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row:
            x_row = args.x + row * args.stride
            _centre(e, x_row, args.columns)
            factor = inverse_rms(e, x_row, args.columns, args.eps)

            def write(offset: Value, kind: Type) -> None:
                value = e.load(x_row + offset, kind) * factor * e.load(args.weight + offset, kind)
                e.store(value + e.load(args.bias + offset, kind), x_row + offset)

            for_each_column(e, args.columns, write)

    return Kernel("layer_norm_rows", emit, LayerNormArguments)


class GateArguments(NamedTuple):
    gate: Pointer
    up: Pointer
    out: Pointer
    columns: Int64
    gate_stride: Int64
    up_stride: Int64
    out_stride: Int64


def gate_arguments(gate: np.ndarray, up: np.ndarray, out: np.ndarray) -> GateArguments:
    """The arguments of `gate` for arrays (rows, columns), which may be columns of wider ones."""
    strides = (array.strides[0] for array in (gate, up, out))
    return GateArguments(gate, up, out, out.shape[1], *strides)


@cache
def gate(activation: str) -> Kernel[GateArguments]:
    """activation(gate) * up of rows of `columns` numbers → out, one unit per row. Strides: bytes from row to row."""

    def emit(e: Emitter, args: GateArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row:
            first, second = args.gate + row * args.gate_stride, args.up + row * args.up_stride
            target = args.out + row * args.out_stride

            def write(offset: Value, kind: Type) -> None:
                x, up = e.load(first + offset, kind), e.load(second + offset, kind)
                e.store(apply_gate(e, activation, x, up), target + offset)

            for_each_column(e, args.columns, write)

    return Kernel(f"gate_{activation}", emit, GateArguments)


def apply_gate(e: Emitter, activation: str, x: Value, up: Value) -> Value:
    """activation(x) * up = x / (1 + e^u) * up, with u = -x (SiLU), u = -√(8/π) · (x + 0.044715 x³) (GELU by tanh), or
    u = -1.702 x for x up to 7 and (up between ±7) + 1 instead of up (clamped SwiGLU); or relu(x) * up; or
    Φ(x) * up (GELU), or x * Φ(x) * up (GELU of a gate). In networks without a gate x and up are the same."""
    if activation == "relu_squared":
        return e.fmax(x, 0.0) * up
    if activation in ("gelu", "gated_gelu"):
        return _normal_share(e, x) * (up if activation == "gelu" else x * up)
    if activation == "swiglu_clamped":
        x = _at_most(e, x, 7.0)
        up = -_at_most(e, -_at_most(e, up, 7.0), 7.0) + 1.0
        return x / (e.exp(x * -1.702) + 1.0) * up
    u = -x if activation == "silu" else (x * x * 0.044715 + 1.0) * x * -((8 / 3.141592653589793) ** 0.5)
    return up / (e.exp(u) + 1.0) if activation == "plain_gelu_tanh" else x / (e.exp(u) + 1.0) * up


def _normal_share(e: Emitter, x: Value) -> Value:
    """Φ(x); see `numpy.rows.ERF`."""
    size = e.fmax(x, -x)
    t = e.const_like(1.0, x) / (size * (ERF_P / 2**0.5) + 1.0)
    sums = t * ERF[-1]
    for factor in ERF[-2::-1]:
        sums = (sums + factor) * t
    tail = e.exp(x * x * -0.5) * sums * 0.5
    return e.select(x >= 0.0, e.const_like(1.0, x) - tail, tail)


def _at_most(e: Emitter, x: Value, limit: float) -> Value:
    """The minimum of x and a limit; NaN for NaN."""
    return e.select(x > limit, e.const_like(limit, x), x)


class RowGateArguments(NamedTuple):
    x: Pointer
    logits: Pointer
    columns: Int64
    parts: Int64
    x_stride: Int64
    stride: Int64


@cache
def gate_rows(*, shared: bool) -> Kernel[RowGateArguments]:
    """x (rows, parts · columns) times σ(logits), in place; one unit per row and part. shared: a part has one logit, not
    one per column.

    x_stride, stride: bytes from row to row of x and of the logits.
    """

    def emit(e: Emitter, args: RowGateArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            row, part = unit // args.parts, unit % args.parts
            x_row = args.x + row * args.x_stride + part * args.columns * 4
            logits = args.logits + row * args.stride + part * 4

            def write(offset: Value, kind: Type) -> None:
                x = e.load(x_row + offset, kind)
                logit = e.const_like(e.load(logits, F32), x) if shared else e.load(logits + offset, kind)
                e.store(x / (e.exp(-logit) + 1.0), x_row + offset)

            for_each_column(e, args.columns, write)

    return Kernel(f"gate_rows{'_shared' * shared}", emit, RowGateArguments)


def apply_softcap(e: Emitter, x: Value, cap: Value) -> Value:
    """cap · tanh(x / cap) = cap · (1 − 2 / (1 + e^(2x/cap))), float32."""
    return cap - cap * 2.0 / (e.exp(x * (e.const_like(2.0, cap) / cap)) + 1.0)


class ChangeArguments(NamedTuple):
    x: Pointer
    columns: Int64
    stride: Int64
    pieces: Int64
    numbers: Pointer
    step: Int64


ROW_PIECE = 4096  # columns of a unit


def _softcap_checked(e: Emitter, x: Value, cap: Value) -> Value:
    """x − x is 0, but NaN for an infinity, which would become the cap, as if the model had computed it."""
    return apply_softcap(e, x, cap) + (x - x)


def _scale_row(e: Emitter, x: Value, factor: Value) -> Value:
    return e.select((factor <= 0.0) & (factor >= 0.0), e.const_like(0.0, x), x * factor)


_CHANGES = {"softcap": _softcap_checked, "scale": _scale_row}


@cache
def change_rows(name: str) -> Kernel[ChangeArguments]:
    """x becomes softcap(x), cap · tanh(x / cap), or scale(x), x times a number, in place; one unit per row and piece,
    of `pieces` in a row.

    stride: bytes from row to row of x. numbers: the cap or factor of the first row; step: bytes to the next row's, or
    0.
    """

    def emit(e: Emitter, args: ChangeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            first, row = unit % args.pieces * ROW_PIECE, unit // args.pieces
            address, number = args.x + row * args.stride + first * 4, e.load(args.numbers + row * args.step, F32)

            def write(offset: Value, kind: Type) -> None:
                x = e.load(address + offset, kind)
                e.store(_CHANGES[name](e, x, e.const_like(number, x)), address + offset)

            for_each_column(e, e.imin(args.columns - first, ROW_PIECE), write)

    return Kernel(f"{name}_rows", emit, ChangeArguments)


class BestArguments(NamedTuple):
    x: Pointer
    best: Pointer
    columns: Int64
    stride: Int64


@cache
def best_of_rows() -> Kernel[BestArguments]:
    """The column of the maximum of each row, the first of equal ones; one unit per row.

    x (rows, columns) float32; stride: bytes from row to row. best (rows,) int32: the columns, or NONE where a number of
    the row is not finite. At most 2²⁴ columns: column numbers are compared as float32.
    """

    def emit(e: Emitter, args: BestArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as row:
            e.store(best(e, args.x + row * args.stride, args.columns), args.best + row * 4)

    return Kernel("best_of_rows", emit, BestArguments)


def best(e: Emitter, x: Value, columns: Value) -> Value:
    """The column of the maximum of float32 (columns,) at x, int32; see `best_of_rows`."""
    step = _TOGETHER * _LANES
    whole = columns // step * step
    widths = [*([_LANES] * _TOGETHER), 0]  # lanes: of the vectors for whole steps, then 0 for the scalar remainder
    floats, integers = zip(*((vector(F32, n), vector(I32, n)) if n else (F32, I32) for n in widths), strict=True)
    tops = [e.variable(e.constant(kind, LOWEST)) for kind in floats]
    columns_of = [e.variable(e.constant(kind, 0)) for kind in integers]
    not_finite = [e.variable(e.constant(kind, 0.0)) for kind in floats]  # becomes NaN if a number is not finite

    def compare(number: int, column: Value) -> None:
        value = e.load(x + column * 4, floats[number], 4 * _LANES * number if widths[number] else 0)
        column_numbers = e.const_like(column.trunc(I32), columns_of[number].get())
        better = value > tops[number].get()
        tops[number].set(e.select(better, value, tops[number].get()))
        columns_of[number].set(e.select(better, column_numbers, columns_of[number].get()))
        not_finite[number].set(e.fma(value, e.const_like(0.0, value), not_finite[number].get()))

    with e.loop(0, whole, step) as column:
        for number in range(_TOGETHER):
            compare(number, column)
    with e.loop(whole, columns) as column:
        compare(_TOGETHER, column)

    def max_of_lanes(values: list[Value]) -> Value:
        highest = values[-1]
        for value in values[:-1]:
            highest = e.fmax(highest, e.fmax_lanes(value))
        return highest

    top = max_of_lanes([top_of.get() for top_of in tops])
    places = []
    for number, (top_of, column_of, lanes) in enumerate(zip(tops, columns_of, widths, strict=True)):
        first = tuple(range(_LANES * number, _LANES * (number + 1))) if lanes else 0
        place = (column_of.get() + e.constant(integers[number], first)).to_float()
        places.append(e.select(top_of.get().equals(top), -place, e.const_like(LOWEST, place)))
    total = not_finite[-1].get()
    for zeros in not_finite[:-1]:
        total = total + e.sum_lanes(zeros.get())
    return e.select(total.equals(0.0), (-max_of_lanes(places)).to_int(), e.constant(I32, NONE))

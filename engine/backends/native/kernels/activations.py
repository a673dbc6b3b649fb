"""Rows of activations as bytes: the inputs of products with packed weights."""

from __future__ import annotations

from functools import cache
from typing import Any

from engine.backends.native.compiler import Kernel
from engine.backends.native.emit import Emitter
from engine.backends.native.kernels.rows import inverse_rms
from engine.backends.native.values import F32, I8, Value, vector

GROUP = 32  # inputs that share a scale


def row_bytes(columns: int) -> int:
    """Bytes of a row as `quantize_rows` writes it: int8 (columns,), then as float32 the scale of each 32 of them, the
    sum of each 32, and the sum of each 16."""
    return columns + columns // 32 * 16


def sums_at(columns: Any, group: int) -> Any:
    """Where the sums of each `group` bytes, 32 or 16, begin in such a row."""
    return columns + columns // 8 if group == 32 else columns + columns // 4


@cache
def quantize_rows(normed: bool) -> Kernel:
    """Rows of x → bytes, unit by row. x ≈ scale · byte, with the largest magnitude of a group at ±127.

    normed: after an RMS norm, x / rms(x) * weight. columns is a multiple of 32. stride: bytes from row to row of x.
    """

    def emit(e: Emitter, *args: Value, begin: Value, end: Value, scratch: Value) -> None:
        x, weight, out, columns, stride, out_stride, eps = args
        f16, groups = vector(F32, 16), columns // 32
        with e.loop(begin, end) as row:
            source, target = x + row * stride, out + row * out_stride
            if normed:
                factor = inverse_rms(e, source, columns, eps)
            scales, sums, sums_of_16 = target + columns, target + sums_at(columns, 32), target + sums_at(columns, 16)
            with e.loop(0, groups) as group:
                halves = [e.load(source + group * 128, f16, 64 * half) for half in (0, 1)]
                if normed:
                    gains = [e.load(weight + group * 128, f16, 64 * half) for half in (0, 1)]
                    halves = [half * factor * gain for half, gain in zip(halves, gains, strict=True)]
                top = e.maximum_lanes(e.maximum(e.absolute(halves[0]), e.absolute(halves[1])))
                inverse = e.select(top > 0.0, e.like(127.0, top) / top, e.zero(F32))
                integers = [e.round(half * inverse) for half in halves]
                totals = [e.sum_lanes(half) for half in integers]
                for number, (half, total) in enumerate(zip(integers, totals, strict=True)):
                    e.store(half.trunc(I8), target + group * 32, 16 * number)
                    e.store(total.to_float(), sums_of_16 + group * 8, 4 * number)
                e.store((totals[0] + totals[1]).to_float(), sums + group * 4)
                e.store(top * (1 / 127), scales + group * 4)

    name = "quantize_normed_rows" if normed else "quantize_rows"
    return Kernel(name, emit, ("x", "weight", "out"), ("columns", "stride", "out_stride"), ("eps",))

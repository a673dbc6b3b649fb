"""Rows of activations as products read them.

They lie in panels of the R rows that a product multiplies at once, so that all that a kernel reads lies at constant
distances from one address. For weights without codes a panel is float32 (inputs, R). For packed weights it has, for
each group of 32 inputs, the bytes of all its rows, int8 (R, 32), and then their numbers, float32 (R, 4): the scale, the
sum of the 32 bytes, and the sums of the first and of the last 16. Precise panels have two bytes for each input, a high
and a low one, whose value is 128 · high + low: the high bytes of all rows, the low bytes of all rows, their numbers.
"""

from __future__ import annotations

from functools import cache

from engine.backends.native.compiler import Kernel
from engine.backends.native.emit import Emitter
from engine.backends.native.kernels.rows import inverse_rms, over_columns
from engine.backends.native.values import F32, I8, Type, Value, vector

GROUP = 32  # inputs that share a scale
LOW_BITS = 7  # of a low byte


def input_bytes(precise: bool) -> int:
    """Bytes of a group's inputs, of one row."""
    return 2 * GROUP if precise else GROUP


def group_bytes(precise: bool) -> int:
    """Bytes of a group, of one row: inputs and numbers."""
    return input_bytes(precise) + 16


def panel_bytes(columns: int, at_once: int, precise: bool = False) -> int:
    """Bytes of a panel of `at_once` rows; columns is a multiple of 32."""
    return columns // GROUP * group_bytes(precise) * at_once


@cache
def quantize_rows(normed: bool, at_once: int, precise: bool = False) -> Kernel:
    """Rows of x → panels, unit by row. x ≈ scale · integer, with the largest magnitude of a group at ±127, or at
    ±127 · 128 in precise panels.

    normed: after an RMS norm, x / rms(x) * weight. columns is a multiple of 32. stride: bytes from row to row of x.
    """

    def emit(e: Emitter, *args: Value, begin: Value, end: Value, scratch: Value) -> None:
        x, weight, out, columns, stride, eps = args
        f16, groups, size = vector(F32, 16), columns // 32, group_bytes(precise) * at_once
        most = 127.0 * (1 << LOW_BITS) if precise else 127.0
        with e.loop(begin, end) as row:
            panel, place = row // at_once, row % at_once
            source, start = x + row * stride, out + panel * groups * size
            if normed:
                factor = inverse_rms(e, source, columns, eps)
            with e.loop(0, groups) as group:
                halves = [e.load(source + group * 128, f16, 64 * half) for half in (0, 1)]
                if normed:
                    gains = [e.load(weight + group * 128, f16, 64 * half) for half in (0, 1)]
                    halves = [half * factor * gain for half, gain in zip(halves, gains, strict=True)]
                top = e.maximum_lanes(e.maximum(e.absolute(halves[0]), e.absolute(halves[1])))
                inverse = e.select(top > 0.0, e.like(most, top) / top, e.zero(F32))
                integers = [e.round(half * inverse) for half in halves]
                totals = [e.sum_lanes(half) for half in integers]
                target = start + group * size
                bytes_, numbers = target + place * GROUP, target + place * 16 + input_bytes(precise) * at_once
                for number, half in enumerate(integers):
                    high = (half + (1 << LOW_BITS - 1)).ashr(LOW_BITS) if precise else half
                    e.store(high.trunc(I8), bytes_, 16 * number)
                    if precise:
                        low = half - (high << LOW_BITS)
                        e.store(low.trunc(I8), bytes_, GROUP * at_once + 16 * number)
                sums = [totals[0] + totals[1], *totals]
                e.store(e.collect([top * (1 / most), *(total.to_float() for total in sums)]), numbers)

    name = f"quantize{'_normed' * normed}{'_precise' * precise}_{at_once}"
    return Kernel(name, emit, ("x", "weight", "out"), ("columns", "stride"), ("eps",))


@cache
def interleave_rows(normed: bool, at_once: int) -> Kernel:
    """Rows of x → panels of float32, unit by row; the arguments are those of `quantize_rows`, for any columns."""

    def emit(e: Emitter, *args: Value, begin: Value, end: Value, scratch: Value) -> None:
        x, weight, out, columns, stride, eps = args
        with e.loop(begin, end) as row:
            source, panel = x + row * stride, out + row // at_once * columns * (4 * at_once)
            target = panel + row % at_once * 4
            factor = inverse_rms(e, source, columns, eps) if normed else None

            def write(offset: Value, kind: Type) -> None:
                value = e.load(source + offset, kind)
                if factor is not None:
                    value = value * factor * e.load(weight + offset, kind)
                for lane in range(value.lanes or 1):
                    number = e.extract(value, lane) if value.lanes else value
                    e.store(number, target + offset * at_once, 4 * at_once * lane)

            over_columns(e, columns, write)

    name = f"interleave{'_normed' * normed}_{at_once}"
    return Kernel(name, emit, ("x", "weight", "out"), ("columns", "stride"), ("eps",))

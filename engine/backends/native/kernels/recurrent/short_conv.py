"""Short convolutions: each row is a weighted sum of its own inputs and the last rows' inputs, times a gate."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.kernels.rows import for_each_column
from polarlm.engine.jit.lang import I32, I64, Emitter, Int64, Kernel, Pointer, Type, Value


class ConvArguments(NamedTuple):
    inputs: Pointer
    conv: Pointer
    bias: Pointer
    slots: Pointer
    rows: Pointer
    y: Pointer
    channels: Int64
    slot_rows: Int64


@cache
def short_conv(width: int, *, has_bias: bool) -> Kernel[ConvArguments]:
    """See `Ops.short_conv`; one unit per row. conv: float32 (width, channels). slot_rows: rows of a slot."""

    def emit(e: Emitter, args: ConvArguments, begin: Value, end: Value, scratch: Value) -> None:
        stride = args.channels * 4
        rows_before = width - 1

        with e.loop(begin, end) as row:
            slot, place, next_slot, row_back = (
                e.load(args.rows + row * 16 + 4 * field, I32).sext(I64) for field in range(4)
            )
            slot, next_slot = slot - 1, next_slot - 1
            inputs, y = args.inputs + row * stride * 3, args.y + row * stride
            slot_row = args.slots + (slot * args.slot_rows + place + rows_before) * stride
            repeats = place - (args.slot_rows - 2 * rows_before)
            copy = args.slots + (next_slot * args.slot_rows + repeats) * stride

            def new(offset: Value, kind: Type, rows_back: int) -> Value:
                """B · x of an earlier row of these, or of this one."""
                address = inputs + (offset - stride * (3 * rows_back))
                return e.load(address, kind) * e.load(address + stride * 2, kind)

            def compute(offset: Value, kind: Type) -> None:
                newest = new(offset, kind, 0)
                with e.when(slot >= 0):
                    e.store(newest, slot_row + offset)
                    with e.when((next_slot >= 0) & (repeats >= 0)):
                        e.store(newest, copy + offset)
                total = e.variable(newest * e.load(args.conv + (stride * rows_before + offset), kind))
                if has_bias:
                    total.add(e.load(args.bias + offset, kind))
                for rows_back in range(1, width):
                    weight = e.load(args.conv + (stride * (rows_before - rows_back) + offset), kind)
                    with e.when(row_back >= rows_back):
                        total.add(weight * new(offset, kind, rows_back))
                    with e.when((row_back < rows_back) & (slot >= 0)):
                        total.add(weight * e.load(slot_row + (offset - stride * rows_back), kind))
                e.store(e.load(inputs + stride + offset, kind) * total.get(), y + offset)

            for_each_column(e, args.channels, compute)

    return Kernel(f"short_conv_{width}{'_bias' * has_bias}", emit, ConvArguments)

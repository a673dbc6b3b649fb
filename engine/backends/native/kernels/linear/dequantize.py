"""Dequantization of rows of a matrix in tiles."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native.kernels.linear.expanders import expander
from polarlm.engine.backends.native.kernels.linear.tile_reads import (
    read_pair,
    read_plain,
    read_scale,
    read_subs,
    times_sub,
)
from polarlm.engine.backends.native.tiles import block_bytes, layout
from polarlm.engine.jit.lang import F32, I32, I64, Emitter, Float32, Int64, Kernel, Pointer, Value
from polarlm.engine.weight_formats import WeightFormat


class DequantizeArguments(NamedTuple):
    weights: Pointer
    ids: Pointer
    y: Pointer
    blocks: Int64
    tile_bytes: Int64
    columns: Int64
    factor: Float32


@cache
def dequantize_rows(format: WeightFormat) -> Kernel[DequantizeArguments]:
    """Rows `ids` of a matrix times `factor` → y (ids, inputs) float32, one unit per id."""

    def emit(e: Emitter, args: DequantizeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as number:
            row = e.load(args.ids + number * 4, I32).zext(I64)
            tile, lane = args.weights + (row // 16) * args.tile_bytes, row & 15
            target = args.y + number * args.columns * 4
            if format.unpack is None:
                with e.loop(0, args.columns) as column:
                    address = tile + (column * 16 + lane) * format.nbytes
                    e.store(read_plain(e, address, format, 0) * args.factor, target + column * 4)
            else:
                _dequantize_lane(e, format, tile, lane, args.blocks, target, args.factor)

    return Kernel(f"dequantize_{format.name}", emit, DequantizeArguments)


def _dequantize_lane(
    e: Emitter, format: WeightFormat, tile: Value, lane: Value, blocks: Value, target: Value, factor: Value
) -> None:
    """Row `lane` of a tile times `factor` → float32 at `target`."""
    expand = expander(e, format)
    place = layout(format) if expand is None else expand.layout
    table = None if format.table is None else e.constant_bytes(format.table.astype(np.float32).tobytes())
    with e.loop(0, blocks) as block:
        address = tile + block * block_bytes(format)
        if expand is not None:
            address = expand(address)
        numbers = address + lane * 2
        scale = read_scale(e, numbers, 0, place.is_power, 0)
        if expand is not None:
            scale = scale * float(expand.factor)
        offset = None if place.offset is None else read_scale(e, numbers, place.offset, False, 0)
        subs = read_subs(e, place, address)
        with e.loop(0, format.values // 32) as part:
            codes_at = address + part * place.part_bytes + lane * 4 + place.codes
            sub_at = subs + part * (16 * (32 // format.group)) + lane
            out = target + (block * format.values + part * 32) * 4
            for pair in range(16):
                group = pair * 2 // format.group
                codes = read_pair(e, place, codes_at, pair, 0)
                if table is None:
                    values = codes.sext(I32).to_float()
                    values = values if place.planes == (8,) else values - float(format.zero)
                else:
                    entries = [e.load(table + e.extract(codes, i).zext(I64) * 4, F32) for i in range(2)]
                    values = e.collect(entries)
                values = values * times_sub(e, scale, sub_at, place.sub_scale, group, signed=True)
                if offset is not None:
                    values = values + times_sub(e, offset, sub_at, place.sub_offset, group)
                e.store(values * factor, out, 8 * pair)

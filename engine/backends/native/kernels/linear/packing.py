"""Packing of weights: rows as they lie in a file become tiles (`engine.backends.native.tiles`), without rounding.

A kernel moves the bits of each field from where `Origins` says that they are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.native.tiles import (
    QUAD,
    ROWS,
    TileLayout,
    block_bytes,
    lattice_fields,
    lattice_layout,
    layout,
)
from polarlm.engine.backends.origins import Origins, find_origins, grouped_fields, power_scales
from polarlm.engine.jit.lang import I8, I16, I32, I64, Emitter, Int64, Kernel, Pointer, Value, vector
from polarlm.engine.weight_formats import WeightFormat

_PART = 32  # inputs whose codes lie together


class PackArguments(NamedTuple):
    raw: Pointer
    tiles: Pointer
    row_bytes: Int64  # a row's in the file
    blocks: Int64
    tile_bytes: Int64


@cache
def origins(format: WeightFormat) -> dict[str, Origins]:
    """Field → the origins of its bytes in a block."""
    return find_origins(format, grouped_fields if format.grid is None else lattice_fields)


@cache
def pack(format: WeightFormat) -> Kernel[PackArguments]:
    """Rows of a matrix, as in the file → tiles; a unit is a tile of 16 rows that all exist.

    For a format without codes `blocks` is the number of inputs.
    """
    if format.unpack is None:
        emit_tile = _emit_numbers
    elif format.runs is not None:
        emit_tile = _emit_trits
    else:
        emit_tile = _emit_blocks if format.grid is None else _emit_lattice

    def emit(e: Emitter, args: PackArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as number:
            source, target = args.raw + number * (args.row_bytes * ROWS), args.tiles + number * args.tile_bytes
            emit_tile(e, format, source, target, args)

    return Kernel(f"pack_{format.name}", emit, PackArguments)


def _emit_numbers(e: Emitter, format: WeightFormat, source: Value, target: Value, args: PackArguments) -> None:
    """The transpose of 16 rows of numbers."""
    element, size = {2: I16, 4: I32}[format.nbytes], format.nbytes
    whole = (args.blocks // ROWS) * ROWS
    with e.loop(0, whole, ROWS) as column:
        address = source + column * size
        rows = [e.load(address + args.row_bytes * row, vector(element, ROWS)) for row in range(ROWS)]
        for place, values in enumerate(e.transpose(rows)):
            e.store(values, target + column * (ROWS * size), place * ROWS * size)
    with e.loop(whole, args.blocks) as column, e.loop(0, ROWS) as row:
        value = e.load(source + row * args.row_bytes + column * size, element)
        e.store(value, target + (column * ROWS + row) * size)


def _emit_blocks(e: Emitter, format: WeightFormat, source: Value, target: Value, args: PackArguments) -> None:
    place, fields = layout(format), origins(format)
    powers = power_scales(format) if place.is_power else None
    table = None if powers is None else e.constant_bytes(powers[1].tobytes())
    with e.loop(0, args.blocks) as block, e.loop(0, ROWS) as row:
        address, out = source + row * args.row_bytes + block * format.nbytes, target + block * place.nbytes
        if powers is not None and table is not None:
            exponent = e.load(address, I8, powers[0]).zext(I64)
            e.store(e.load(table + exponent * 2, I16), out + row * 2)
        for name, start in (("scale", 0), ("offset", place.offset)):
            if start is not None and name in fields:
                e.store(_emit_bytes(e, address, fields[name]).bits(I16), out + row * 2, start)
        if subs := [_emit_bytes(e, address, fields[name]) for name in ("sub_scale", "sub_offset") if name in fields]:
            _emit_subs(e, e.join(subs), place, out + row)
        for part in range(format.values // _PART):
            codes = _emit_bytes(e, address, fields["codes"][_PART * part : _PART * (part + 1)])
            _emit_codes(e, codes, place, out + row * 4, place.codes + part * place.part_bytes)


def _emit_lattice(e: Emitter, format: WeightFormat, source: Value, target: Value, args: PackArguments) -> None:
    fields = origins(format)
    with e.loop(0, args.blocks) as block, e.loop(0, ROWS) as row:
        address, out = source + row * args.row_bytes + block * format.nbytes, target + block * block_bytes(format)
        for name, place in lattice_layout(format).items():
            numbers = _emit_bytes(e, address, fields[name]).bits(
                vector({1: I8, 2: I16, 4: I32}[place.size], place.count)
            )
            for number in range(place.count):
                e.store(e.extract(numbers, number), out + row * place.size, place.start + ROWS * place.size * number)


def _emit_trits(e: Emitter, format: WeightFormat, source: Value, target: Value, args: PackArguments) -> None:
    assert format.runs is not None
    count = sum(nbytes for nbytes, _ in format.runs)
    quads = [4 * (place // 4) + QUAD[place % 4] for place in range(count)]
    with e.loop(0, args.blocks) as block, e.loop(0, ROWS) as row:
        address, out = source + row * args.row_bytes + block * format.nbytes, target + block * block_bytes(format)
        e.store(e.load(address, I16, count), out + row * 2)
        words = _spread(e, e.load(address, vector(I8, count)), quads).bits(vector(I32, count // 4))
        for number in range(words.lanes):
            e.store(e.extract(words, number), out + row * 4, 2 * ROWS + 4 * ROWS * number)


def _emit_subs(e: Emitter, subs: Value, place: TileLayout, out: Value) -> None:
    """The sub-scales and sub-offsets of a row, int8, to the block at `out`."""
    start, planes = (place.sub_scale, (8,)) if place.subs is None else (place.subs.start, place.subs.planes)
    count, low = subs.lanes, 0
    assert start is not None
    for bits in planes:
        plane = subs if bits == 8 else subs >> low & (1 << bits) - 1
        while plane.lanes > count * bits // 8:
            half = plane.lanes // 2
            plane = e.part(plane, 0, half) | e.part(plane, half, half) << 8 * half // count
        for number in range(plane.lanes):
            e.store(e.extract(plane, number), out, start + ROWS * number)
        start += ROWS * plane.lanes
        low += bits


def _emit_codes(e: Emitter, codes: Value, place: TileLayout, out: Value, start: int) -> None:
    """The codes of 32 inputs of a row, int8 (32,), to their planes at `out` + `start` bytes."""
    low = 0
    for bits in place.planes:
        plane = codes ^ 128 if bits == 8 else codes if low == 0 else codes >> low
        plane = plane if low + bits == sum(place.planes) else plane & (1 << bits) - 1
        # Halves of the inputs are joined, shifted, until 2 · bits words are left.
        words = e.shuffle(plane, plane, [lane & ~3 | QUAD[lane & 3] for lane in range(_PART)]).bits(vector(I16, 16))
        while words.lanes > 2 * bits:
            half = words.lanes // 2
            words = e.part(words, 0, half) | e.part(words, half, half) << half // 2
        pairs = words.bits(vector(I32, bits))
        for number in range(bits):
            e.store(e.extract(pairs, number), out, start + 64 * number)
        start += 64 * bits
        low += bits


def _emit_bytes(e: Emitter, address: Value, origins: Origins) -> Value:
    """Bytes of a field, from the block at `address`: int8 (bytes,)."""
    kind, whole = vector(I8, len(origins.flips)), None
    for shift, places, masks in origins.moves():
        first, last = int(places[places >= 0].min()), int(places.max())
        source = e.load(address, vector(I8, last + 1 - first), first)
        bits = _shift(_spread(e, source, np.maximum(places - first, 0)), shift)
        is_kept = 0xFF >> shift if shift >= 0 else 0xFF << -shift & 0xFF
        if (masks & is_kept != is_kept).any():
            bits = bits & e.constant(kind, masks.tolist())
        whole = bits if whole is None else whole | bits
    assert whole is not None
    return whole ^ e.constant(kind, origins.flips.tolist()) if origins.flips.any() else whole


def _spread(e: Emitter, source: Value, lanes: Sequence[int] | np.ndarray) -> Value:
    chosen = [int(lane) for lane in lanes]
    return source if chosen == list(range(source.lanes)) else e.shuffle(source, source, chosen)


def _shift(a: Value, right: int) -> Value:
    return a >> right if right > 0 else a << -right if right < 0 else a

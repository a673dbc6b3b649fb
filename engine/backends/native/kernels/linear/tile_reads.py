"""Reads of tiles of weights (`engine.backends.native.tiles`).

lanes: 16 to read all rows of a tile, 0 to read one row.
"""

from __future__ import annotations

from polarlm.engine.backends.native.tiles import ROWS, TileLayout
from polarlm.engine.jit.lang import F32, I8, I16, I32, Emitter, Type, Value, vector
from polarlm.engine.weight_formats import WeightFormat


def _type(element: Type, lanes: int) -> Type:
    """A vector type, or the scalar type for 0 lanes."""
    return vector(element, lanes) if lanes else element


def read_plain(e: Emitter, address: Value, format: WeightFormat, lanes: int, offset: int = 0) -> Value:
    """Weights of a format without codes, at `address` + `offset` bytes, as float32."""
    if format.nbytes == 4:
        return e.load(address, _type(F32, lanes), offset)
    return widen(e, e.load(address, _type(I16, lanes), offset), is_bfloat=is_bfloat(format))


def is_bfloat(format: WeightFormat) -> bool:
    return format.name == "bf16"


def read_scale(e: Emitter, address: Value, place: int, is_power: bool, lanes: int) -> Value:
    """Scales or offsets as float32. place: offset in the block; is_power: as in `TileLayout`."""
    return widen(e, e.load(address, _type(I16, lanes), place), is_bfloat=is_power)


def widen(e: Emitter, bits: Value, *, is_bfloat: bool) -> Value:
    """The bits of float16 or bfloat16, int16 → float32."""
    if not is_bfloat:
        return e.half_to_float(bits)
    return (bits.zext(I32) << 16).bits(_type(F32, bits.lanes))


def read_subs(e: Emitter, layout: TileLayout, address: Value, memory: Value | None = None) -> Value:
    """The address that `sub_scale` and `sub_offset` of a layout are offsets from, for the block at `address`: its own,
    or the address of memory where they have become bytes. A few instructions unpack four numbers of each row."""
    subs = layout.subs
    if subs is None:
        return address
    memory = e.stack(ROWS * subs.count) if memory is None else memory
    counts = [subs.count * bits // 8 for bits in subs.planes]  # vectors of each plane
    for first in range(0, subs.count, size := min(4, *counts)):
        start, low, whole = subs.start, 0, None
        for bits, count in zip(subs.planes, counts, strict=True):
            piece = e.load(address, vector(I32, ROWS // 4 * size), start + ROWS * (first % count)) >> bits * (
                first // count
            )
            piece = (piece & ((1 << bits) - 1) * 0x01010101) << low
            whole = piece if whole is None else whole | piece
            start, low = start + ROWS * count, low + bits
        assert whole is not None
        if subs.is_signed:
            numbers, sign = whole.bits(vector(I8, ROWS * size)), 1 << low - 1
            whole = (numbers ^ sign) - sign
        e.store(whole, memory, ROWS * first)
    return memory


def times_sub(
    e: Emitter, factor: Value, address: Value, place: int | None, group: int, *, signed: bool = False
) -> Value:
    """factor times the sub-scale (or sub-offset) of a group, if the format has one."""
    if place is None:
        return factor
    sub = e.load(address, _type(I8, factor.lanes), place + ROWS * group)
    return factor * (sub.sext(I32) if signed else sub.zext(I32)).to_float()


def read_pair(e: Emitter, layout: TileLayout, address: Value, pair: int, lanes: int) -> Value:
    """Pair number `pair` of the codes of 32 inputs at `address`, for each row: int16 (2 · rows,)."""
    words = vector(I16, 2 * (lanes or 1))
    if layout.planes == (8,):
        both = e.load(address, words, 64 * (pair // 2))
        return both.ashr(8) if pair % 2 else (both << 8).ashr(8)
    return _join(e, layout, address, layout.place(pair), 0x00010001, _type(I32, lanes)).bits(words)


def read_quad(e: Emitter, layout: TileLayout, address: Value, quad: int, lanes: int) -> Value:
    """Four codes of each row, in the order of `tiles.QUAD`: the bytes of int32 (lanes,). address: codes of 32
    inputs."""
    if layout.planes == (8,):
        return e.load(address, vector(I32, lanes), 64 * quad)
    return _join(e, layout, address, quad, 0x01010101, vector(I32, lanes))


def _join(e: Emitter, layout: TileLayout, address: Value, place: int, ones: int, kind: Type) -> Value:
    """The bits of all planes at a place, in the fields of a lane whose lowest bits are `ones`."""
    start, low, whole = 0, 0, None
    for bits in layout.planes:
        piece = e.load(address, kind, start + 64 * (place % bits))
        start += 64 * bits
        piece = ((piece >> bits * (place // bits)) & ((1 << bits) - 1) * ones) << low
        whole = piece if whole is None else whole | piece
        low += bits
    assert whole is not None
    return whole

"""Weights in tiles, packed by NumPy: the layout of `engine.backends.native.tiles`, said a second time."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.weight_formats import Lattice, Trits, WeightFormat

_SUB_BITS = {"q2_k": 4, "q3_k": 6, "q4_k": 6, "q5_k": 6, "q6_k": 8, "iq4_xs": 6}
_FLOATS = {"f32": "<u4", "f16": "<u2", "bf16": "<u2"}


def pack(raw: np.ndarray, format: WeightFormat) -> np.ndarray:
    """raw (rows, bytes of a row) uint8, as in the file → (tiles, bytes of a tile) uint8."""
    rows = len(raw)
    if missing := -rows % tiles.ROWS:
        raw = np.concatenate([raw, np.zeros((missing, raw.shape[1]), np.uint8)])
    if format.unpack is None:
        numbers = raw.view(_FLOATS[format.name]).reshape(len(raw) // tiles.ROWS, tiles.ROWS, -1)
        return np.ascontiguousarray(numbers.swapaxes(1, 2)).view(np.uint8).reshape(len(numbers), -1)
    grouped = format.unpack(raw)
    if isinstance(grouped, Lattice):
        return _pack_lattice(grouped)
    if isinstance(grouped, Trits):
        return _pack_trits(grouped)
    place = tiles.layout(format)
    count, blocks = len(raw) // tiles.ROWS, grouped.codes.shape[1] // format.values
    out = np.empty((count, blocks, place.nbytes), np.uint8)
    out[:, :, place.codes :] = _pack_codes(grouped.codes, place.planes, blocks)
    scale = (grouped.scale.view(np.uint32) >> 16).astype(np.uint16) if place.is_power else grouped.scale
    given = [field for field in (grouped.sub_scale, grouped.sub_offset) if field is not None]
    subs = [field.reshape(len(raw), blocks, -1) for field in given]
    fields = scale, grouped.offset, _pack_subs(subs, _SUB_BITS[format.name]) if subs else None
    end = 0
    for field in fields:
        if field is not None:
            by_block = field.reshape(count, tiles.ROWS, blocks, -1).transpose(0, 2, 3, 1)
            by_block = np.ascontiguousarray(by_block).view(np.uint8).reshape(count, blocks, -1)
            out[:, :, end : end + by_block.shape[2]] = by_block
            end += by_block.shape[2]
    assert end == place.codes
    return out.reshape(count, -1)


def _pack_subs(fields: list[np.ndarray], bits: int) -> np.ndarray:
    """Sub-scales and sub-offsets, int8 and uint8 (rows, blocks, groups) → their bytes, uint8 (rows, blocks, n)."""
    whole = np.concatenate([field.view(np.uint8) for field in fields], axis=-1)
    if bits == 8:
        return whole
    first, second = np.split(whole & 15, 2, axis=-1)
    planes = [first | second << 4]
    if bits == 6:
        first, second, third, fourth = np.split(whole >> 4 & 3, 4, axis=-1)
        planes.append(first | second << 2 | third << 4 | fourth << 6)
    return np.concatenate(planes, axis=-1)


def _pack_codes(codes: np.ndarray, planes: tuple[int, ...], blocks: int) -> np.ndarray:
    """codes (rows, inputs) uint8 → the planes of each tile and block, uint8 (tiles, blocks, bytes)."""
    count = len(codes) // tiles.ROWS
    if planes == (8,):
        four = (codes ^ np.uint8(128)).reshape(count, tiles.ROWS, -1, 4)[..., [0, 2, 1, 3]]
        return np.ascontiguousarray(four.swapaxes(1, 2)).reshape(count, blocks, -1)
    # (tiles, inputs / 32, pairs, rows, inputs of a pair), first the even pairs
    pairs = codes.astype(np.uint16).reshape(count, tiles.ROWS, -1, 8, 2, 2).transpose(0, 2, 4, 3, 1, 5)
    pairs = pairs.reshape(count, -1, 16, tiles.ROWS, 2)
    parts, low = [], 0
    for bits in planes:
        plane = pairs >> np.uint16(low) & np.uint16((1 << bits) - 1)
        by_vector = plane.reshape(*pairs.shape[:2], 16 // bits, bits, tiles.ROWS, 2)
        shifts = (bits * np.arange(16 // bits)).astype(np.uint16).reshape(-1, 1, 1, 1)
        words = np.bitwise_or.reduce(by_vector << shifts, axis=2)
        parts.append(np.ascontiguousarray(words).view(np.uint8).reshape(*pairs.shape[:2], -1))
        low += bits
    return np.concatenate(parts, axis=-1).reshape(count, blocks, -1)


def _pack_trits(given: Trits) -> np.ndarray:
    """→ (tiles, bytes of a tile) uint8."""
    rows, blocks = given.scale.shape
    words = np.ascontiguousarray(given.packed.reshape(rows, blocks, -1, 4)[..., [0, 2, 1, 3]]).view(np.uint32)
    fields = given.scale.reshape(rows, blocks, 1), words[..., 0]
    by_tile = [field.reshape(rows // tiles.ROWS, tiles.ROWS, blocks, -1).transpose(0, 2, 3, 1) for field in fields]
    as_bytes = [np.ascontiguousarray(field).view(np.uint8).reshape(*field.shape[:2], -1) for field in by_tile]
    return np.concatenate(as_bytes, axis=-1).reshape(rows // tiles.ROWS, -1)


def _pack_lattice(given: Lattice) -> np.ndarray:
    """→ (tiles, bytes of a tile) uint8. Fields come as (rows, blocks, numbers), and get their rows last."""
    rows, blocks = given.scale.shape
    parts = (rows, blocks, 8)  # of 32 inputs
    scales = given.sub_scale.reshape(*parts, -1).astype(np.uint32)
    fields = [given.scale.reshape(rows, blocks, 1).view(np.uint16)]
    if given.signs is not None:
        signs = given.signs.reshape(*parts, 4).astype(np.uint32)
        if given.grid.signs == 7:
            signs |= (scales[..., :1] >> np.arange(4, dtype=np.uint32) & 1) << 7
            scales = scales[..., 1:]
        fields.append(np.bitwise_or.reduce(signs << np.arange(0, 32, 8, dtype=np.uint32), axis=-1))
    if scales.size:
        by_two = scales.reshape(rows, blocks, -1, 2)
        fields.append((by_two[..., 0] | by_two[..., 1] << 4).astype(np.uint8))
    indices = given.indices.reshape(rows, blocks, 8, -1).astype(np.uint32)
    if bits := {512: 1, 1024: 2, 4096: 4}.get(len(given.grid.points())):
        shifts = bits * np.arange(indices.shape[-1], dtype=np.uint32)
        high = np.bitwise_or.reduce(indices >> 8 << shifts, axis=-1)
        match bits * indices.shape[-1]:
            case 4:
                fields.append((high[..., 0::2] | high[..., 1::2] << 4).astype(np.uint8))
            case width:
                fields.append(high.astype(f"<u{width // 8}"))
    fields.append((indices & 255).astype(np.uint8).reshape(rows, blocks, -1).view(np.uint32))
    by_tile = [field.reshape(rows // tiles.ROWS, tiles.ROWS, blocks, -1).transpose(0, 2, 3, 1) for field in fields]
    as_bytes = [np.ascontiguousarray(field).view(np.uint8).reshape(*field.shape[:2], -1) for field in by_tile]
    return np.concatenate(as_bytes, axis=-1).reshape(rows // tiles.ROWS, -1)

"""Weights in tiles, packed by NumPy: the layout of `engine.backends.native.tiles`, said a second time."""

from __future__ import annotations

import numpy as np

from polarlm.engine.backends.native import tiles
from polarlm.engine.weight_formats import WeightFormat

_FLOATS = {"f32": "<u4", "f16": "<u2", "bf16": "<u2"}


def pack(raw: np.ndarray, format: WeightFormat) -> np.ndarray:
    """raw (rows, bytes of a row) uint8, as in the file → (tiles, bytes of a tile) uint8."""
    rows = len(raw)
    if missing := -rows % tiles.ROWS:
        raw = np.concatenate([raw, np.zeros((missing, raw.shape[1]), np.uint8)])
    if format.unpack is None:
        numbers = raw.view(_FLOATS[format.name]).reshape(len(raw) // tiles.ROWS, tiles.ROWS, -1)
        return np.ascontiguousarray(numbers.swapaxes(1, 2)).view(np.uint8).reshape(len(numbers), -1)
    place, grouped = tiles.layout(format), format.unpack(raw)
    count, blocks = len(raw) // tiles.ROWS, grouped.codes.shape[1] // format.values
    out = np.empty((count, blocks, place.nbytes), np.uint8)
    out[:, :, place.codes :] = _pack_codes(grouped.codes, place.planes, blocks)
    scale = (grouped.scale.view(np.uint32) >> 16).astype(np.uint16) if place.is_power else grouped.scale
    fields = (grouped.sub_scale, place.sub_scale), (grouped.sub_offset, place.sub_offset)
    for field, start in (*fields, (scale, place.scale), (grouped.offset, place.offset)):
        if field is not None and start is not None:
            by_block = field.reshape(count, tiles.ROWS, blocks, -1).transpose(0, 2, 3, 1)
            by_block = np.ascontiguousarray(by_block).view(np.uint8).reshape(count, blocks, -1)
            out[:, :, start : start + by_block.shape[2]] = by_block
    return out.reshape(count, -1)


def _pack_codes(codes: np.ndarray, planes: tuple[int, ...], blocks: int) -> np.ndarray:
    """codes (rows, inputs) uint8 → the planes of each tile and block, uint8 (tiles, blocks, bytes)."""
    count = len(codes) // tiles.ROWS
    if planes == (8,):
        codes = codes ^ np.uint8(128)
    # (tiles, inputs / 32, pairs, rows, inputs of a pair)
    pairs = codes.astype(np.uint16).reshape(count, tiles.ROWS, -1, 16, 2).transpose(0, 2, 3, 1, 4)
    parts, low = [], 0
    for bits in planes:
        plane = pairs >> np.uint16(low) & np.uint16((1 << bits) - 1)
        by_vector = plane.reshape(*pairs.shape[:2], 16 // bits, bits, tiles.ROWS, 2)
        shifts = (bits * np.arange(16 // bits)).astype(np.uint16).reshape(-1, 1, 1, 1)
        words = np.bitwise_or.reduce(by_vector << shifts, axis=2)
        parts.append(np.ascontiguousarray(words).view(np.uint8).reshape(*pairs.shape[:2], -1))
        low += bits
    return np.concatenate(parts, axis=-1).reshape(count, blocks, -1)

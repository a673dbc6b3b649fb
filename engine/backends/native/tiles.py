"""Weight matrices in tiles of 16 rows, so that the lanes of a vector are rows and no sum runs across lanes.

A tile is a run of blocks of `values` inputs. A block has its scales first and then its codes, because the hardware
prefetches only ascending addresses. A vector of codes has 64 bytes: an int32 for each of the 16 rows, whose two int16
belong to two consecutive inputs, a pair. Codes are cut into planes of 8, 4, 2 or 1 bits. For 32 inputs, 16 pairs, a
plane of b bits has b vectors; pair p is in vector p % b, shifted by b · (p // b) bits in its int16. Codes of 8 bits are
signed: 128 is subtracted from them.

    scale        (16,) float16, or bfloat16 for scales that are powers of two
    offset       (16,) float16                  if the format has it
    sub_scale    (values / group, 16) int8      if the format has it
    sub_offset   (values / group, 16) uint8     if the format has it
    codes        values / 32 times: the vectors of each plane, low bits first

A tile of a format without codes is its numbers, (inputs, 16). Rows are padded with zeros to a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from polarlm.engine.weight_formats import WeightFormat

ROWS = 16  # rows of a tile
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits per code → bits of each plane
_FLOATS = {"f32": "<u4", "f16": "<u2", "bf16": "<u2"}


@dataclass(frozen=True)
class TileLayout:
    """Offsets in bytes of the fields of a block of 16 rows; None for fields that the format does not have."""

    format: WeightFormat
    planes: tuple[int, ...]
    scale: int
    offset: int | None
    sub_scale: int | None
    sub_offset: int | None
    codes: int
    nbytes: int  # bytes of a block
    is_power: bool  # whether scales are powers of two, stored as bfloat16

    @property
    def part_bytes(self) -> int:
        """Bytes of the codes of 32 inputs of 16 rows."""
        return 64 * sum(self.planes)


@cache
def layout(format: WeightFormat) -> TileLayout:
    """The layout of a format that has codes and scales."""
    assert format.unpack is not None
    one = format.unpack(np.zeros((1, format.nbytes), np.uint8))
    planes, groups = _PLANES[format.bits], format.values // format.group
    end, places = 0, []
    sizes = (one.scale, 2), (one.offset, 2), (one.sub_scale, groups), (one.sub_offset, groups)
    for field, size in sizes:
        places.append(None if field is None else end)
        end += 0 if field is None else ROWS * size
    scale, offset, sub_scale, sub_offset = places
    assert scale is not None
    nbytes = end + format.values // 32 * 64 * sum(planes)
    return TileLayout(
        format, planes, scale, offset, sub_scale, sub_offset, end, nbytes, is_power=one.scale.dtype == np.float32
    )


def tile_bytes(format: WeightFormat, rows: int, columns: int) -> int:
    """Bytes that a matrix takes in tiles."""
    tiles = -(-rows // ROWS)
    if format.unpack is None:
        return tiles * ROWS * columns * format.nbytes
    return tiles * (columns // format.values) * layout(format).nbytes


def pack(raw: np.ndarray, format: WeightFormat) -> np.ndarray:
    """raw (rows, bytes of a row) uint8, as in the file → (tiles, bytes of a tile) uint8."""
    rows = len(raw)
    if missing := -rows % ROWS:
        raw = np.concatenate([raw, np.zeros((missing, raw.shape[1]), np.uint8)])
    if format.unpack is None:
        numbers = raw.view(_FLOATS[format.name]).reshape(len(raw) // ROWS, ROWS, -1)
        return np.ascontiguousarray(numbers.swapaxes(1, 2)).view(np.uint8).reshape(len(numbers), -1)
    place, grouped = layout(format), format.unpack(raw)
    tiles, blocks = len(raw) // ROWS, grouped.codes.shape[1] // format.values
    out = np.empty((tiles, blocks, place.nbytes), np.uint8)
    out[:, :, place.codes :] = _pack_codes(grouped.codes, place.planes, blocks)
    scale = (grouped.scale.view(np.uint32) >> 16).astype(np.uint16) if place.is_power else grouped.scale
    fields = (grouped.sub_scale, place.sub_scale), (grouped.sub_offset, place.sub_offset)
    for field, start in (*fields, (scale, place.scale), (grouped.offset, place.offset)):
        if field is not None and start is not None:
            by_block = field.reshape(tiles, ROWS, blocks, -1).transpose(0, 2, 3, 1)
            by_block = np.ascontiguousarray(by_block).view(np.uint8).reshape(tiles, blocks, -1)
            out[:, :, start : start + by_block.shape[2]] = by_block
    return out.reshape(tiles, -1)


def _pack_codes(codes: np.ndarray, planes: tuple[int, ...], blocks: int) -> np.ndarray:
    """codes (rows, inputs) uint8 → the planes of each tile and block, uint8 (tiles, blocks, bytes)."""
    tiles = len(codes) // ROWS
    if planes == (8,):
        codes = codes ^ np.uint8(128)
    # (tiles, inputs / 32, pairs, rows, inputs of a pair)
    pairs = codes.astype(np.uint16).reshape(tiles, ROWS, -1, 16, 2).transpose(0, 2, 3, 1, 4)
    parts, low = [], 0
    for bits in planes:
        plane = pairs >> np.uint16(low) & np.uint16((1 << bits) - 1)
        by_vector = plane.reshape(*pairs.shape[:2], 16 // bits, bits, ROWS, 2)
        shifts = (bits * np.arange(16 // bits)).astype(np.uint16).reshape(-1, 1, 1, 1)
        words = np.bitwise_or.reduce(by_vector << shifts, axis=2)
        parts.append(np.ascontiguousarray(words).view(np.uint8).reshape(*pairs.shape[:2], -1))
        low += bits
    return np.concatenate(parts, axis=-1).reshape(tiles, blocks, -1)

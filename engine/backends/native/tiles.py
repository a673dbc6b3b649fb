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

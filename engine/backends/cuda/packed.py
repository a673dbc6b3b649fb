"""Packed weight formats on a GPU: the sizes of the tiles of `cuda/packed_weights.cuh`."""

from __future__ import annotations

from functools import cache

import numpy as np

from polarlm.engine.backends.cuda.device import kernel_source
from polarlm.engine.weight_formats import Grouped, WeightFormat

ROWS = 16  # rows of a tile


def is_packed(format: WeightFormat) -> bool:
    """Whether kernels read matrices of this format in tiles."""
    return format.unpack is not None and kernel_source.can_read(format.name)


@cache
def block_bytes(format: WeightFormat) -> int:
    """Bytes of a block of one row of a packed format: two for the scale, two for the offset if there is one, one for
    each sub-scale and sub-offset of a group, and the codes."""
    assert format.unpack is not None
    one, groups = format.unpack(np.zeros((1, format.nbytes), np.uint8)), format.values // format.group
    assert isinstance(one, Grouped)
    numbers = 2 + 2 * (one.offset is not None)
    numbers += groups * ((one.sub_scale is not None) + (one.sub_offset is not None))
    return numbers + format.values * format.bits // 8


def tiles(format: WeightFormat, rows: int, width: int) -> tuple[int, int]:
    """The shape of a packed matrix (rows, width) as uint8: (tiles, bytes of a tile)."""
    return -(-rows // ROWS), ROWS * (width // format.values) * block_bytes(format)

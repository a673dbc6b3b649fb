"""Packed weight formats on a GPU: the sizes of the tiles of `cuda/packed_weights.cuh`, and products of few rows.

One launch multiplies the same x by matrices of two formats, such as q and k in one and v in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device, kernel_source, row_stride
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher, Product
from polarlm.engine.backends.cuda.launch_configs import GEMM_PACKED_ROWS, GEMV_ROWS, SHARED_BYTES, SYSTEM_BYTES
from polarlm.engine.weight_formats import Grouped, Matrix, WeightFormat

ROWS = 16  # rows of a tile
_GEMV_PACKED_STATIC_BYTES = 128 * GEMV_ROWS  # static shared memory of gemv_packed, at most
_PACKED_WARPS = 8  # a CTA of gemm_packed has
_SIZES = ("TILES", "SLOTS", "UNIT")  # what differs between the formats of a launch of packed weights
_GEMV_PACKED_COPIED = 4096  # bytes of a unit of gemv_packed, unless a block of the weights has more
_SLOT_BYTES = 80 << 10  # for slots of gemm_packed, unless these are too few: the L1 cache has the rest, for x


@cache
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


class PackedRows(NamedTuple):
    """Rows of packed weights. values, nbytes: of a block of one row of the format on the device."""

    out: int
    values: int
    nbytes: int


@cache
def rows_of(format: WeightFormat, out: int) -> PackedRows:
    return PackedRows(out, format.values, block_bytes(format))


def gemv_packed(
    rows: int, processors: int, shared_memory: int, weights: Sequence[PackedRows], gated: bool = False
) -> tuple[LaunchConfig, int, int]:
    """The launch for x (rows ≤ GEMV_ROWS, in) and packed weights of one format or of two → configuration, blocks, and
    how many of them multiply the first of two formats, dealt out by bytes. gated: weights are [gate | up]."""
    most = 1 << (rows - 1).bit_length()
    # Two tiles share a block's work on x; but with few blocks processors are idle.
    tiles = [2 if gated or one.out >= 32 * 2 * processors else 1 for one in weights]
    units = [256 if v == 256 or 16 * 256 * nbytes <= _GEMV_PACKED_COPIED * v else 128 for _, v, nbytes in weights]
    copied = [16 * one.nbytes * unit // one.values for one, unit in zip(weights, units, strict=True)]  # bytes a tile
    sums = [2 * 4 * most * (16 * of + 4) for of in tiles]  # bytes of a warp
    # As many warps of a multiprocessor as shared memory is enough for: 24, if they can do with so few registers.
    few = all(of == 1 or 8 * one.nbytes <= 5 * one.values for one, of in zip(weights, tiles, strict=True))
    most_warps = 24 if most == 1 and few else 16
    choices = [(warps, resident) for warps in (8, 4) for resident in range(1, most_warps // warps + 1)]
    for warps, resident in sorted(choices, key=lambda choice: (choice[0] * choice[1], choice[0]), reverse=True):
        free = min(SHARED_BYTES, shared_memory // resident) - SYSTEM_BYTES - _GEMV_PACKED_STATIC_BYTES
        slots = [(free // warps - of_sums) // of_unit for of_sums, of_unit in zip(sums, copied, strict=True)]
        if all(count > of for count, of in zip(slots, tiles, strict=True)):
            break
    # Measured on an H200: more slots make it slower.
    slots = [min(count, 2 * of) for count, of in zip(slots, tiles, strict=True)]
    shared = warps * max(a * b + c for a, b, c in zip(slots, copied, sums, strict=True))
    defines: dict[str, int | float | str] = {"ROWS": most, **_sizes(tiles, slots, units), "WARPS": warps}
    config = LaunchConfig({**defines, "RESIDENT": resident, "SHARED": shared}, 32 * warps, shared)
    sets = [-(-one.out // (16 * of)) for one, of in zip(weights, tiles, strict=True)]
    blocks = min(sum(sets), resident * processors)
    if len(weights) == 1:
        return config, blocks, blocks
    first, second = (one.out * one.nbytes / one.values for one in weights)
    border = round(blocks * first / (first + second))
    return config, blocks, max(1, blocks - sets[1], min(border, sets[0], blocks - 1))


def _sizes(tiles: Sequence[int], slots: Sequence[int], units: Sequence[int]) -> dict[str, int]:
    """The DEFINES of one format or of two, see `cuda/linear/beside.cuh`."""
    named = zip(("", "BESIDE_"), tiles, slots, units, strict=False)
    return {f"{of}{name}": size for of, *sizes in named for name, size in zip(_SIZES, sizes, strict=True)}


def gemm_packed(
    rows: int, processors: int, shared_memory: int, weights: Sequence[PackedRows], gated: bool = False
) -> tuple[LaunchConfig, int, int]:
    """The same for GEMV_ROWS < rows ≤ GEMM_PACKED_ROWS.

    A block for each set of tiles; but of one format, blocks of the first wave stay, where they have half a set more on
    average, and as many fit with memory of their own for sums.
    """
    most, warps = 1 << (rows - 1).bit_length(), _PACKED_WARPS
    sizes = [_gemm_packed_sizes(most, processors, shared_memory, one, gated) for one in weights]
    tiles, slots, units, residents = zip(*sizes, strict=True)
    copied = [16 * one.nbytes * unit // one.values for one, unit in zip(weights, units, strict=True)]  # bytes a warp
    sums = [4 * most * (16 * of + 4) for of in tiles]
    places = max(count * nbytes for count, nbytes in zip(slots, copied, strict=True))
    slots = tuple(places // nbytes for nbytes in copied)  # both formats take the same memory
    sets, resident = [-(-one.out // (16 * of)) for one, of in zip(weights, tiles, strict=True)], min(residents)
    shared, stays, blocks = warps * max(places, *sums), 0, sum(sets)
    if len(weights) == 1 and 2 * blocks >= 3 * resident * processors:
        more, staying = _gemm_packed_slots(shared_memory, tiles[0], copied[0], sums[0])
        if staying >= max(1, resident):
            slots, shared = (more,), warps * (more * copied[0] + sums[0])
            stays, blocks = 1, staying * processors
    defines: dict[str, int | float | str] = {"ROWS": most, **_sizes(tiles, slots, units), "WARPS": warps}
    return LaunchConfig({**defines, "STAYS": stays, "SHARED": shared}, 32 * warps, shared), blocks, sets[0]


def _gemm_packed_sizes(
    most: int, processors: int, shared_memory: int, weights: PackedRows, gated: bool
) -> tuple[int, int, int, int]:
    """TILES, SLOTS and UNIT of gemm_packed, and blocks of a multiprocessor."""
    out, values, nbytes = weights
    # Tiles share a block's reads of x, which pays from 9 rows on: with fewer, blocks with one tile are 1 to 9 % faster
    # on an H100. With few blocks, processors are idle.
    blocks, shares, warps = processors * 7 // 8, most > 8, _PACKED_WARPS
    tiles = 2 if gated or (shares and out >= 32 * blocks) else 1
    unit = max(128, values)
    copied = 16 * nbytes * unit // values  # bytes of a unit of a tile
    # Blocks with so many rows read more bytes of x from the L2 cache than of weights: four tiles share them, where two
    # blocks with so many slots are resident.
    beside = SYSTEM_BYTES
    if shares and out >= 64 * 2 * blocks and warps * 5 * copied + beside <= min(SHARED_BYTES, shared_memory // 2):
        tiles = 4
    slots, resident = _gemm_packed_slots(shared_memory, tiles, copied)
    return tiles, slots, unit, resident


def _gemm_packed_slots(shared_memory: int, tiles: int, copied: int, sums: int = 0) -> tuple[int, int]:
    """SLOTS of gemm_packed, and blocks of a multiprocessor: 0 where not even one fits. sums: bytes of a warp beside its
    slots, of `copied` bytes each."""
    for resident in (2, 1):
        free = min(SHARED_BYTES, shared_memory // resident) - SYSTEM_BYTES
        slots = (free // _PACKED_WARPS - sums) // copied
        if slots > tiles:
            return max(tiles + 1, min(slots, _SLOT_BYTES // (_PACKED_WARPS * copied))), resident
    return tiles + 1, 0


@cache
def _configured(launch: Callable[..., tuple[LaunchConfig, int, int]], *shape: Any) -> tuple[LaunchConfig, int, int]:
    return launch(*shape)


def joins(weight: Matrix, beside: Matrix, rows: int) -> bool:
    """Whether one launch multiplies `rows` rows by both of these neighbouring matrices."""
    formats = weight.format, beside.format
    return rows <= GEMM_PACKED_ROWS and formats[0] is not formats[1] and all(map(is_packed, formats))


def multiply(device: Device, launch: Launcher, y: Array, x: Array, product: Product) -> None:
    """`linear` of at most GEMM_PACKED_ROWS rows into y; more than GEMV_ROWS come normalised in half precision."""
    (rows, width), (weight, beside) = x.shape, (product.weight, product.beside)
    few, matrices = rows <= GEMV_ROWS, [weight] if beside is None else [weight, beside]
    weights = tuple([rows_of(matrix.format, matrix.shape[0]) for matrix in matrices])
    shape = rows, device.processors, device.shared_memory, weights, product.activation is not None
    config, blocks, border = _configured(gemv_packed if few else gemm_packed, *shape)
    out = y.shape[1] - (0 if beside is None else beside.shape[0])
    more = () if beside is None else (beside.data, beside.shape[0], border)
    operands, sizes = (y, x, weight.data, product.bias), (rows, width, out, row_stride(y))
    config = product.with_types(y, config)
    if not few:
        launch("gemm_packed", (blocks,), config, *operands, *sizes, *more)
        return
    norm_weight, eps = product.norm or (None, 0.0)
    launch("gemv_packed", (blocks,), config, *operands, norm_weight, *sizes, float(eps), *more)

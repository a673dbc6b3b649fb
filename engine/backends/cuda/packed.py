"""Packed weight formats on a GPU: the sizes of the tiles of `cuda/packed_weights.cuh`, and products of one or two rows.

One launch multiplies the same x by matrices of two formats, such as q and k in one and v in another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from polarlm.engine.backends.cuda.device import Array, Device, kernel_source, row_stride
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher, Product
from polarlm.engine.backends.cuda.launch_configs import GEMV_ROWS, SHARED_BYTES, SYSTEM_BYTES
from polarlm.engine.backends.origins import Origins, empty_block, find_origins, power_scales
from polarlm.engine.weight_formats import Matrix, WeightFormat

ROWS = 16  # rows of a tile
_GEMV_PACKED_STATIC_BYTES = 128 * GEMV_ROWS  # static shared memory of gemv_packed, at most
_SIZES = ("TILES", "SLOTS", "UNIT")  # what differs between the formats of a launch of packed weights
_GEMV_PACKED_COPIED = 4096  # bytes of a unit of gemv_packed, unless a block of the weights has more


@cache
def is_packed(format: WeightFormat) -> bool:
    """Whether kernels read matrices of this format in tiles."""
    return format.unpack is not None and kernel_source.can_read(format.name)


def block_bytes(format: WeightFormat) -> int:
    """Bytes of a block of one row of a packed format."""
    return row_bytes(format, format.values)


@cache
def row_bytes(format: WeightFormat, values: int) -> int:
    """Bytes of `values` inputs of a block of one row of a packed format: two for the scale, two for the offset if there
    is one, one for each sub-scale and sub-offset of a group, and the codes."""
    one, groups = empty_block(format), values // format.group
    numbers = 2 + 2 * (one.offset is not None)
    numbers += groups * ((one.sub_scale is not None) + (one.sub_offset is not None))
    return numbers + values * format.bits // 8


def tiles(format: WeightFormat, rows: int, width: int) -> tuple[int, int]:
    """The shape of a packed matrix (rows, width) as uint8: (tiles, bytes of a tile)."""
    return -(-rows // ROWS), ROWS * (width // format.values) * block_bytes(format)


@cache
def origins(format: WeightFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Where the fields of a block on the device come from: `bits`, `flips` and `powers` of `cuda/linear/repack.cu`."""
    fields, powers = find_origins(format), None
    if "scale" not in fields:
        byte, powers = power_scales(format)
        fields["scale"] = Origins(np.array([range(8 * byte, 8 * byte + 8), [-1] * 8]), np.zeros(2, np.uint8))
    if "sub_scale" in fields:
        fields["sub_scale"] = Origins(fields["sub_scale"].bits, fields["sub_scale"].flips ^ 128)
    kept = [fields[name] for name in ("scale", "offset", "sub_scale", "sub_offset", "codes") if name in fields]
    bits = np.concatenate([field.bits for field in kept]).astype(np.int16)
    return bits, np.concatenate([field.flips for field in kept]), powers


class PackedRows(NamedTuple):
    """Rows of packed weights. values, nbytes: of a block of one row of the format on the device."""

    out: int
    values: int
    nbytes: int


@cache
def rows_of(format: WeightFormat, out: int) -> PackedRows:
    return PackedRows(out, format.values, block_bytes(format))


@cache
def gemv_packed(
    rows: int, processors: int, shared_memory: int, weights: tuple[PackedRows, ...], gated: bool = False
) -> tuple[LaunchConfig, int, int]:
    """The launch for x (rows ≤ GEMV_ROWS, in) and packed weights of one format or of two → configuration, blocks, and
    how many of them multiply the first of two formats, dealt out by bytes. gated: weights are [gate | up]."""
    most = 1 << (rows - 1).bit_length()
    # Two tiles share a block's work on x; but with few blocks processors are idle.
    tiles = [2 if gated or one.out >= 32 * 2 * processors else 1 for one in weights]
    units = [256 if v == 256 or 16 * 256 * nbytes <= _GEMV_PACKED_COPIED * v else 128 for _, v, nbytes in weights]
    copied = [16 * one.nbytes * unit // one.values for one, unit in zip(weights, units, strict=True)]  # bytes a tile
    sums = [2 * 4 * most * (16 * count + 4) for count in tiles]  # bytes of a warp
    # As many warps of a multiprocessor as shared memory is enough for: 24, if they can do with so few registers.
    needs_few_registers = all(
        count == 1 or 8 * one.nbytes <= 5 * one.values for one, count in zip(weights, tiles, strict=True)
    )
    most_warps = 24 if most == 1 and needs_few_registers else 16
    choices = [(warps, resident) for warps in (8, 4) for resident in range(1, most_warps // warps + 1)]
    for warps, resident in sorted(choices, key=lambda choice: (choice[0] * choice[1], choice[0]), reverse=True):
        free = min(SHARED_BYTES, shared_memory // resident) - SYSTEM_BYTES - _GEMV_PACKED_STATIC_BYTES
        slots = [(free // warps - sum_bytes) // unit_bytes for sum_bytes, unit_bytes in zip(sums, copied, strict=True)]
        if all(slot_count > tile_count for slot_count, tile_count in zip(slots, tiles, strict=True)):
            break
    # Measured on an H200: more slots make it slower.
    slots = [min(slot_count, 2 * tile_count) for slot_count, tile_count in zip(slots, tiles, strict=True)]
    shared = warps * max(a * b + c for a, b, c in zip(slots, copied, sums, strict=True))
    defines: dict[str, int | float | str] = {"ROWS": most, **_sizes(tiles, slots, units), "WARPS": warps}
    config = LaunchConfig({**defines, "RESIDENT": resident, "SHARED": shared}, 32 * warps, shared)
    sets = [-(-one.out // (16 * count)) for one, count in zip(weights, tiles, strict=True)]
    blocks = min(sum(sets), resident * processors)
    if len(weights) == 1:
        return config, blocks, blocks
    first, second = (one.out * one.nbytes / one.values for one in weights)
    border = round(blocks * first / (first + second))
    return config, blocks, max(1, blocks - sets[1], min(border, sets[0], blocks - 1))


def _sizes(tiles: Sequence[int], slots: Sequence[int], units: Sequence[int]) -> dict[str, int]:
    """The DEFINES of one format or of two, see `cuda/linear/output_tile.cuh`."""
    named = zip(("", "SECOND_"), tiles, slots, units, strict=False)
    return {f"{prefix}{name}": size for prefix, *sizes in named for name, size in zip(_SIZES, sizes, strict=True)}


def joins(weight: Matrix, second: Matrix) -> bool:
    """Whether one launch can multiply by both of these neighbouring matrices."""
    formats = weight.format, second.format
    return formats[0] is not formats[1] and all(map(is_packed, formats))


def multiply(device: Device, launch: Launcher, y: Array, x: Array, product: Product) -> None:
    """`linear` of at most GEMV_ROWS rows into y."""
    (rows, width), (weight, second) = x.shape, (product.weight, product.second)
    matrices = [weight] if second is None else [weight, second]
    weights = tuple([rows_of(matrix.format, matrix.shape[0]) for matrix in matrices])
    gated = product.activation is not None
    config, blocks, border = gemv_packed(rows, device.processors, device.shared_memory, weights, gated)
    out = y.shape[1] - (0 if second is None else second.shape[0])
    more = () if second is None else (second.data, second.shape[0], border)
    norm_weight, eps = product.norm or (None, 0.0)
    operands, sizes = (y, x, weight.data, product.bias, norm_weight), (rows, width, out, row_stride(y), float(eps))
    launch("gemv_packed", (blocks,), product.with_types(y, config), *operands, *sizes, *more)

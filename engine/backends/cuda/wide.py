"""Products of three rows and more on tensor cores, also of experts: launches of `cuda/linear/gemm_wide.cu`.

Into how many parts the inputs of a matrix are split depends on the matrix and the GPU alone. So a row's result is the
same to the bit, whatever the number of rows computed with it.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from polarlm.engine.backends.cuda import packed
from polarlm.engine.backends.cuda.device import Array, Device, row_stride
from polarlm.engine.backends.cuda.launch import LaunchConfig, Launcher, Product, result_type, threads_for
from polarlm.engine.backends.cuda.launch_configs import SYSTEM_BYTES
from polarlm.engine.weight_formats import WeightFormat

# Most rows with packed weights: more are faster dequantized and multiplied by cuBLAS. On an H200 (2026-11-28), a layer
# of an 8B model takes 130 µs with 64 rows of q4_k and 277 with 128, so about 415 with 192 and 550 with 256. cuBLAS took
# 428 and 420 µs for these, of which 230 to dequantize, which has more loads on their way since.
WIDE_ROWS = 192

_MOST_ROWS = 64  # of x, of a block: with 128, some formats need more registers than there are
GROUP_ROWS = (16, 32, _MOST_ROWS)  # rows of a group of an expert's pairs, at most
_UNIT = 256  # inputs: parts have whole units, and at least two of them
_WARPS = 8  # of a block, at most
_LEAST_WARPS = 4  # and for experts: with fewer, a warp would copy much of x
_FEW_BLOCKS_WARPS = (2, 2)  # WARPS_OUT and WARPS_K where most multiprocessors would have no block
_LEAST_STAGES = 3


@cache
def parts(outs: tuple[int, ...], width: int, processors: int) -> int:
    """Into how many parts to split the inputs of matrices with `outs` rows of `width` weights, in one launch, so that
    nearly every multiprocessor has a block."""
    tiles = sum(-(-out // (32 * _WARPS)) for out in outs)
    return max(1, min(processors // tiles, -(-width // _UNIT) // 2))


@cache
def row_groups(rows: int) -> tuple[int, int]:
    """ROWS of the launch for `rows` rows of x, and how many blocks share a tile of weights."""
    groups = -(-rows // _MOST_ROWS)
    most = -(-rows // groups)
    return 8 if most <= 8 else -(-most // 16) * 16, groups


def expert_groups(pairs: int, experts: int) -> tuple[int, int]:
    """ROWS for groups of `pairs` pairs of a row and an expert, twice as many as experts have on average if there are
    such; and how many groups there are at most."""
    most = next((rows for rows in GROUP_ROWS if 2 * pairs <= rows * experts), GROUP_ROWS[-1])
    return most, most_groups(pairs, experts, most)


def most_groups(pairs: int, experts: int, rows: int) -> int:
    """How many groups of up to `rows` rows there are at most."""
    return min(pairs, experts + pairs // rows)


def groups_pairs(pairs: int, experts: int) -> bool:
    """Whether pairs of rows and experts are grouped by expert. Products of one row take half to two thirds
    of the instructions a weight that gemm_wide takes, and of fewer pairs than experts, few have an expert in common."""
    return pairs > experts


@cache
def warps_for(outs: tuple[int, ...], split: int, processors: int) -> tuple[int, int]:
    """WARPS_OUT and WARPS_K: fewer where all multiprocessors have a block even so, as the matrix and the GPU say."""
    warps = -(-sum(outs) * split // (32 * processors))
    return (max(_LEAST_WARPS, min(_WARPS, warps)), 1) if warps > _FEW_BLOCKS_WARPS[0] else _FEW_BLOCKS_WARPS


@cache
def gemm_wide(
    most: int, formats: tuple[WeightFormat, ...], warps: tuple[int, int], shared_memory: int, resident: int = 1
) -> tuple[LaunchConfig, int]:
    """The launch for ROWS `most` and weights of these formats → configuration, and rows of weights of a block. warps:
    WARPS_OUT and WARPS_K. shared_memory: bytes of a multiprocessor. resident: blocks of it. A block that is alone takes
    more than half of its memory: blocks of the next launch, which begins early, would otherwise share the first
    multiprocessor that is free."""
    out, warps_k = warps
    for choice in ((out, 128, resident), (out, 64, resident), (_LEAST_WARPS, 64, 1)):
        out, inputs, resident = choice
        limit = shared_memory // resident - SYSTEM_BYTES
        stage = 2 * out * max(_tile_bytes(format, inputs) for format in formats) + 2 * most * inputs
        if _LEAST_STAGES * stage <= limit:
            break
    stages = min(limit // stage, max(4, limit // (2 * stage) + 1))
    defines: dict[str, int | float | str] = {"ROWS": most, "WARPS_OUT": out, "WARPS_K": warps_k, "INPUTS": inputs}
    defines |= {"STAGES": stages, "RESIDENT": resident, "SHARED": stages * stage}
    return LaunchConfig(defines, 32 * out * warps_k, stages * stage), 32 * out


def gemm_wide_experts(most: int, format: WeightFormat, shared_memory: int) -> tuple[LaunchConfig, int]:
    """The same for groups of at most `most` rows of experts."""
    config, tile = gemm_wide(most, (format,), (_LEAST_WARPS, 1), shared_memory, resident=2)
    return config._replace(defines={**config.defines, "EXPERTS": 1}), tile


def _tile_bytes(format: WeightFormat, inputs: int) -> int:
    """Bytes of 16 rows of weights in a stage."""
    if not packed.is_packed(format):
        return 2 * packed.ROWS * inputs
    blocks, values = max(1, inputs // format.values), min(inputs, format.values)
    return packed.ROWS * blocks * packed.row_bytes(format, values)


def multiply(device: Device, launch: Launcher, y: Array, x: Array, product: Product) -> None:
    """`linear` of any number of rows into y; x (rows, in) is normalised and of the type that the product takes."""
    (rows, width), weight, second, processors = x.shape, product.weight, product.second, device.processors
    first_out, second_out = weight.shape[0], 0
    outs: tuple[int, ...] = (first_out,)
    formats: tuple[WeightFormat, ...] = (weight.format,)
    if second is not None:
        second_out = second.shape[0]
        outs, formats = (first_out, second_out), (weight.format, second.format)
    split = parts(outs, width, processors)
    most, groups = row_groups(rows)
    config, tile = gemm_wide(most, formats, warps_for(outs, split, processors), device.shared_memory)
    tiles = -(-first_out // tile)
    target, whole, out = y, product, y.shape[1] - second_out
    if split > 1:
        target = device.empty((split * rows, first_out + second_out), np.float32)
        whole, out = product._replace(bias=None, add=False, activation=None), first_out
    more = () if second is None else (second.data, second_out, tiles)
    operands, sizes = (target, x, weight.data, whole.bias), (rows, width, out, row_stride(target))
    config = whole.with_types(target, config)
    launch("gemm_wide", ((tiles + -(-second_out // tile)) * groups, split), config, *operands, *sizes, *more)
    if split > 1:
        _add_parts(launch, y, target, product, split)


def _add_parts(launch: Launcher, y: Array, sums: Array, product: Product, count: int) -> None:
    rows, out = y.shape
    gate = {} if product.activation is None else {"ACTIVATION": product.activation}
    config = LaunchConfig({"ADD": int(product.add), **gate, **result_type(y)}, threads_for(rows * out))
    grid = (-(-rows * out // config.threads),)
    launch("add_parts", grid, config, y, sums, product.bias, count, rows, out, row_stride(y))

"""How many threads and how much shared memory the larger kernels take: the twin of the constants in their heads."""

from __future__ import annotations

from functools import cache

from engine.backends.cuda.launch import WARP, LaunchConfig
from engine.backends.ops import STEP_ROWS
from engine.quantization import encode
from engine.records import Layout, table_bytes

# Bytes of shared memory that a block may have on every GPU that we serve: those of 8.6, 8.9 and 12.0 have the least.
SHARED_BYTES = 99 << 10

# Rows that the kernels for few rows take at most. Each row costs gemv as many instructions as the first: by their count
# more than these take longer than the bytes of the weights, where gemm_small has eight rows for the price of one.
GEMV_ROWS = 4
SMALL_ROWS = 64

# More rows are rounded to the weights' type before they are multiplied: else each block does that again, and 16 rows of
# float32 are as many bytes to it as its weights.
UNROUNDED_ROWS = 8

_TILE_BYTES = 512
_SYSTEM_BYTES = 1024  # of a block's shared memory, at its beginning: decode_attention counts on them
_GEMM_STATIC_BYTES = 768  # of gemm_small's shared memory, beside the dynamic: 4 (ROWS · WARPS_K + ROWS) at most
_ENCODE_WARPS = 12  # two blocks fit a multiprocessor
_COMBINE_WARPS = 8
_OUTPUTS = 4  # rows of weights of a warp in gemv
_GEMV_WARPS = 16  # of a multiprocessor: fewer have too few bytes on their way
_GEMV_INPUTS = 256  # that a warp of gemv takes at once
_LEAST_STAGES = 8  # of a part in gemm_small: beginning and ending cost about five
# How codes are chosen, as in `engine.quantization.encode`.
ROUNDING = {"LARGEST": encode.LARGEST, "TILT_LOW": encode.TILT_RANGE[0], "TILT_HIGH": encode.TILT_RANGE[1]}
DECODE_HEADS = 8  # query heads, of all rows, that a block of decode_attention serves


def gemv(rows: int, out: int, width: int, processors: int) -> tuple[LaunchConfig, int]:
    """For rows ≤ GEMV_ROWS of `width` numbers and `out` rows of weights; blocks."""
    split = 1  # warps that share an output, until every multiprocessor has enough bytes on their way
    while split < 8 and out * split < _OUTPUTS * _GEMV_WARPS * processors and width >= 2 * _GEMV_INPUTS * split:
        split *= 2
    defines = {"ROWS": 1 << (rows - 1).bit_length(), "OUTPUTS": _OUTPUTS, "SPLIT": split}
    return LaunchConfig(defines, 256), -(-out * split // (_OUTPUTS * 8))


def gemm_small(rows: int, out: int, width: int, processors: int, shared_memory: int) -> tuple[LaunchConfig, int, int]:
    """For rows ≤ SMALL_ROWS of `width` numbers and `out` rows of weights; blocks, and parts of `width` that would keep
    the machine busy. shared_memory: bytes of a multiprocessor."""
    most = 8 if rows <= 8 else -(-rows // 16) * 16
    deep = 8 if most <= 16 else 4 if most == 32 else 2  # warps that share a tile's outputs
    tile = 32 * 8 // deep
    shared = max(5 * 16384 + 1024 * most * deep // 8, 4 * deep * most * (tile + 4))
    blocks = -(-out // tile)
    by_registers = 1 if most > 32 else 2  # blocks that a multiprocessor runs at the same time
    by_memory = shared_memory // (shared + _GEMM_STATIC_BYTES + _SYSTEM_BYTES)
    at_once = processors * max(1, min(by_registers, by_memory))
    parts = max(1, min(at_once // blocks, width // (_LEAST_STAGES * 32 * deep)))
    return LaunchConfig({"ROWS": most, "WARPS_OUT": 8 // deep}, 256, shared), blocks, parts


def step_rows(most: int) -> int:
    """What a kernel of steps is compiled for where a sequence has `most` rows: one, or as many as there may be."""
    return 1 if most == 1 else STEP_ROWS


def decode_attention(keys: Layout, values: Layout, group: int, most: int = 1) -> tuple[LaunchConfig, int]:
    """For `group` query heads to a KV head and `most` rows of a sequence; blocks that share a KV head's queries."""
    padded = keys.record.geometry.padded
    full = [not side.is_quantized for side in (keys, values)]
    beside_codes = any(full) and not (all(full) and keys.mean_bits == 0)
    words = sum(side.record.constants.get("WORDS", 0) for side in (keys, values))  # registers that codes take
    rows = step_rows(most)
    wide = padded > 128 or words > 64 or beside_codes or rows > 1
    warps = 8 if wide else 12
    chunks = -(-group * most // DECODE_HEADS)
    columns = DECODE_HEADS if rows > 1 else -(-group // chunks)
    means = 512 * warps if keys.mean_bits else 0
    shared = max(table_bytes(keys, values) + means, warps * columns * (padded + 6) * 4)
    return LaunchConfig({"GROUP": group, "WARPS": warps, "STEP_ROWS": rows}, 32 * warps, shared + _SYSTEM_BYTES), chunks


@cache
def decode_splits(processors: int, blocks: int) -> int:
    """Splits of decode_attention where one of them has `blocks` blocks; a multiprocessor has one at a time.

    Least time where all take as long, and beginning and ending costs a block a thirtieth of reading a whole cache.
    """
    return min(range(1, processors + 1), key=lambda splits: -(-splits * blocks // processors) * (1 / splits + 1 / 30))


def combine(head_dim: int, order: int) -> LaunchConfig:
    """For the splits of one head; order: of Hadamard's matrix in the rotation."""
    return LaunchConfig({"D": head_dim, "ORDER": order, "WARPS": _COMBINE_WARPS}, WARP * _COMBINE_WARPS)


def prefill_attention(keys: Layout, values: Layout, group: int) -> tuple[LaunchConfig, int]:
    """For `group` query heads to a KV head; rows of scores of a block."""
    shape = keys.record.geometry
    quantized = table_bytes(keys, values) > 0 or keys.mean_bits > 0
    wide = shape.padded <= (64 if quantized else 128)
    queries = 128 * shape.padded * 2 if wide and shape.padded > 64 else 0
    shared = table_bytes(keys, values) + 2 * shape.tiles * _TILE_BYTES + queries
    warps, rows = (4, 32) if wide else (8, 16)
    return LaunchConfig({"GROUP": group, "WARPS": warps, "WARP_ROWS": rows}, 32 * warps, shared), warps * rows


def encode_blocks(keys: Layout, values: Layout) -> LaunchConfig:
    """For both sides. ValueError where a block does not fit."""
    size = keys.record.geometry.block_size
    tokens = 64 if size % 64 == 0 else size
    while max(shared := [_encode_bytes(side, tokens) for side in (keys, values)]) > SHARED_BYTES:
        if tokens % 64 and tokens != 32:  # a part of a block has 16 tokens, or a multiple of 32
            raise ValueError(f"On a GPU blocks of {size} tokens are too large for this head dimension: choose 64.")
        tokens //= 2
    defines = {"WARPS": _ENCODE_WARPS, "TOKENS": tokens, **ROUNDING}
    return LaunchConfig(defines, WARP * _ENCODE_WARPS, max(shared))


def _encode_bytes(side: Layout, tokens: int) -> int:
    """RounderMemory::BYTES of `cuda/encode/encode_blocks.cu`, with so many tokens at once."""
    size, dim = side.record.geometry.block_size, side.record.geometry.head_dim
    constants, mean = side.record.constants, 4 * dim * (side.mean_bits > 0)
    if "POINTS" not in constants:
        return 4 * dim * size + mean
    points, width, chunks = constants["POINTS"], constants["WIDTH"], _ENCODE_WARPS // -(-tokens // 32)
    floats = dim * (tokens + 4) + chunks * 7 * tokens + width * (2 * tokens + points) + 2 * size
    return 4 * floats + mean + 2 * dim // width * (size + tokens + 2)

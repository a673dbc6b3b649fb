"""Launch configurations of the larger kernels: DEFINES, threads and shared memory, as their heads require them.

Bytes of shared memory decide how much of it a block gets, so they are computed here. Kernels get them as SHARED and do
not compile where the size of their arrays differs.
"""

from __future__ import annotations

import itertools
from functools import cache

from polarlm.engine.backends.cuda.launch import MOST_THREADS, WARP, LaunchConfig, threads_for
from polarlm.engine.backends.ops import STEP_ROWS
from polarlm.engine.quantization import encode
from polarlm.engine.records import Layout, table_bytes

# Bytes of shared memory that a block can have on every supported GPU: compute capability 8.6, 8.9 and 12.0 have least.
SHARED_BYTES = 99 << 10

# The same of GPUs with more, such as A100 and H100. Blocks of latent vectors may need it while they are encoded.
_MORE_SHARED_BYTES = 163 << 10

# Most rows of gemv and gemv_packed. Each row costs gemv as many instructions as the first, while tensor cores compute
# eight rows for the price of one; and each of its many small blocks reads x from the L2 cache, which from three rows
# on, as predicted, takes longer than reading the weights. More rows than that are normalised and converted to the
# weights' type once, by `narrow`, instead of in every block.
GEMV_ROWS = 2

# Most rows of a block of gemm_wide. Steps are padded to a multiple of it plus one of a few numbers of rows.
SMALL_ROWS = 64

# Rows whose experts are computed at a time: of each of their pairs with an expert there are two results in memory.
EXPERT_ROWS = 2048

# Numbers of rows, besides 1 and prompts for cuBLASLt, so that each kernel of products is compiled for one of them
# and serves as many rows or fewer, down to the number before.
ROWS_WITH_KERNELS = (2, 8, 16, 32, 48, 64)

# Bytes of a packed matrix that are dequantized at a time for a product of many rows.
DEQUANTIZED_BYTES = 64 << 20

_TILE_BYTES = 512
SYSTEM_BYTES = 1024  # at the start of a block's shared memory; decode_attention relies on them
_ENCODE_WARPS = 12  # a CTA of encode_blocks has, at most: two of them fit a multiprocessor
_OUTPUTS = 4  # rows of weights per warp of gemv
_GEMV_WARPS = 16  # per multiprocessor: fewer have too few loads in flight
_GEMV_INPUTS = 256  # inputs that a warp of gemv loads at once
# Constants of the encoder, as in `engine.quantization.encode`.
LARGEST: dict[str, int | float | str] = {"LARGEST": encode.LARGEST}
_NORMS: dict[str, int | float | str] = {
    "TILT_LOW": encode.TILT_RANGE[0],
    "TILT_HIGH": encode.TILT_RANGE[1],
    "NORM_FACTORS": ", ".join(f"{factor}f" for factor in encode.NORM_FACTORS),
}
LATENT_COLUMNS = 16  # rows of scores of a CTA of latent_attention
_LATENT_WARPS = 9  # at most; 36 steps of channels are four for each
_MOST_SPLITS = 32  # of a sequence, by CTAs of latent_attention
DECODE_HEADS = 8  # query heads, times rows, of a cell of decode_attention: at most


@cache
def row_threads(rows: int, work: int) -> int:
    """Threads for `work` of one row: of few rows, which leave most of the machine idle, as many as a block may have."""
    return threads_for(work, MOST_THREADS if rows <= SMALL_ROWS else 256)


@cache
def gemv(rows: int, out: int, width: int, processors: int) -> tuple[LaunchConfig, int]:
    """The launch for x (rows ≤ GEMV_ROWS, width) and weights (out, width) → configuration, blocks."""
    split = 1  # warps that share an output; doubled until every multiprocessor has enough loads in flight
    while split < 8 and out * split < _OUTPUTS * _GEMV_WARPS * processors and width >= 2 * _GEMV_INPUTS * split:
        split *= 2
    return LaunchConfig({"ROWS": 1 << (rows - 1).bit_length(), "SPLIT": split}, 256), -(-out * split // (_OUTPUTS * 8))


@cache
def step_rows(most: int) -> int:
    """The define STEP_ROWS for a step with at most `most` rows of a sequence: 1 or the limit."""
    return 1 if most == 1 else STEP_ROWS


@cache
def decode_cells(group: int, most: int = 1) -> tuple[int, int]:
    """Cells of a KV head in decode_attention, for `group` query heads per KV head and at most `most` rows of a
    sequence; and columns of a cell."""
    chunks = -(-group * most // DECODE_HEADS)
    return chunks, DECODE_HEADS if step_rows(most) > 1 else -(-group // chunks)


@cache
def decode_attention(
    keys: Layout, values: Layout, group: int, most: int = 1, sequences: int = 1, order: int = 1
) -> LaunchConfig:
    """The launch for `group` query heads per KV head and at most `most` rows of a sequence. order: of the Hadamard
    matrix in the rotation back."""
    return decode_attention_by(_decode_warps(keys, values, most), keys, values, group, most, sequences, order)


def _decode_warps(keys: Layout, values: Layout, most: int) -> int:
    """Warps of a block of decode_attention: fewer where they need more registers."""
    full = [not side.is_quantized for side in (keys, values)]
    mixes_codes = any(full) and not (all(full) and keys.mean_bits == 0)
    constants = [side.record.constants for side in (keys, values)]
    by_groups = all(table.get("BITS") == 16 for table in constants)  # loaded as those before them are decoded
    words = 0 if by_groups else sum(table.get("WORDS", 0) for table in constants)  # registers that codes take
    padded = keys.record.geometry.padded
    many = 63 if padded <= 64 else 64  # small heads: more tokens of a part have scores
    return 8 if padded > 128 or words > many or mixes_codes or step_rows(most) > 1 else 12


def decode_attention_by(
    warps: int, keys: Layout, values: Layout, group: int, most: int, sequences: int, order: int
) -> LaunchConfig:
    """`decode_attention` with `warps` warps per block."""
    columns, padded = decode_cells(group, most)[1], keys.record.geometry.padded
    means = 512 * warps if keys.mean_bits else 0
    shared = max(table_bytes(keys, values) + means, warps * columns * (padded + 6) * 4)
    defines = {"GROUP": group, "WARPS": warps, "STEP_ROWS": step_rows(most), "ORDER": order, "SHARED": shared}
    return LaunchConfig(defines, 32 * warps, shared + 4 * (2 * sequences + 7 * warps + 2) + SYSTEM_BYTES)


@cache
def prefill_attention(keys: Layout, values: Layout, group: int) -> tuple[LaunchConfig, int]:
    """The launch for `group` query heads per KV head → configuration, rows of scores of a block."""
    quantized = table_bytes(keys, values) > 0 or keys.mean_bits > 0
    wide = keys.record.geometry.padded <= (64 if quantized else 128)
    return prefill_blocks(*(4, 32) if wide else (8, 16), keys, values, group)


def prefill_blocks(warps: int, rows: int, keys: Layout, values: Layout, group: int) -> tuple[LaunchConfig, int]:
    """`prefill_attention` with `warps` warps per block, each with `rows` rows of scores."""
    geometry = keys.record.geometry
    queries = 2 * warps * rows * geometry.padded if rows > 16 and geometry.padded > 64 else 0
    shared = table_bytes(keys, values) + 2 * geometry.tiles * _TILE_BYTES + queries
    defines = {"GROUP": group, "WARPS": warps, "WARP_ROWS": rows, "SHARED": shared}
    return LaunchConfig(defines, 32 * warps, shared), warps * rows


@cache
def latent_attention(keys: Layout, heads: int) -> LaunchConfig:
    """The launch for `heads` query heads, whose values are keys."""
    geometry, tiles = keys.record.geometry, LATENT_COLUMNS // 8
    steps, row_tiles = geometry.padded // 16, geometry.part // 16
    warps = max(count for count in range(1, _LATENT_WARPS + 1) if steps % count == 0)
    scores = 512 * warps * row_tiles * tiles
    shared = table_bytes(keys, keys) + scores + 256 * tiles * row_tiles + 12 * LATENT_COLUMNS
    return LaunchConfig({"GROUP": heads, "WARPS": warps, "SHARED": shared}, WARP * warps, shared)


@cache
def latent_splits(sequences: int, heads: int, processors: int, most: int = 1) -> int:
    """Into how many splits latent_attention cuts sequences of a step with at most `most` rows each. It is recorded,
    and must not depend on lengths."""
    return max(1, min(_MOST_SPLITS, processors // (sequences * -(-heads * most // LATENT_COLUMNS))))


@cache
def encode_blocks(keys: Layout, values: Layout) -> LaunchConfig:
    """The launch of encode_blocks. Raises ValueError where a block does not fit into shared memory."""
    size = keys.record.geometry.block_size
    for room in _rooms(keys):
        tokens = 64 if size % 64 == 0 else size
        while True:
            # Parts of blocks need a few more registers than a multiprocessor has for 24 warps.
            warps = _ENCODE_WARPS - 2 * (tokens < size)
            shared = max(encode_bytes(side, tokens) for side in (keys, values))
            if shared <= room:
                defines = {"WARPS": warps, "TOKENS": tokens, "SHARED": shared, **LARGEST}
                return LaunchConfig(defines, WARP * warps, shared)
            if tokens % 64 and tokens != 32:  # a part of a block has 16 tokens or a multiple of 32
                break
            tokens //= 2
    raise _too_large(size)


@cache
def encode_rows(side: Layout, is_tilted: bool) -> LaunchConfig | None:
    """The launch of encode_rows for keys or values; None for a codec that it does not take. is_tilted: whether norms
    are tilted, and the best of several is kept. Raises ValueError as `encode_blocks`."""
    constants, dim, size = side.record.constants, side.record.geometry.head_dim, side.record.geometry.block_size
    if not side.record.takes_metric:
        return None
    points, width = constants["POINTS"], constants["WIDTH"]
    numbers = 1 + len(encode.norm_factors(is_tilted))  # a token's rows: not rounded, and with each norm
    name = "Value" if side.record.geometry.values else "Key"
    for room, tokens in itertools.product(_rooms(side), (64, 32, 16)):
        rows = -(-tokens * numbers // WARP) * WARP
        row_code_bytes = rows * dim // width * (1 if points <= 256 else 2)
        floats = 20 * tokens + points * width + 2 * rows + dim + 3 * size + -(-numbers // 4) * 4
        shared = 4 * floats + max(4 * dim * (tokens + 4), row_code_bytes) + 2 * size * dim // width
        if size % tokens == 0 and shared <= room:
            sides = {"SIDE": f"{name}Layout", "CODEC": f"{name}Codec", "FULL": f"Full{name}Layout"}
            defines = {"WARPS": rows // WARP, "TOKENS": tokens, "TILTED": int(is_tilted), "SHARED": shared}
            return LaunchConfig({**defines, **sides, **LARGEST, **_NORMS}, rows, shared)
    raise _too_large(size)


def _rooms(side: Layout) -> tuple[int, ...]:
    """Bytes of shared memory that a launch which encodes may take, the least first."""
    return (SHARED_BYTES, _MORE_SHARED_BYTES) if side.is_latent else (SHARED_BYTES,)


def _too_large(block_size: int) -> ValueError:
    return ValueError(f"On a GPU blocks of {block_size} tokens are too large for this head dimension: choose 64.")


def encode_bytes(side: Layout, tokens: int) -> int:
    """`shared_bytes` of `cuda/encode/encode_blocks.cu` for `tokens` tokens at once."""
    size, dim = side.record.geometry.block_size, side.record.geometry.head_dim
    constants = side.record.constants
    if not side.is_quantized:
        return 0
    if "POINTS" not in constants:
        return 4 * dim * (size + 1)
    points, width = constants["POINTS"], constants["WIDTH"]
    floats = dim * (tokens + 4) + width * points + dim + size
    code_bytes = 1 if width == 1 and points <= 256 else 2
    return 4 * floats + code_bytes * dim // width * (size + tokens + 2)

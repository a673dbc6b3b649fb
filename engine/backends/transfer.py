"""Quantized blocks on the host, in the representations of the backends, and the conversion between them.

Arrays of B blocks of K KV heads, each (B, K, *shape):

    FIELDS   the codecs' fields: "k.<field>", "v.<field>", and "mean.<field>" of the block means of keys
    TILES    "k.tiles" and "v.tiles", as compiled kernels of a CPU read them, and the fields of the means; for a layer
             that these kernels do not read, FIELDS
    RECORDS  "keys" and "values", as a GPU reads them

Tiles and records are bytes. They contain a field's floating-point numbers unchanged and aligned to their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from polarlm.engine import records
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.codecs import FieldSpec
from polarlm.engine.codecs.schema.arrays import HALF_MAX
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.quantization.encode import decode_centred
from polarlm.engine.records import Layout

if TYPE_CHECKING:
    from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles

Arrays = Mapping[str, np.ndarray]

FIELDS = "fields"
TILES = "tiles 2"  # includes the version of the layout, since sessions and tiers store tiles
RECORDS = f"records {records.VERSION}"
REPRESENTATIONS = FIELDS, TILES, RECORDS

_BYTES = np.dtype(np.uint8)
_NAMES = {"k": "keys", "v": "values"}  # of the records of each side


def fields(format: CacheFormat) -> dict[str, dict[str, FieldSpec]]:
    """The fields of one quantized block of one KV head: of keys ("k"), values ("v") and means ("mean")."""
    n, d = format.block_size, format.head_dim
    specs = mean_fields(format.mean_bits, d) if format.mean_bits else {}
    means = {name: FieldSpec(*spec) for name, spec in specs.items()}
    v = {} if format.codec_v is None else format.codec_v.fields(n, d)
    return {"k": format.codec_k.fields(n, d), "v": v, "mean": means}


def tiles(format: CacheFormat) -> tuple[KeyTiles, ValueTiles] | tuple[KeyTiles] | None:
    """The tiles of keys and, if they are stored, of values; None if no compiled kernel reads them. Raises ValueError
    without llvmlite."""
    try:
        from polarlm.engine.backends.native import codecs
    except ImportError as error:
        raise ValueError(f"tiles of a CPU cannot be read here: {error}") from None
    both = codecs.tiles(format)
    return None if isinstance(both, str) else both


def layouts(format: CacheFormat) -> tuple[Layout, Layout]:
    """The record layouts of keys and of values, which may be keys. Raises ValueError if no CUDA kernel reads them."""
    n, d = format.block_size, format.head_dim
    keys = records.layout(format.codec_k, False, n, d, format.mean_bits, is_latent=format.codec_v is None)
    return keys, keys if format.codec_v is None else records.layout(format.codec_v, True, n, d)


def block_arrays(format: CacheFormat, stored_as: str) -> dict[str, FieldSpec]:
    """The arrays of one block of one KV head. Raises ValueError for a representation that this format does not have."""
    if stored_as == RECORDS:
        return {
            _NAMES[side]: FieldSpec((layout.nbytes,), _BYTES)
            for side, layout in zip(format.sides, layouts(format), strict=False)
        }
    if stored_as not in REPRESENTATIONS:
        raise ValueError(f"blocks as {stored_as} belong to another version")
    sides = fields(format)
    if stored_as == TILES and (both := tiles(format)) is not None:
        sides |= {side: {"tiles": FieldSpec((x.nbytes,), _BYTES)} for side, x in zip(format.sides, both, strict=True)}
    return {f"{side}.{name}": field for side, fields in sides.items() for name, field in fields.items()}


def nbytes(format: CacheFormat, stored_as: str) -> int:
    """Bytes of one block, all KV heads, keys and values."""
    return format.kv_heads * sum(field.nbytes for field in block_arrays(format, stored_as).values())


def convert_blocks(format: CacheFormat, blocks: int, arrays: Arrays, stored_as: str) -> dict[str, np.ndarray]:
    """`blocks` blocks in any representation, converted to `stored_as`. Raises ValueError for other arrays."""
    representation = RECORDS if "keys" in arrays else TILES if "k.tiles" in arrays else FIELDS
    checked = {
        name: _check(arrays, name, (blocks, format.kv_heads, *field.shape), field.dtype)
        for name, field in block_arrays(format, representation).items()
    }
    if block_arrays(format, stored_as).keys() == checked.keys():
        return checked
    sides = _to_fields(format, checked)
    if stored_as == RECORDS:
        records_of, means = zip(format.sides, layouts(format), strict=False), {"k": sides["mean"]}
        return {_NAMES[side]: layout.pack(sides[side], means.get(side)) for side, layout in records_of}
    if stored_as == TILES and (both := tiles(format)) is not None:
        sides |= {side: {"tiles": own.pack(sides[side])} for side, own in zip(format.sides, both, strict=True)}
    return {f"{side}.{name}": array for side, arrays in sides.items() for name, array in arrays.items()}


def _to_fields(format: CacheFormat, arrays: Arrays) -> dict[str, dict[str, np.ndarray]]:
    """Checked arrays of any representation → the fields of "k", "v" and "mean"."""
    if "keys" in arrays:
        records_of = zip(format.sides, layouts(format), strict=False)
        (k, mean), *more = (layout.unpack(arrays[_NAMES[side]]) for side, layout in records_of)
        return {"k": k, "v": more[0][0] if more else {}, "mean": mean}
    sides = {
        side: {name.removeprefix(f"{side}."): x for name, x in arrays.items() if name.startswith(f"{side}.")}
        for side in ("k", "v", "mean")
    }
    if "k.tiles" in arrays and (both := tiles(format)) is not None:
        sides |= {side: own.unpack(arrays[f"{side}.tiles"]) for side, own in zip(format.sides, both, strict=True)}
    return sides


def decode_block(format: CacheFormat, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of one block in any representation, as slots have them: (K, 1, N, D) float16. Raises ValueError
    for other arrays."""
    sides = _to_fields(format, convert_blocks(format, 1, arrays, FIELDS))
    k, v, mean = ({name: x.swapaxes(0, 1) for name, x in sides[side].items()} for side in ("k", "v", "mean"))
    keys = decode_centred(format.codec_k, k, mean)
    values = keys if format.codec_v is None else format.codec_v.decode(v)
    return round_to(keys, np.dtype(np.float16)), round_to(values, np.dtype(np.float16))


@cache
def exponents(format: CacheFormat, stored_as: str) -> dict[str, np.ndarray]:
    """For each array of a block a mask of its exponent bits, uint8 (bytes,): a floating-point number has all of them
    set only if it is not finite. format: one without metrics."""
    zeros = {
        name: np.zeros((1, format.kv_heads, *field.shape), field.dtype)
        for name, field in block_arrays(format, FIELDS).items()
    }
    infinite = {name: np.full_like(x, np.inf) if x.dtype.kind == "f" else x for name, x in zeros.items()}
    two = convert_blocks(format, 1, zeros, stored_as), convert_blocks(format, 1, infinite, stored_as)
    return {name: _bytes(array) ^ _bytes(two[1][name]) for name, array in two[0].items()}


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def round_to(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x as it is stored in `dtype`: in float16 rounded to nearest and clipped to ±65504, as on a GPU.

    Numbers that are not finite become NaN, which the checks of logits and codecs find.
    """
    if dtype in (np.float32, x.dtype):
        return x
    halves = np.clip(x, -HALF_MAX, HALF_MAX).astype(dtype)
    halves[~np.isfinite(x)] = np.nan
    return halves


def slot_halves(format: CacheFormat, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k and v (K, tokens, D) as a slot stores them, float16. Raises ValueError if a block cannot hold them."""
    tokens = k.shape[1] if k.ndim == 3 else 0
    fits = 0 < tokens <= format.block_size and k.shape == v.shape == (format.kv_heads, tokens, format.head_dim)
    if not fits or {k.dtype, v.dtype} - {np.dtype(np.float16), np.dtype(np.float32)}:
        raise ValueError(f"{k.dtype} {k.shape} and {v.dtype} {v.shape} are not K/V of a block")
    half = np.dtype(np.float16)
    return round_to(k, half), round_to(v, half)


def _check(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != dtype:
        actual = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise ValueError(f"{name} is {actual}, and not {dtype} {shape}")
    return array

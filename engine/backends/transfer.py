"""Quantized blocks on the host, as fields of their codecs or as records of a GPU, and the conversion between both.

B blocks of K KV heads. Fields are arrays (K, B, *shape) under the names "k.<field>", "v.<field>" and "mean.<field>";
records are "keys" and "values", uint8 (B, K, bytes).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from polarlm.engine import records
from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.codecs import Field
from polarlm.engine.quantization.conditioning import mean_fields
from polarlm.engine.records import Layout

Arrays = Mapping[str, np.ndarray]

FIELDS = "fields"
RECORDS = f"records {records.VERSION}"


def fields(format: CacheFormat) -> dict[str, dict[str, Field]]:
    """The arrays of one quantized block of one KV head: of keys ("k"), values ("v") and means ("mean")."""
    n, d = format.block_size, format.head_dim
    means = {name: Field(*spec) for name, spec in mean_fields(format.mean_bits, d).items()} if format.mean_bits else {}
    return {"k": format.codec_k.fields(n, d), "v": format.codec_v.fields(n, d), "mean": means}


def layouts(format: CacheFormat) -> tuple[Layout, Layout]:
    """The record layouts of keys and of values. Raises ValueError where no kernel reads them."""
    n, d = format.block_size, format.head_dim
    return records.layout(format.codec_k, False, n, d, format.mean_bits), records.layout(format.codec_v, True, n, d)


def as_fields(format: CacheFormat, blocks: int, arrays: Arrays) -> dict[str, np.ndarray]:
    """`blocks` blocks, given as fields or records, as fields. Raises ValueError if the arrays are not such blocks."""
    if "keys" not in arrays:
        return _checked_fields(format, blocks, arrays)
    keys, values = (
        layout.unpack(pool) for layout, pool in zip(layouts(format), as_records(format, blocks, arrays), strict=True)
    )
    sides = {"k": keys[0], "v": values[0], "mean": keys[1]}
    return {f"{side}.{name}": x.swapaxes(0, 1) for side, arrays in sides.items() for name, x in arrays.items()}


def as_records(format: CacheFormat, blocks: int, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """`blocks` blocks, given as fields or records, as records. Raises ValueError if the arrays are not such blocks."""
    keys, values = layouts(format)
    if "keys" in arrays:
        k, v = (
            _checked(arrays, name, (blocks, format.kv_heads, layout.nbytes), np.dtype(np.uint8))
            for name, layout in (("keys", keys), ("values", values))
        )
        return k, v
    given = _checked_fields(format, blocks, arrays)
    k_fields, v_fields, mean = (
        {name: given[f"{side}.{name}"].swapaxes(0, 1) for name in names} for side, names in fields(format).items()
    )
    return keys.pack(k_fields, mean), values.pack(v_fields)


def full_tokens(format: CacheFormat, k: np.ndarray, v: np.ndarray) -> int:
    """The number of tokens of k and v (K, tokens, D). Raises ValueError where a block cannot hold them."""
    tokens = k.shape[1] if k.ndim == 3 else 0
    fits = 0 < tokens <= format.block_size and k.shape == v.shape == (format.kv_heads, tokens, format.head_dim)
    if not fits or {k.dtype, v.dtype} - {np.dtype(np.float16), np.dtype(np.float32)}:
        raise ValueError(f"{k.dtype} {k.shape} and {v.dtype} {v.shape} are not K/V of a block")
    return tokens


def _checked_fields(format: CacheFormat, blocks: int, arrays: Arrays) -> dict[str, np.ndarray]:
    return {
        f"{side}.{name}": _checked(arrays, f"{side}.{name}", (format.kv_heads, blocks, *field.shape), field.dtype)
        for side, fields_of_side in fields(format).items()
        for name, field in fields_of_side.items()
    }


def _checked(arrays: Arrays, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = arrays.get(name)
    if array is None or array.shape != shape or array.dtype != dtype:
        found = "nothing" if array is None else f"{array.dtype} {array.shape}"
        raise ValueError(f"{name} is {found}, and not {dtype} {shape}")
    return array

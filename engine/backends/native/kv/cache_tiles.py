"""Which layers have tiles of quantized blocks, over which compiled kernels attend."""

from __future__ import annotations

from polarlm.engine.backends.kv import CacheFormat
from polarlm.engine.backends.native import codecs
from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.kernels.attention.unit import supports


def tiles(format: CacheFormat) -> tuple[KeyTiles, ValueTiles] | str:
    """The tiles of a layer's keys and values, or the reason why no kernel attends over them."""
    n, dim = format.block_size, format.head_dim
    if n % 16:
        return f"kernels read blocks of a multiple of 16 tokens, not of {n}"
    if dim % 8:
        return f"kernels read heads of a multiple of 8 channels, not of {dim}"
    if not supports(dim):
        return f"kernels have no room for heads of {dim} channels"
    k, v = codecs.keys(format.codec_k, n, dim), codecs.values(format.codec_v, n, dim)
    if k is None or v is None:
        lacking = [codec.name for codec, side in ((format.codec_k, k), (format.codec_v, v)) if side is None]
        return f"no kernel reads {' and '.join(dict.fromkeys(lacking))}"
    return k, v

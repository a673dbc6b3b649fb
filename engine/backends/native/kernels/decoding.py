"""Quantized blocks as float32, for prompts that read earlier turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from polarlm.engine.backends.native.codecs import DecodedTiles, KeyTiles, ValueTiles
from polarlm.engine.backends.native.kernels.rotation import pieces
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.values import F32, I8, I16, I32, I64, Value, vector


@dataclass(frozen=True)
class Decoding:
    """The properties that a kernel is specialized for. mean_bits: of the block means of keys, 0 for none."""

    keys: KeyTiles
    values: ValueTiles
    mean_bits: int
    block_size: int
    head_dim: int

    @property
    def name(self) -> str:
        sizes = f"{self.block_size}x{self.head_dim}"
        return f"decode_{self.keys.name}_{self.values.name}_mean{self.mean_bits}_{sizes}"


def decodes(keys: KeyTiles, values: ValueTiles) -> bool:
    """Whether there is a kernel for these tiles."""
    return isinstance(keys, DecodedTiles) and isinstance(values, DecodedTiles)


@cache
def decode(spec: Decoding) -> Kernel:
    """Blocks `ids` (count,) int64 → k, v (K, count, N, D) float32, keys with their means; unit by KV head and block.

    keys, values: tiles (K, blocks), key_stride and value_stride bytes from head to head. mean, mean_scale
    (K, blocks, …): the block means.
    """
    n, dim = spec.block_size, spec.head_dim
    nbytes = 4 * n * dim

    def emit(e: Emitter, *args: Value, begin: Value, end: Value, scratch: Value) -> None:
        keys, values, mean, mean_scale, ids, k, v, blocks, count, key_stride, value_stride = args
        assert isinstance(spec.keys, DecodedTiles)
        assert isinstance(spec.values, DecodedTiles)
        with e.loop(begin, end) as unit:
            head, block = unit // count, e.load(ids + unit % count * 8, I64)
            key, value = k + unit * nbytes, v + unit * nbytes
            spec.keys.emit_decode(e, keys + (head * key_stride + block * spec.keys.nbytes), key, scratch)
            if spec.mean_bits:
                own = head * blocks + block
                _mean(e, spec, mean + own * (dim * spec.mean_bits // 8), mean_scale + own * 2, scratch)
                with e.loop(0, n) as token:
                    row = key + token * (4 * dim)
                    for first, lanes in pieces(dim):
                        kind = vector(F32, lanes)
                        e.store(e.load(row, kind, 4 * first) + e.load(scratch, kind, 4 * first), row, 4 * first)
            spec.values.emit_decode(e, values + (head * value_stride + block * spec.values.nbytes), value, scratch)

    pointers = "keys", "values", "mean", "mean_scale", "ids", "k", "v"
    return Kernel(spec.name, emit, pointers, ("blocks", "count", "key_stride", "value_stride"), scratch=nbytes)


def _mean(e: Emitter, spec: Decoding, mean: Value, scale: Value, out: Value) -> None:
    """The mean of a block → out (D,) float32."""
    factor = e.half_to_float(e.load(scale, I16)) if spec.mean_bits == 8 else None
    for first, lanes in pieces(spec.head_dim):
        if factor is not None:
            value = e.load(mean, vector(I8, lanes), first).sext(I32).to_float() * factor
        else:
            value = e.half_to_float(e.load(mean, vector(I16, lanes), 2 * first))
        e.store(value, out, 4 * first)

"""Decoding of quantized blocks to float32, for prompts that read earlier turns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from polarlm.engine.backends.native.codecs import KeyTiles, ValueTiles
from polarlm.engine.backends.native.kernels.multiply import pieces
from polarlm.engine.jit.compile.compiler import Kernel
from polarlm.engine.jit.lang.emit import Emitter
from polarlm.engine.jit.lang.records import Int64, Pointer
from polarlm.engine.jit.lang.values import F32, I8, I16, I32, I64, Value, vector


@dataclass(frozen=True)
class Decoding:
    """The properties that a kernel is specialized for. mean_bits: bits of the block means of keys, 0 for none."""

    keys: KeyTiles
    values: ValueTiles
    mean_bits: int
    block_size: int
    head_dim: int

    @property
    def name(self) -> str:
        sizes = f"{self.block_size}x{self.head_dim}"
        return f"decode_{self.keys.name}_{self.values.name}_mean{self.mean_bits}_{sizes}"


class DecodeArguments(NamedTuple):
    """Arguments of `decode`."""

    keys: Pointer
    values: Pointer
    mean: Pointer
    mean_scale: Pointer
    ids: Pointer
    k: Pointer
    v: Pointer
    blocks: Int64
    count: Int64
    key_stride: Int64
    value_stride: Int64
    key_bytes: Int64
    value_bytes: Int64


@cache
def decode(spec: Decoding) -> Kernel[DecodeArguments]:
    """Blocks `ids` (count,) int64 → k, v (K, count, N, D) float32, keys with block means; one unit per KV head, block.

    keys, values: tiles (K, blocks), key_stride and value_stride bytes from head to head, key_bytes and
    value_bytes from block to block. mean, mean_scale (K, blocks, …): the block means.
    """
    n, dim = spec.block_size, spec.head_dim
    nbytes = 4 * n * dim

    def emit(e: Emitter, args: DecodeArguments, begin: Value, end: Value, scratch: Value) -> None:
        with e.loop(begin, end) as unit:
            head, block = unit // args.count, e.load(args.ids + unit % args.count * 8, I64)
            key, value = args.k + unit * nbytes, args.v + unit * nbytes
            tile = args.keys + (head * args.key_stride + block * args.key_bytes)
            spec.keys.emit_decode(e, tile, key, scratch)
            if spec.mean_bits:
                own = head * args.blocks + block
                mean = args.mean + own * (dim * spec.mean_bits // 8)
                _mean(e, spec, mean, args.mean_scale + own * 2, scratch)
                with e.loop(0, n) as token:
                    row = key + token * (4 * dim)
                    for first, lanes in pieces(dim):
                        kind = vector(F32, lanes)
                        e.store(e.load(row, kind, 4 * first) + e.load(scratch, kind, 4 * first), row, 4 * first)
            tile = args.values + (head * args.value_stride + block * args.value_bytes)
            spec.values.emit_decode(e, tile, value, scratch)

    return Kernel(spec.name, emit, DecodeArguments, scratch=nbytes)


def _mean(e: Emitter, spec: Decoding, mean: Value, scale: Value, out: Value) -> None:
    """The mean of a block → out (D,) float32."""
    factor = e.half_to_float(e.load(scale, I16)) if spec.mean_bits == 8 else None
    for first, lanes in pieces(spec.head_dim):
        if factor is not None:
            value = e.load(mean, vector(I8, lanes), first).sext(I32).to_float() * factor
        else:
            value = e.half_to_float(e.load(mean, vector(I16, lanes), 2 * first))
        e.store(value, out, 4 * first)

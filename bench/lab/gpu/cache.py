"""Caches of random K/V on a device, and the error of attention over them.

Letters: K KV heads, G query heads per KV head, N tokens in a block, D head dim. The device encodes a few random blocks,
whose records are repeated through the pools: block i of a pool is random block i % `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polarlm.bench.lab.gpu.setup import DeviceClock
from polarlm.engine import codecs
from polarlm.engine.backends.cuda.device import Array, Device
from polarlm.engine.backends.kv import FilledBlocks, KVLocation, SpanView
from polarlm.engine.backends.ops import Ops
from polarlm.engine.quantization.conditioning import read_mean

# Attention rounds q, k, v and attention weights to half precision, each by at most 2⁻¹¹ of its value: all together far
# less than eight such roundings of the largest output.
ALLOWED_ERROR = 2.0**-8


@dataclass(frozen=True)
class Content:
    """Random keys and values, (blocks · N, K, D) float32 each."""

    k: np.ndarray
    v: np.ndarray

    @classmethod
    def random(cls, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> Content:
        rng = np.random.default_rng(1)
        shape = blocks * block_size, kv_heads, head_dim
        return cls(rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32))


def fill(ops: Ops, clock: DeviceClock, cache: Any, content: Content) -> None:
    """Fill the quantized and the full-precision pools of one layer's cache with `content`."""
    n, rows = cache.format.block_size, len(content.k)
    buffer, blocks = ops.buffer(cache.format, rows), rows // n
    span = SpanView(slice(0, rows), 0, KVLocation(buffer, 0), 0, None, (), n)
    ops.append_kv(cache, ops.spans([span], n), ops.to_device(content.k), ops.to_device(content.v))
    if numbers := range(min(blocks, len(cache.keys.quantized))):
        ops.encode_blocks([FilledBlocks([cache], numbers, [KVLocation(buffer, i) for i in numbers])])
        for pool in (cache.keys.quantized, cache.values.quantized):
            _repeat(clock, pool, len(numbers))
    for pool, source in zip(cache.full, cache.pools(buffer), strict=True):
        count = min(blocks, len(pool))
        clock.copy(pool[:count], source[:count])
        _repeat(clock, pool, count)


def _repeat(clock: DeviceClock, pool: Array, filled: int) -> None:
    """Repeat the first `filled` records of a pool to its end, doubling the copies."""
    while filled < len(pool):
        count = min(filled, len(pool) - filled)
        clock.copy(pool[filled : filled + count], pool[:count])
        filled += count


@dataclass(frozen=True)
class SequenceBlocks:
    """The blocks of a sequence of `context` tokens: ids of quantized ones, and slots of the sink block and the newest
    ones."""

    context: int
    quantized: Sequence[int]
    full: Sequence[int]

    def span(self, row: int, block_size: int) -> SpanView:
        """The span of a step in which row `row` is the last token of the context."""
        sink, first, *following = self.full
        start, place = (1 + len(self.quantized)) * block_size, KVLocation(None, first)
        rows, newest = slice(row, row + 1), self.context - 1
        return SpanView(rows, newest, place, start, sink, self.quantized, block_size, following)


def attention_error(
    device: Device, cache: Any, blocks: int, sequence: SequenceBlocks, head: int, q: Any, out: Any
) -> float:
    """The largest error of out (G, D), the attention output of q (G, D), divided by the largest correct value.

    The reference is float64 attention over the device's records of KV head `head`, decoded by NumPy. blocks: how many
    different ones a pool has.
    """
    k, v = (read_tokens(device, cache, side, blocks, sequence, head) for side in ("keys", "values"))
    scores = q.astype(np.float64) @ k.T * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    full = weights / weights.sum(-1, keepdims=True) @ v
    return float(np.abs(out - full).max() / np.abs(full).max())


def read_tokens(device: Device, cache: Any, side: str, blocks: int, sequence: SequenceBlocks, head: int) -> np.ndarray:
    """Keys or values (context, D) of one KV head of a sequence, float64."""
    number = ("keys", "values").index(side)
    parts = []
    for slot in sequence.full:
        fields, _ = cache.layouts[number].full.unpack(device.to_host(cache.full[number][slot])[head])
        parts.append(codecs.get(codecs.FULL).decode(fields).astype(np.float64))
    if sequence.quantized:
        fields, mean = cache.layouts[number].unpack(device.to_host(getattr(cache, side).quantized[:blocks, head]))
        codec = (cache.format.codec_k, cache.format.codec_v)[number]
        decoded = codec.decode(fields).astype(np.float64)
        if mean:
            decoded += read_mean(mean)[..., None, :]
        parts.insert(1, decoded[np.asarray(sequence.quantized) % len(decoded)].reshape(-1, decoded.shape[-1]))
    return np.concatenate(parts)[: sequence.context]

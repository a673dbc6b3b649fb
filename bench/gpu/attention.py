"""Attention of one token per sequence over caches of every type, and the encoding of blocks, on a GPU.

What is read lies in different places every time, so that nothing is found in the device's own caches: block tables
take turns, over as many blocks of a pool as it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.command import CacheType
from bench.gpu.cache import ALLOWED_ERROR, Content, Laid, attention_error, fill
from bench.gpu.setup import Gpu, Sizes
from engine import codecs
from engine.backends.cuda.device import Array
from engine.backends.cuda.ops import CudaOps
from engine.backends.ops import CacheFormat, Place
from engine.errors import EngineError
from engine.kv.plan import format_bytes
from engine.quantization.metric import Metric

_MEAN_BITS = 8
_MOST_TURNS = 256
_NOTHING = np.zeros(1, np.int32)  # a recording wants an input


@dataclass(frozen=True)
class AttentionTime:
    """Seconds of one call, attention and the sum of its parts; bytes that it reads; its error, see `gpu_cache`."""

    cache_type: str
    context: int
    batch: int
    seconds: float
    bytes: int
    error: float

    @property
    def right(self) -> bool:
        """Whether the result is what it should be; if not, the time says nothing about the kernel."""
        return self.error <= ALLOWED_ERROR  # NaN is not


@dataclass(frozen=True)
class EncodeTime:
    """Seconds of a block, keys and values of all KV heads, where so many are encoded at once."""

    cache_type: str
    blocks: int
    seconds: float


def layer_form(sizes: Sizes, cache_type: CacheType, metric_k: Metric | None, metric_v: Metric | None) -> CacheFormat:
    """A layer's cache, centred as the engine does it. Raises ValueError for a type that does not suit the shape."""
    k, v, config = codecs.get(cache_type.key), codecs.get(cache_type.value), sizes.config
    mean_bits = _MEAN_BITS if cache_type.key_conditioning and codecs.is_quantized(k) else 0
    return CacheFormat(k, v, metric_k, metric_v, mean_bits, sizes.block_size, config.kv_heads, config.head_dim)


def measure_attention(
    gpu: Gpu, sizes: Sizes, content: Content, cache_type: CacheType, context: int, batch: int
) -> AttentionTime:
    """Check, then time. Raises EngineError where there is no kernel or no room."""
    ops, device = gpu.open()
    format, config = layer_form(sizes, cache_type, None, None), sizes.config
    size, turns = _size_and_turns(ops, format, sizes, context, batch)
    cache = ops.cache(format, turns * batch * _quantized(format, context), turns * batch * 2)
    fill(ops, gpu.clock, cache, content)
    rng = np.random.default_rng(2)
    places = _places(rng, format, context, (turns, batch))
    n = format.block_size
    spans = [ops.spans([of.span(row, n) for row, of in enumerate(turn)], n) for turn in places]
    queries = rng.standard_normal((batch, config.heads, config.head_dim), np.float32)
    q, scale = ops.to_device(queries), config.head_dim**-0.5

    out = ops.to_host(ops.attention(q, cache, spans[0], scale, None))
    row, head, group = int(rng.integers(batch)), int(rng.integers(config.kv_heads)), config.heads // config.kv_heads
    mine = row, slice(head * group, (head + 1) * group)
    error = attention_error(device, cache, sizes.blocks, places[0][row], head, queries[mine], out[mine])

    def all_turns(_: Array) -> Array:
        for turn in spans:
            result = ops.attention(q, cache, turn, scale, None)
        return result

    seconds = gpu.clock.seconds(lambda: ops.run_graph("attention", all_turns, [_NOTHING]), sizes.runs)
    return AttentionTime(cache_type.label, context, batch, seconds / turns, size, error)


def _quantized(format: CacheFormat, context: int) -> int:
    """Coded blocks of a sequence, between its sink and its current block."""
    return (context - 1) // format.block_size - 1


def _size_and_turns(ops: CudaOps, format: CacheFormat, sizes: Sizes, context: int, batch: int) -> tuple[int, int]:
    """Bytes that a call reads; calls until any are read again. Raises EngineError where there is no kernel or room."""
    try:
        quantized_bytes, full_bytes = ops.cache_bytes(format)
    except ValueError as error:
        raise EngineError(str(error)) from None
    size, room = batch * (_quantized(format, context) * quantized_bytes + 2 * full_bytes), ops.room_beside(0)
    if size > room:
        raise EngineError(f"its {format_bytes(size)} do not fit into the {format_bytes(room)} that are free")
    return size, min(_MOST_TURNS, -(-sizes.rotated // size), room // size)


def _places(rng: np.random.Generator, format: CacheFormat, context: int, shape: tuple[int, int]) -> list[list[Laid]]:
    """Sequences (turns, B) whose blocks lie anywhere in the pools."""
    count, quantized = shape[0] * shape[1], _quantized(format, context)
    ids = rng.permutation(count * quantized).reshape(*shape, quantized).tolist()
    slots = rng.permutation(count * 2).reshape(*shape, 2).tolist()
    return [
        [Laid(context, sink, table, current) for (sink, current), table in zip(*of, strict=True)]
        for of in zip(slots, ids, strict=True)
    ]


def measure_encoding(
    gpu: Gpu, sizes: Sizes, content: Content, cache_type: CacheType, metric_k: Metric, metric_v: Metric
) -> list[EncodeTime]:
    """Many blocks at once, as a prompt has them, and one alone, as a step does."""
    ops, _ = gpu.open()
    blocks = sizes.blocks
    cache = ops.cache(layer_form(sizes, cache_type, metric_k, metric_v), blocks, blocks)
    fill(ops, gpu.clock, cache, content)

    def seconds(count: int) -> float:
        return gpu.clock.seconds(lambda: _encode(ops, cache, count), sizes.runs) / count

    return [EncodeTime(cache_type.label, count, seconds(count)) for count in dict.fromkeys((blocks, 1))]


def _encode(ops: CudaOps, cache: Any, count: int) -> None:
    ops.encode_blocks([cache], list(range(count)), [Place(None, i) for i in range(count)])

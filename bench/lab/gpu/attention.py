"""Attention of one token per sequence over caches of every type, and the encoding of blocks, on a GPU.

Successive calls read different blocks of a pool, by different block tables, so that the device's caches have no data of
theirs.
"""

from __future__ import annotations

import math

import numpy as np

from polarlm.bench.command import CacheType
from polarlm.bench.lab.gpu.cache import Content, SequenceBlocks, attention_error, fill
from polarlm.bench.lab.gpu.peer import attention_at
from polarlm.bench.lab.gpu.setup import Gpu, Sizes
from polarlm.bench.result import Result
from polarlm.engine import codecs
from polarlm.engine.backends.cuda.device import Array
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import AttentionRule, CacheFormat, FilledBlocks, KVLocation
from polarlm.engine.codecs import Codec
from polarlm.engine.config import format_bytes
from polarlm.engine.errors import EngineError
from polarlm.engine.quantization.metric import Metric, key_metric, value_metric
from polarlm.engine.quantization.statistics import output_second

ENCODING = "encoding"  # a subject
_MEAN_BITS = 8
_MOST_CALLS = 256
_SOME_BLOCKS = 7  # fewer than a GPU's processors, with 8 KV heads
_OUTPUT_ROWS = 512  # rows of the random output projection, for the metrics
_NOTHING = np.zeros(1, np.int32)  # a graph needs an input


def layer_format(sizes: Sizes, cache_type: CacheType, metric_k: Metric | None, metric_v: Metric | None) -> CacheFormat:
    """The format of a layer's cache, centred as in the engine. Raises ValueError for an unsupported shape."""
    k, v, attention = codecs.get(cache_type.key), codecs.get(cache_type.value), sizes.config.attention
    mean_bits = _MEAN_BITS if cache_type.key_conditioning and codecs.is_quantized(k) else 0
    return CacheFormat(k, v, metric_k, metric_v, mean_bits, sizes.block_size, attention.kv_heads, attention.head_dim)


def measure_attention(
    result: Result, gpu: Gpu, sizes: Sizes, content: Content, cache_type: CacheType, context: int, batch: int
) -> None:
    """Check the result, then measure the time: add the seconds of a call, the bytes that it reads, and its error: above
    `ALLOWED_ERROR` the time is meaningless. Raises EngineError if there is no kernel or too little memory."""
    ops, device = gpu.open()
    format, attention = layer_format(sizes, cache_type.codes, None, None), sizes.config.attention
    blocks = _blocks(format, context, cache_type.recent_blocks)
    size, calls = _size_and_calls(ops, format, sizes, blocks, batch)
    cache = ops.cache(format, calls * batch * blocks[0], calls * batch * blocks[1])
    fill(ops, gpu.clock, cache, content)
    rng = np.random.default_rng(2)
    places = _places(rng, context, blocks, (calls, batch))
    n = format.block_size
    spans = [ops.spans([sequence.span(row, n) for row, sequence in enumerate(call)], n) for call in places]
    queries = rng.standard_normal((batch, attention.heads, attention.head_dim), np.float32)
    q, scale = ops.to_device(queries), attention.head_dim**-0.5

    out = ops.to_host(ops.attention(q, cache, spans[0], AttentionRule(scale)))
    row, head, group = (
        int(rng.integers(batch)),
        int(rng.integers(attention.kv_heads)),
        attention.heads // attention.kv_heads,
    )
    mine = row, slice(head * group, (head + 1) * group)
    error = attention_error(device, cache, sizes.blocks, places[0][row], head, queries[mine], out[mine])

    def all_calls(_: Array) -> Array:
        for table in spans:
            result = ops.attention(q, cache, table, AttentionRule(scale))
        return result

    seconds = gpu.clock.seconds(lambda: ops.run_graph("attention", all_calls, [_NOTHING]), sizes.runs)
    figures = {"seconds": seconds / calls, "bytes": size, "error": error}
    result.add_all(attention_at(context, batch), cache_type.label, figures, context=context, batch=batch)


def _blocks(format: CacheFormat, context: int, newest: int) -> tuple[int, int]:
    """The number of quantized blocks of a sequence and of those in full precision: the sink block, the `newest`
    complete ones, and the current block."""
    complete = (context - 1) // format.block_size - 1
    newest = min(newest, complete)
    return complete - newest, newest + 2


def _size_and_calls(
    ops: CudaOps, format: CacheFormat, sizes: Sizes, blocks: tuple[int, int], batch: int
) -> tuple[int, int]:
    """Bytes that a call reads, and the number of calls before bytes are read again. blocks: of a sequence, quantized
    and in full precision. Raises EngineError without a kernel or enough memory."""
    try:
        quantized_bytes, full_bytes = ops.cache_bytes(format)
    except ValueError as error:
        raise EngineError(str(error)) from None
    size, room = batch * (blocks[0] * quantized_bytes + blocks[1] * full_bytes), ops.memory_left(0)
    if size > room:
        raise EngineError(f"its {format_bytes(size)} do not fit into the {format_bytes(room)} that are free")
    return size, min(_MOST_CALLS, -(-sizes.rotated // size), room // size)


def _places(
    rng: np.random.Generator, context: int, blocks: tuple[int, int], shape: tuple[int, int]
) -> list[list[SequenceBlocks]]:
    """Sequences (calls, B) with random blocks of the pools. blocks: of a sequence, quantized and in full precision."""
    ids, slots = (rng.permutation(math.prod(shape) * count).reshape(*shape, count).tolist() for count in blocks)
    calls, rows = map(range, shape)
    return [[SequenceBlocks(context, ids[call][row], slots[call][row]) for row in rows] for call in calls]


def measure_encoding(result: Result, gpu: Gpu, sizes: Sizes, content: Content, cache_type: CacheType) -> None:
    """Add the seconds of a block, keys and values of all KV heads, when many are encoded at once, as after a prompt, a
    few, and one, as after a step. Raises EngineError."""
    ops, _ = gpu.open()
    metrics = random_metrics(sizes, codecs.get(cache_type.key), codecs.get(cache_type.value))
    cache = ops.cache(layer_format(sizes, cache_type, *metrics), sizes.blocks, sizes.blocks)
    fill(ops, gpu.clock, cache, content)

    def seconds(count: int) -> float:
        filled = [FilledBlocks([cache], list(range(count)), [KVLocation(None, i) for i in range(count)])]
        return gpu.clock.seconds(lambda: ops.encode_blocks(filled), sizes.runs) / count

    for count in dict.fromkeys((sizes.blocks, min(_SOME_BLOCKS, sizes.blocks), 1)):
        result.add(f"{ENCODING} {count}", cache_type.pair, "seconds", value=seconds(count), blocks=count)


def random_metrics(sizes: Sizes, codec_k: Codec, codec_v: Codec) -> tuple[Metric, Metric]:
    """Random metrics, with which encoding takes as much work as with calibrated ones. Raises EngineError."""
    config, rng = sizes.config, np.random.default_rng(3)
    heads, dim = config.attention.kv_heads, config.attention.head_dim
    if codec_k.rounding is None or codec_v.rounding is None:
        raise EngineError(f"{codec_k.name} and {codec_v.name} do not round by a metric")
    queries = rng.standard_normal((heads, 4 * dim, dim), np.float32) + rng.standard_normal((heads, 1, dim), np.float32)
    second = queries.swapaxes(1, 2) @ queries / queries.shape[1]
    ones = np.ones((heads, dim), np.float32)
    k = key_metric(second, queries.mean(1), ones, codec_k.rotation(dim), codec_k.rounding)
    output = rng.standard_normal((_OUTPUT_ROWS, config.attention.heads * dim), np.float32)
    return k, value_metric(output_second(output, heads, dim), codec_v.rotation(dim), codec_v.rounding)

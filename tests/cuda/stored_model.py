"""A model of random weights on a GPU, whose store has random blocks of sequences: contexts without their prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polarlm.bench.lab.gpu.attention import random_metrics
from polarlm.bench.lab.gpu.cache import Content, fill
from polarlm.bench.lab.gpu.setup import Gpu, Sizes
from polarlm.bench.random_weights import RandomWeights
from polarlm.engine import EngineConfig
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.weights import load_weights, weight_bytes
from polarlm.engine.quantization.conditioning import Conditioning, Scale
from polarlm.engine.state import cache_types
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import StorePlan
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, SequenceKV

# Besides a sequence's blocks: those that steps fill, and the slot of a current block that has just been completed.
_SPARE_BLOCKS, _SLOTS = 2, 3


def random_model(gpu: Gpu, sizes: Sizes, kind: str, contexts: Sequence[int]) -> Transformer:
    """A model of one of `random_weights.KINDS`, whose store has the default cache type and room for these sequences."""
    (ops, _), config, n = gpu.open(), sizes.config, sizes.block_size
    source = RandomWeights.for_kind(config, kind)
    ops.memory_left(weight_bytes(ops, source))
    loaded, shape = load_weights(ops, config, source), _cache_shape(ops, sizes)
    quantized = sum(context // n + _SPARE_BLOCKS for context in contexts)
    plan = StorePlan(shape, quantized * n, (quantized,), _SLOTS * len(contexts))
    heads, dim, layers = config.attention.kv_heads, config.attention.head_dim, len(config.layers)
    k, v = shape.kv_layers[0].codec_k, shape.kv_layers[0].codec_v
    scale = Scale(np.ones((heads, dim), np.float32), np.ones(heads, np.float32))
    conditioning, metrics = Conditioning(k.rotation(dim), v.rotation(dim), scale), random_metrics(sizes, k, v)
    store = KVStore(ops, plan, [conditioning] * layers, [metrics] * layers)
    content = Content.random(sizes.blocks, n, heads, dim)
    for layer in range(layers):
        fill(ops, gpu.clock, store.cache(layer), content)
    return Transformer(ops, config, loaded, store)


def _cache_shape(ops: CudaOps, sizes: Sizes) -> CacheShape:
    config = sizes.config
    heads, dim = config.attention.kv_heads, config.attention.head_dim
    pairs = cache_types.layer_codecs(EngineConfig(), [dim] * len(config.layers))
    shape = CacheShape(sizes.block_size, tuple(LayerShape(k, v, heads, dim, mean_bits=8) for k, v in pairs))
    return replace(shape, stored={layer: ops.cache_bytes(shape.format(layer)) for layer in shape.kv_layers})


def stored_sequence(store: KVStore, length: int) -> SequenceKV:
    """A sequence of `length` tokens, a block's at least, with random blocks. Raises OutOfBlocks."""
    sequence = store.new_sequence()
    complete, rest = divmod(length, store.shape.block_size)
    sequence.length = length
    for group, table in zip(store.groups, sequence.tables, strict=True):
        (table.sink,) = group.full.allocate()
        table.quantized = group.quantized.allocate(complete - 1)
        table.current = group.full.allocate()[0] if rest else None
    return sequence

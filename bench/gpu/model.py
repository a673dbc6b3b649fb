"""A model of random weights on a GPU, whose store has sequences without a prefill.

A cell is a step to measure: the number of tokens of each of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from polarlm.bench.gpu.cache import Content, fill
from polarlm.bench.gpu.setup import Gpu, Sizes
from polarlm.bench.random_weights import RandomWeights
from polarlm.engine import EngineConfig
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.ops import Load
from polarlm.engine.codecs import Codec
from polarlm.engine.errors import EngineError
from polarlm.engine.model.forward import Transformer
from polarlm.engine.model.weights import load_weights, weight_bytes
from polarlm.engine.quantization.conditioning import Conditioning, Scale
from polarlm.engine.quantization.metric import Metric, key_metric, value_metric
from polarlm.engine.quantization.statistics import output_second
from polarlm.engine.state import cache_types
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import StorePlan
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore, SequenceKV

# Weights as results call them → a kind of `bench.random_weights`.
FORMATS = {"bf16": "bf16", "q4_k_m": "q4_k"}

_OUTPUT_ROWS = 512  # rows of the random output projection, for the metrics
_TOKEN_CORRELATION = 0.9  # correlation of a token's attention weight with the next token's

# Besides a sequence's blocks: the block that a measurement fills, and the slot of a current block that has just been
# completed.
_SPARE_BLOCKS = 2
_SLOTS = 3


Cell = tuple[int, ...]  # tokens of each sequence


class RandomModel:
    """Random weights, and a store of the default cache type with random records."""

    def __init__(
        self, gpu: Gpu, sizes: Sizes, content: Content, weights: str, cells: Sequence[Cell], overlapped: bool = False
    ):
        """weights: a key of FORMATS. cells: the store has room for each of them, one at a time; cells that do
        not fit are left out. overlapped: use overlapped launches.

        Raises EngineError or MemoryError if the weights do not fit.
        """
        opened = gpu.open_overlapping if overlapped else gpu.open
        assert opened is not None
        self.ops, self.device = opened()
        self.config = sizes.config
        self.weights = weights
        source = RandomWeights.of_kind(self.config, FORMATS[weights])
        self.ops.room_beside(weight_bytes(self.ops, source))
        loaded = load_weights(self.ops, self.config, source)
        shape = cache_shape(self.ops, sizes)
        needed = {cell: _room(shape, sizes, cell) for cell in cells}
        batch = max(map(len, cells), default=1)
        load = Load(self.config, shape.format(0), sizes.prompt, batch)
        room = self.ops.room_beside(0) - self.ops.work_bytes(load)
        self.fits = {cell: shape.bytes(*blocks) <= room for cell, blocks in needed.items()}
        held = [needed[cell] for cell in cells if self.fits[cell]] or [_room(shape, sizes, (sizes.prompt,))]
        quantized, slots = max(ids for (ids,), _ in held), max(slots for _, slots in held)
        plan = StorePlan(shape, quantized * sizes.block_size, (quantized,), slots)
        codec_k, codec_v = shape.kv_layers[0].codec_k, shape.kv_layers[0].codec_v
        dim, heads = self.config.attention.head_dim, self.config.attention.kv_heads
        scale = Scale(np.ones((heads, dim), np.float32), np.ones(heads, np.float32))
        conditioning = Conditioning(codec_k.rotation(dim), codec_v.rotation(dim), scale)
        metrics = random_metrics(sizes, codec_k, codec_v)
        store = KVStore(self.ops, plan, [conditioning] * len(self.config.layers), [metrics] * len(self.config.layers))
        for layer in range(len(self.config.layers)):
            fill(self.ops, gpu.clock, store.cache(layer), content)
        self.model = Transformer(self.ops, self.config, loaded, store)

    def stored_sequence(self, length: int) -> SequenceKV:
        """A sequence of `length` tokens with random blocks. Raises OutOfBlocks."""
        store = self.model.store
        sequence, n = store.new_sequence(), store.shape.block_size
        complete, rest = divmod(length, n)
        sequence.length = length
        for group, table in zip(store.groups, sequence.tables, strict=True):
            (table.sink,) = group.full.allocate()
            table.quantized = group.quantized.allocate(complete - 1)
            table.current = group.full.allocate()[0] if rest else None
        return sequence


def default_type() -> tuple[str, str]:
    """The default cache types of keys and of values."""
    (_, key), (_, value) = cache_types.chosen(EngineConfig())
    return key, value


def cache_shape(ops: CudaOps, sizes: Sizes) -> CacheShape:
    """The shape of the default cache."""
    config = sizes.config
    heads, dim = config.attention.kv_heads, config.attention.head_dim
    pairs = cache_types.layer_codecs(EngineConfig(), [dim] * len(config.layers))
    shape = CacheShape(sizes.block_size, tuple(LayerShape(k, v, heads, dim, mean_bits=8) for k, v in pairs))
    stored = {layer: ops.cache_bytes(shape.format(layer)) for layer in shape.kv_layers}
    return replace(shape, stored=stored)


def _room(shape: CacheShape, sizes: Sizes, cell: Cell) -> tuple[tuple[int], int]:
    """The quantized blocks and full-precision slots that a cell's sequences, or the measured prompt, need."""
    n = shape.block_size
    quantized = max(sum(context // n + _SPARE_BLOCKS for context in cell), sizes.prompt // n + _SPARE_BLOCKS)
    return (quantized,), _SLOTS * len(cell)


def random_metrics(sizes: Sizes, codec_k: Codec, codec_v: Codec) -> tuple[Metric, Metric]:
    """Random metrics, with which encoding takes as much work as with calibrated ones. Raises EngineError."""
    config, rng = sizes.config, np.random.default_rng(3)
    heads, dim = config.attention.kv_heads, config.attention.head_dim
    if codec_k.rounding is None or codec_v.rounding is None:
        raise EngineError("the default cache type has no table")
    queries = rng.standard_normal((heads, 4 * dim, dim), np.float32) + rng.standard_normal((heads, 1, dim), np.float32)
    second = queries.swapaxes(1, 2) @ queries / queries.shape[1]
    ones = np.ones((heads, dim), np.float32)
    k = key_metric(second, queries.mean(1), ones, codec_k.rotation(dim), codec_k.rounding)
    output = rng.standard_normal((_OUTPUT_ROWS, config.attention.heads * dim), np.float32)
    correlation = _TOKEN_CORRELATION ** np.arange(sizes.block_size)
    return k, value_metric(output_second(output, heads, dim), codec_v.rotation(dim), codec_v.rounding, correlation)

"""Blocks that a step fills are encoded in one launch for each format of layers, with the codes of single blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from polarlm.engine import codecs
from polarlm.engine.backends.cuda.device.tracing import TracingArray, TracingDevice
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import FilledBlocks, KVLocation
from polarlm.engine.backends.ops import Ops
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.quantization.encode import encode_centred
from polarlm.engine.quantization.metric import Metric, key_metric, value_metric
from polarlm.engine.quantization.statistics import output_second
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from tests.cuda.emulated import open_device
from tests.cuda.test_host_calls import calls_of

N, KV_HEADS, D = 16, 2, 16
TYPES = ("ring4", "ring3.5"), ("polarquant", "f16"), ("ring4", "ring3.5"), ("ring4", "ring3.5")  # a pair for each layer
WINDOWS = None, None, 1000, None


def store_of(ops: Ops, sequences: int, metrics: Sequence[Any] | None = None) -> KVStore:
    """Layers of two formats that take turns, some with a window."""
    shapes = zip(TYPES, WINDOWS, strict=True)
    layers = tuple(LayerShape(codecs.get(k), codecs.get(v), KV_HEADS, D, 8, window) for (k, v), window in shapes)
    plan = plan_for_tokens(CacheShape(N, layers), 3 * N * sequences, sequences, N)
    return KVStore(ops, plan, [Conditioning()] * len(TYPES), metrics)


class CountingDevice(TracingDevice):
    def __init__(self) -> None:
        super().__init__(lambda launch: self.launches.append(launch.kernel), 6, 228 << 10)
        self.launches: list[str] = []
        self.uploads = 0

    def from_host(self, x: np.ndarray) -> TracingArray:
        self.uploads += 1
        return super().from_host(x)


def work_of_a_step(sequences: int) -> tuple[list[str], int, int]:
    """A step in which every sequence fills a block → launches, uploads and calls of functions of its encoding."""
    device, calls = CountingDevice(), list[int]()
    ops = CudaOps(device)
    store = store_of(ops, sequences)
    kept = [store.new_sequence() for _ in range(sequences)]
    for kv in kept:
        span = store.open(kv, 2 * N - 1)
        for layer in range(len(TYPES)):
            store.seal(layer, span)
        store.commit(span)
    spans = [store.open_step(kv) for kv in kept]
    encode = ops.encode_blocks
    ops.encode_blocks = lambda *args: calls.append(calls_of(lambda: encode(*args)))  # type: ignore[method-assign]
    device.launches.clear()
    device.uploads = 0
    store.commit_steps(spans)
    assert all(len(table.quantized) == 1 for kv in kept for table in kv.tables)
    return device.launches, device.uploads, sum(calls)


def test_a_step_encodes_with_the_same_work_for_any_number_of_sequences() -> None:
    """One launch and one list of blocks for each format, however many layers, windows and sequences there are."""
    work_of_a_step(1)  # sources are read and put together once
    alone = work_of_a_step(1)
    assert alone[:2] == (["encode_blocks_kernel"] * len(set(TYPES)), len(set(TYPES)))
    assert alone[2] > 0
    for sequences in (4, 16):
        assert work_of_a_step(sequences) == alone


def metrics_of(rng: np.random.Generator, k: str, v: str) -> tuple[Metric | None, Metric | None]:
    """Metrics of one layer's keys and values; None for codecs that have no use for one."""
    rounding_k, rounding_v = codecs.get(k).rounding, codecs.get(v).rounding
    directions = rng.standard_normal((KV_HEADS, 5 * D, D)) * np.geomspace(1, 0.1, D) + 0.2
    second, output = directions.swapaxes(1, 2) @ directions / (5 * D), rng.standard_normal((48, 2 * KV_HEADS * D))
    means, ones = directions.mean(1), np.ones((KV_HEADS, D))
    outputs, along = output_second(output, KV_HEADS, D), 0.6 ** np.arange(N)
    return (
        None if rounding_k is None else key_metric(second, means, ones, None, rounding_k),
        None if rounding_v is None else value_metric(outputs, None, rounding_v, along),
    )


def blocks_of(store: KVStore, together: bool) -> list[dict[str, np.ndarray]]:
    """Three blocks that each layer has encoded: all at once, or one by one. The last layer has blocks of its own."""
    rng, caches = np.random.default_rng(1), [store.cache(layer) for layer in range(len(TYPES))]
    blocks, slots = [3, 0, 2], [1, 4, 0]
    for cache in caches:
        for slot in slots:
            k, v = (rng.standard_normal((2, KV_HEADS, N, D)) + 0.5).astype(np.float16)
            store.ops.write_full(cache, slot, k, v)
    if together:
        sources = [KVLocation(None, slot) for slot in slots]
        most = FilledBlocks(caches[:3], blocks, sources)
        store.ops.encode_blocks([most, FilledBlocks(caches[3:], blocks[:2], sources[:2])])
        store.ops.encode_blocks([FilledBlocks(caches[3:], blocks[2:], sources[2:])])
    else:
        for cache in caches:
            for block, slot in zip(blocks, slots, strict=True):
                store.ops.encode_blocks([FilledBlocks([cache], [block], [KVLocation(None, slot)])])
    return [store.ops.read_blocks(cache, blocks) for cache in caches]


@pytest.mark.parametrize("is_fed_back", [False, True], ids=["nearest", "fed back"])
def test_layers_and_sequences_together_have_the_codes_of_each_alone(is_fed_back: bool) -> None:
    rng = np.random.default_rng(2)
    metrics = [metrics_of(rng, *types) if is_fed_back else (None, None) for types in TYPES]
    device = CudaOps(open_device())
    together, alone = (blocks_of(store_of(device, 3, metrics), at_once) for at_once in (True, False))
    for fields, wanted in zip(together, alone, strict=True):
        for name, array in wanted.items():
            np.testing.assert_array_equal(fields[name], array)
    assert not np.array_equal(together[0]["keys"], together[2]["keys"])


def test_blocks_with_metrics_have_the_codes_of_numpy() -> None:
    """Keys whose norms are tilted, and values, from kernels of their own, which read metrics in other layouts."""
    rng, ops = np.random.default_rng(3), CudaOps(open_device())
    metrics = [metrics_of(rng, *types) for types in TYPES]
    cache = store_of(ops, 1, metrics).cache(0)
    vectors = (rng.standard_normal((2, KV_HEADS, N, D)) + 0.5).astype(np.float16)
    ops.write_full(cache, 1, *vectors)
    ops.encode_blocks([FilledBlocks([cache], [0], [KVLocation(None, 1)])])
    records = ops.read_blocks(cache, [0]).values()
    for record, layout, x, metric, name in zip(records, cache.layouts, vectors, metrics[0], TYPES[0], strict=True):
        fields, _ = layout.unpack(record[0])
        x = x[:, None].astype(np.float32)
        wanted, _ = encode_centred(codecs.get(name), x, metric, layout.mean_bits)
        for field, array in wanted.items():
            assert (fields[field] == array[:, 0]).mean() >= 0.999

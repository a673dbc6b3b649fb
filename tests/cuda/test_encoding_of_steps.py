"""Blocks that a step fills are encoded in one launch for each format of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polarlm.engine import codecs
from polarlm.engine.backends.cuda.device.tracing import TracingArray, TracingDevice
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.ops import Ops
from polarlm.engine.quantization.conditioning import Conditioning
from polarlm.engine.state.layer_shapes import LayerShape
from polarlm.engine.state.plan import plan_for_tokens
from polarlm.engine.state.shapes import CacheShape
from polarlm.engine.state.store import KVStore
from tests.cuda.test_host_calls import calls_of

N, KV_HEADS, D = 16, 2, 16
TYPES = ("ring4", "ring3.5"), ("polarquant", "f16"), ("ring4", "ring3.5"), ("ring4", "ring3.5")  # a pair for each layer
WINDOWS = None, None, 1000, None


def store_of(ops: Ops, sequences: int, metrics: Sequence[Any] | None = None) -> KVStore:
    """Layers of two formats that take turns, some with a window."""
    shapes = zip(TYPES, WINDOWS, strict=True)
    layers = tuple(LayerShape(codecs.get(k), codecs.get(v), KV_HEADS, D, 8, window) for (k, v), window in shapes)
    plan = plan_for_tokens(CacheShape(N, layers), 3 * N * sequences, sequences)
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

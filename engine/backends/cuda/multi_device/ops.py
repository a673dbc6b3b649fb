"""The ops on several GPUs of one process; each has some consecutive layers of a model."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

from polarlm.engine.backends.cuda.device import Device
from polarlm.engine.backends.cuda.kv.cache import DeviceBuffers, LayerCache
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, Move
from polarlm.engine.backends.ops import Load

_CACHE_OPS = ("round_trip", "read_blocks", "write_blocks", "read_full", "write_full")
_MACHINE_OPS = ("reserve_workspace", "wait", "forget", "check")


class MultiDeviceOps(CudaOps):
    """The ops of several GPUs. What belongs to no layer is done on the last one, which has the head of the model.

    A layer's ops are those of its GPU (`layer_ops`). Block ids mean the same on every GPU; ops with a cache, and with
    the buffer of a prompt, are done where that cache is.
    """

    def __init__(self, device_ops: Sequence[CudaOps], counts: Sequence[int] = ()):
        """counts: how many layers each GPU has; empty before a model is known."""
        super().__init__(device_ops[-1]._device)
        self.device_ops, self.counts = tuple(device_ops), tuple(counts)
        self.name = " and ".join(ops.name for ops in device_ops)
        self.prefill_rows = min(ops.prefill_rows for ops in device_ops)
        self.batch_rows = 0
        self.encoded_at_once = min(ops.encoded_at_once for ops in device_ops)
        devices = [ops._device for ops in device_ops]
        sizes = [(device.processors, device.shared_memory, device.overlaps) for device in devices]
        self._same_devices = [device for device, size in zip(devices, sizes, strict=True) if size == sizes[-1]]
        self._ends = [*itertools.accumulate(counts)]
        self._by_device: dict[Device, CudaOps] = {ops._device: ops for ops in device_ops}
        for name in _CACHE_OPS:
            setattr(self, name, partial(self._run_on_cache_device, name))
        for name in _MACHINE_OPS:
            setattr(self, name, partial(self._run_on_each, name))

    def layer_ops(self, layer: int) -> CudaOps:
        return self.device_ops[bisect_right(self._ends, layer)]

    # -- memory ------------------------------------------------------------------------------------------------

    def _memory(self) -> tuple[int, int]:
        free, total = zip(*(ops._memory() for ops in self.device_ops), strict=True)
        return sum(free), sum(total)

    def work_bytes(self, load: Load) -> int:
        return sum(ops.work_bytes(load) for ops in self.device_ops)

    def _run_on_each(self, op: str, *args: Any) -> None:
        for ops in self.device_ops:
            getattr(ops, op)(*args)

    # -- K/V ---------------------------------------------------------------------------------------------------

    def _run_on_cache_device(self, op: str, cache: LayerCache, *args: Any) -> Any:
        return getattr(self._by_device[cache.device], op)(cache, *args)

    def buffer(self, format: CacheFormat, rows: int, *, as_slots: bool = False, layers: int = 1) -> DeviceBuffers:
        return {device: ops.buffer(format, rows, layers=layers) for device, ops in self._by_device.items()}

    def copy_full(self, caches: Sequence[LayerCache], moves: Sequence[Move]) -> None:
        for device, ops in self._by_device.items():
            if on_device := [cache for cache in caches if cache.device is device]:
                ops.copy_full(on_device, moves)

    def encode_blocks(self, filled: Sequence[FilledBlocks]) -> None:
        for device, ops in self._by_device.items():
            on_device = [f._replace(caches=[c for c in f.caches if c.device is device]) for f in filled]
            if any(blocks.caches for blocks in on_device):
                ops.encode_blocks([blocks for blocks in on_device if blocks.caches])

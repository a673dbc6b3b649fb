"""The ops on several GPUs of one process; each has some consecutive layers of a model."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any

from polarlm.engine.backends.cuda.device import Device
from polarlm.engine.backends.cuda.kv.cache import CardBuffers, LayerCache
from polarlm.engine.backends.cuda.ops import CudaOps
from polarlm.engine.backends.kv import CacheFormat, FilledBlocks, Move
from polarlm.engine.backends.ops import Load

_CACHE_OPS = ("round_trip", "decode_blocks", "read_blocks", "write_blocks", "read_full", "write_full")


class CardsOps(CudaOps):
    """The ops of several cards. What belongs to no layer is done on the last one, which has the head of the model.

    A layer's ops are its card's (`layer_ops`). Block ids mean the same on every card; ops with a cache, and with
    the buffer of a prompt, are done where that cache is.
    """

    def __init__(self, cards: Sequence[CudaOps], counts: Sequence[int] = ()):
        """counts: how many layers each card has; empty before a model is known."""
        super().__init__(cards[-1]._device)
        self.cards, self.counts = tuple(cards), tuple(counts)
        self.name = " and ".join(card.name for card in cards)
        self.prefill_rows = min(card.prefill_rows for card in cards)
        self.pass_rows = 0
        self.encoded_at_once = min(card.encoded_at_once for card in cards)
        devices = [card._device for card in cards]
        sizes = [(device.processors, device.shared_memory, device.overlaps) for device in devices]
        self._same_devices = [device for device, size in zip(devices, sizes, strict=True) if size == sizes[-1]]
        self._ends = [*itertools.accumulate(counts)]
        self._by_device: dict[Device, CudaOps] = {card._device: card for card in cards}
        for name in _CACHE_OPS:
            setattr(self, name, partial(self._run_on_cache_device, name))

    def layer_ops(self, layer: int) -> CudaOps:
        return self.cards[bisect_right(self._ends, layer)]

    # -- memory ------------------------------------------------------------------------------------------------

    def _memory(self) -> tuple[int, int]:
        free, total = zip(*(card._memory() for card in self.cards), strict=True)
        return sum(free), sum(total)

    def work_bytes(self, load: Load) -> int:
        return sum(card.work_bytes(load) for card in self.cards)

    def reserve_workspace(self, load: Load) -> None:
        for card in self.cards:
            card.reserve_workspace(load)

    def wait(self) -> None:
        for card in self.cards:
            card.wait()

    def forget(self) -> None:
        for card in self.cards:
            card.forget()

    def check(self) -> None:
        for card in self.cards:
            card.check()

    # -- K/V ---------------------------------------------------------------------------------------------------

    def _run_on_cache_device(self, op: str, cache: LayerCache, *args: Any) -> Any:
        return getattr(self._by_device[cache.device], op)(cache, *args)

    def buffer(self, format: CacheFormat, rows: int, *, as_slots: bool = False, layers: int = 1) -> CardBuffers:
        return {device: card.buffer(format, rows, layers=layers) for device, card in self._by_device.items()}

    def copy_full(self, caches: Sequence[LayerCache], moves: Sequence[Move]) -> None:
        for device, card in self._by_device.items():
            if on_card := [cache for cache in caches if cache.device is device]:
                card.copy_full(on_card, moves)

    def encode_blocks(self, groups: Sequence[FilledBlocks]) -> None:
        for device, card in self._by_device.items():
            on_card = [f._replace(caches=[c for c in f.caches if c.device is device]) for f in groups]
            if any(blocks.caches for blocks in on_card):
                card.encode_blocks([blocks for blocks in on_card if blocks.caches])

"""How much memory each model has or gets while it is loaded, and which model gets memory that becomes free."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import psutil

from polarlm.engine import EngineError
from polarlm.engine.config import format_bytes
from polarlm.engine.loading.need import Need
from polarlm.server.models.process import LOADING, READY, STOPPING, WAITING_FOR_MEMORY, ModelSlot
from polarlm.server.models.registry import in_words


class Memory:
    """The memory of all models (`ModelSlot.need`). No method waits: a decision holds until `reserve` notes it."""

    def __init__(self, models: Mapping[str, ModelSlot], most: int | None) -> None:
        """most: bytes that --models-memory allows all models together."""
        self._models, self._most = models, most
        self.queue: list[ModelSlot] = []  # models that wait for memory, in the order in which they began to
        self.change_event = asyncio.Event()  # set, and replaced, when memory is set aside or given back

    def reserve(self, slot: ModelSlot, need: Need | None) -> None:
        """Note which memory is a model's; None: it has none. All that wait for memory look again."""
        slot.need = need
        event, self.change_event = self.change_event, asyncio.Event()
        event.set()

    def models_before(self, slot: ModelSlot) -> list[ModelSlot]:
        """The other models with memory. Of the models that wait for memory, only the ones before this model count."""
        later = self.queue[self.queue.index(slot) :] if slot in self.queue else [slot]
        return [one for one in self._models.values() if one.need is not None and one not in later]

    def _promised_bytes(self, slot: ModelSlot) -> Counter[str]:
        """Bytes of each device that models before this one wait for, besides what stopping ones will give back."""
        awaited_bytes, freed_bytes = Counter[str](), Counter[str]()
        for one in self.models_before(slot):
            if one.need is not None and one.state in (WAITING_FOR_MEMORY, STOPPING):
                (awaited_bytes if one in self.queue else freed_bytes)[one.need.device] += one.need.bytes
        return awaited_bytes - freed_bytes

    def bytes_left(self, slot: ModelSlot) -> int | None:
        if self._most is None:
            return None
        bytes_used = sum(
            one.need.bytes for one in self.models_before(slot) if one.need is not None and one not in self.queue
        )
        return max(0, self._most - bytes_used - sum(self._promised_bytes(slot).values()))

    def reserved_bytes(self, slot: ModelSlot) -> dict[str, int]:
        """Bytes of each device's memory that others will still take: blocks that nothing was written to, and models
        that are being loaded or wait. A loaded model has taken all of its memory of a GPU."""
        reserved_bytes = self._promised_bytes(slot)
        for one in self.models_before(slot):
            if one.need is None or one.process is None or one in self.queue:
                continue
            if one.need.device != "cpu":
                reserved_bytes[one.need.device] += one.need.bytes * (one.state == LOADING)
                continue
            with suppress(psutil.Error):
                reserved_bytes["cpu"] += max(0, one.need.bytes - psutil.Process(one.process.pid).memory_info().rss)
        return dict(+reserved_bytes)

    def waits_for_others(self, slot: ModelSlot) -> bool:
        """Whether a model without another to unload may yet get room: some are being loaded, or wait before it."""
        return slot is not self.queue[0] or any(one.state == LOADING for one in self.models_before(slot))

    def victim(self, slot: ModelSlot) -> ModelSlot | None:
        """The model that is unloaded next for another one: of all that may be, the one that probably ends first."""
        others = [one for one in self.models_before(slot) if one.state in (READY, STOPPING)]
        movable = [one for one in others if one.state == STOPPING or not one.model.pinned]
        return min(movable, key=lambda one: (one.active > 0, one.state != STOPPING, one.last_used), default=None)

    def check_most(self, slot: ModelSlot, need: Need) -> None:
        """Raise EngineError if --models-memory rules a model out, with no other to unload."""
        bytes_left = self.bytes_left(slot)
        if self._most is None or bytes_left is None or need.bytes <= bytes_left:
            return
        others = [one.model for one in self.models_before(slot)]
        stay = f"; {in_words(others)} stay, being pinned" if others else ""
        raise EngineError(
            f"There is no room for {slot.model.name}: it needs {format_bytes(need.bytes)}, and --models-memory "
            f"leaves {format_bytes(bytes_left)} of {format_bytes(self._most)}{stay}",
            "out_of_memory",
        )

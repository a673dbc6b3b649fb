"""How much memory each model has or gets while it is loaded, and which model gets memory that becomes free."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

import psutil

from polarlm.engine import EngineError
from polarlm.engine.loading.need import Need
from polarlm.engine.state.plan import format_bytes
from polarlm.server.models.process import LOADING, READY, STOPPING, WAITING, ModelSlot
from polarlm.server.models.registry import in_words


class Memory:
    """The memory of all models (`ModelSlot.need`). Nothing here waits, so what is decided holds until it is noted."""

    def __init__(self, models: Mapping[str, ModelSlot], most: int | None) -> None:
        """most: bytes that --models-memory allows all models together."""
        self._models, self._most = models, most
        self.short: list[ModelSlot] = []  # models that wait for memory, in the order in which they began to
        self.changed = asyncio.Event()  # set, and replaced, when memory is set aside or given back

    def set_aside(self, slot: ModelSlot, need: Need | None) -> None:
        """Note which memory is a model's; None: it has none. All that wait for memory look again."""
        slot.need = need
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def before(self, slot: ModelSlot) -> list[ModelSlot]:
        """The other models with memory. Of the models that wait for memory, only the ones before this model count."""
        later = self.short[self.short.index(slot) :] if slot in self.short else [slot]
        return [one for one in self._models.values() if one.need is not None and one not in later]

    def _promised(self, slot: ModelSlot) -> Counter[str]:
        """Bytes of each device that models before this one wait for, besides what stopping ones will give back."""
        promised, given_back = Counter[str](), Counter[str]()
        for one in self.before(slot):
            if one.need is not None and one.state in (WAITING, STOPPING):
                (promised if one in self.short else given_back)[one.need.device] += one.need.bytes
        return promised - given_back

    def left(self, slot: ModelSlot) -> int | None:
        if self._most is None:
            return None
        taken = sum(one.need.bytes for one in self.before(slot) if one.need is not None and one not in self.short)
        return max(0, self._most - taken - sum(self._promised(slot).values()))

    def reserved(self, slot: ModelSlot) -> dict[str, int]:
        """Bytes of each device's memory that others will still take: blocks that nothing was written to, and models
        that are being loaded or wait. What a GPU gives a model it has taken when it is loaded."""
        reserved = self._promised(slot)
        for one in self.before(slot):
            if one.need is None or one.process is None or one in self.short:
                continue
            if one.need.device != "cpu":
                reserved[one.need.device] += one.need.bytes * (one.state == LOADING)
                continue
            with suppress(psutil.Error):
                reserved["cpu"] += max(0, one.need.bytes - psutil.Process(one.process.pid).memory_info().rss)
        return dict(+reserved)

    def waits_for_others(self, slot: ModelSlot) -> bool:
        """Whether a model without another to unload may yet get room: some are being loaded, or wait before it."""
        return slot is not self.short[0] or any(one.state == LOADING for one in self.before(slot))

    def victim(self, slot: ModelSlot) -> ModelSlot | None:
        """The model that is unloaded next for another one; the one that ends soonest, as far as that is known."""
        others = [one for one in self.before(slot) if one.state in (READY, STOPPING)]
        movable = [one for one in others if one.state == STOPPING or not one.model.pinned]
        return min(movable, key=lambda one: (one.active > 0, one.state != STOPPING, one.used), default=None)

    def check_most(self, slot: ModelSlot, need: Need) -> None:
        """Raise EngineError if --models-memory rules a model out, with no other to unload."""
        left = self.left(slot)
        if self._most is None or left is None or need.bytes <= left:
            return
        others = [one.model for one in self.before(slot)]
        stay = f"; {in_words(others)} stay, being pinned" if others else ""
        raise EngineError(
            f"There is no room for {slot.model.name}: it needs {format_bytes(need.bytes)}, and --models-memory "
            f"leaves {format_bytes(left)} of {format_bytes(self._most)}{stay}",
            "out_of_memory",
        )

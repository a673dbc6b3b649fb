"""Which models are in memory: starts a model's process when it is asked for, and ends it to make room, or when idle."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polarlm.children import how_ended
from polarlm.engine import EngineError
from polarlm.engine.config import format_bytes, parse_size
from polarlm.server.config import ServerConfig
from polarlm.server.models.memory import Memory
from polarlm.server.models.process import (
    FAILED,
    LOADING,
    READY,
    STOPPING,
    UNLOADED,
    WAITING_FOR_MEMORY,
    ModelProcess,
    ModelSlot,
)
from polarlm.server.models.registry import NamedModel, Registry, in_words
from polarlm.server.running import refusals
from polarlm.server.running.journal import note
from polarlm.server.running.quotas import Quotas
from polarlm.server.running.refusals import Refusal

_SWEEP_SECONDS = 1.0  # most between two looks for idle models


class Supervisor:
    """The processes of all models. All methods belong to one event loop.

    Models are downloaded and loaded in parallel, each in a task. A process says whether its model fits into the
    memory that is left (`Memory`), and is asked again if that has changed meanwhile. A model without room queues for it
    and has others unloaded. It waits for these, for models that are being loaded, and for the models before it in the
    queue, so no two wait for each other.
    """

    def __init__(self, registry: Registry, config: ServerConfig) -> None:
        self.registry, self._config, self.quotas = registry, config, Quotas(config.keys.limits_of)
        self._slots: dict[str, ModelSlot] = {}
        most = None if config.models_memory is None else parse_size(config.models_memory)
        self._memory = Memory(self._slots, most)
        self._sweeper: asyncio.Task[None] | None = None
        self.is_closing = False

    def all(self) -> list[ModelSlot]:
        """Raises EngineError if the folder of models cannot be read."""
        return [self._slot(model) for model in self.registry.models()]

    def known(self) -> list[ModelSlot]:
        """All models, or those that clients have asked for, if the folder of models cannot be read."""
        try:
            return self.all()
        except EngineError:
            return [*self._slots.values()]

    def find(self, name: str) -> ModelSlot:
        """The model of this name; for an empty one, the model that was used last, or else the first. Raises Refusal, or
        EngineError if the folder of models cannot be read."""
        if name == "":
            started_slots = [one for one in self._slots.values() if one.starts]
            if started_slots:
                return max(started_slots, key=lambda one: one.last_used)
            if models := self.registry.models():
                return self._slot(models[0])
        model = self.registry.find(name)
        if model is None:
            names = in_words(self.registry.models())
            raise Refusal("model_not_found", f"There is no model called {name[:100]}; there are: {names}")
        return self._slot(model)

    def _slot(self, model: NamedModel) -> ModelSlot:
        slot = self._slots.setdefault(model.name, ModelSlot(model))
        if slot.state in (UNLOADED, FAILED):
            slot.model = model  # the folder may have another file of this name by now
        return slot

    async def acquire(self, slot: ModelSlot) -> None:
        """Return when the model takes requests; load it if need be. Raises EngineError or Refusal. The model then has
        one request more, until `use` or `release` ends it."""
        if self.is_closing:
            raise refusals.server_closing()
        if slot.state == READY:
            slot.active += 1
            return
        admission, loading = asyncio.Event(), self.begin_load(slot)
        slot.waiters.append(admission)
        try:
            await asyncio.wait([loading])  # which goes on if this client leaves
            if loading.cancelled():
                raise refusals.server_closing() if self.is_closing else _cancelled_load(slot)
            loading.result()
        except BaseException:  # the error of loading, or the client has gone
            if admission.is_set():
                self.release(slot)
            elif admission in slot.waiters:
                slot.waiters.remove(admission)
            raise

    @contextmanager
    def use(self, slot: ModelSlot, keep_seconds: float | None) -> Iterator[ModelProcess]:
        """The process, for the request that `acquire` admitted. keep_seconds: as of `ModelSlot`. Raises Refusal if
        the process has ended."""
        try:
            if slot.process is None or slot.state not in (READY, STOPPING):
                sentence = f"The process of {slot.model.name} has ended: send the request again, which starts it"
                raise Refusal("model_ended", sentence)
            slot.last_used = time.monotonic()
            slot.keep_seconds = keep_seconds
            yield slot.process
        finally:
            self.release(slot)
            if keep_seconds == 0 and not slot.model.pinned and slot.state == READY:
                self.unload(slot)

    def release(self, slot: ModelSlot) -> None:
        slot.active -= 1
        slot.last_used = time.monotonic()
        slot.free.set()

    def begin_load(self, slot: ModelSlot) -> asyncio.Task[None]:
        """The task that loads a model, which is begun if need be. It goes on without clients, until `give_up`."""
        self._sweeper = self._sweeper or asyncio.create_task(self._sweep())
        if slot.load_task is None or slot.load_task.done():
            slot.load_task = asyncio.create_task(self._load(slot))
            # Takes its error: whoever waits for the model gets it, and perhaps nobody waits any more.
            slot.load_task.add_done_callback(lambda loading: loading.cancelled() or loading.exception())
        return slot.load_task

    def unload(self, slot: ModelSlot) -> asyncio.Task[None]:
        """End a loaded model's process once it has answered its requests; new ones wait, and start it again."""
        if slot.stop_task is None or slot.stop_task.done():
            slot.stop_task = asyncio.create_task(self._stop(slot))
        return slot.stop_task

    def give_up(self, slot: ModelSlot) -> None:
        """End the load of a model, at which its clients get an error, or else unload the model."""
        loading = slot.load_task
        if loading is None or loading.done():
            self.unload(slot)
            return
        loading.cancel()
        slot.load_task = None
        if slot.state != STOPPING:  # the task has a process to end; otherwise it waits for the one before to end
            slot.state, slot.stop_task = STOPPING, loading

    async def close(self) -> None:
        """Take no more requests, let the processes finish their requests, and end the processes."""
        self.is_closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for one in self._slots.values():
            if one.is_loading:
                self.give_up(one)
        stops = [one.stop_task for one in self._slots.values() if one.stop_task is not None and one.process is None]
        ends = [one.process.end() for one in self._slots.values() if one.process is not None]
        await asyncio.gather(*stops, *ends, return_exceptions=True)

    async def _load(self, slot: ModelSlot) -> None:
        """Start the model's process, and have it load the model when there is room. Raises EngineError or Refusal."""
        if slot.stop_task is not None:
            await asyncio.wait([slot.stop_task])  # which goes on if this task is cancelled
        if self.is_closing:
            raise refusals.server_closing()
        slot.state, slot.error, name = LOADING, None, slot.model.name
        slot.starts += 1
        start, process = time.monotonic(), None
        try:
            process = ModelProcess(
                slot.model, self._config, lambda code: self._on_exit(slot, process, code), self.quotas.charge
            )
            slot.process = process
            await process.fetch()
            await self._take_memory(slot, process)
            await process.load()
        except BaseException as error:
            was_given_up = isinstance(error, asyncio.CancelledError)
            try:
                if process is not None:
                    await process.end_at_once()
            finally:
                slot.process, slot.state = None, UNLOADED if was_given_up else FAILED
                self._memory.reserve(slot, None)
            if not self.is_closing:
                note(_cancelled_load(slot).message if was_given_up else f"{name} cannot be loaded: {error}")
            if not isinstance(error, (EngineError, Refusal)):
                raise
            slot.error = without_folder(error, slot.model.path)
            raise slot.error from None
        slot.state = READY
        for admission in slot.waiters:  # they come before a model that needs the memory
            admission.set()
        slot.active += len(slot.waiters)
        slot.waiters.clear()
        slot.keep_seconds = self.default_keep(slot)
        slot.last_used = time.monotonic()
        self._memory.reserve(slot, slot.need)  # from now on it can be unloaded
        note(f"{name} is loaded, after {time.monotonic() - start:.1f} s")

    async def _take_memory(self, slot: ModelSlot, process: ModelProcess) -> None:
        """Set memory aside for the model, and unload others until there is enough. Raises EngineError or Refusal."""
        try:
            while True:
                change_event = self._memory.change_event
                need = await process.need(self._memory.reserved_bytes(slot), self._memory.bytes_left(slot))
                if change_event.is_set():
                    continue
                if need.fits:
                    break
                if slot not in self._memory.queue:
                    self._memory.queue.append(slot)
                slot.need, slot.state = need, WAITING_FOR_MEMORY
                if victim := self._memory.victim(slot):
                    if victim.state == READY:
                        note(f"{victim.model.name} makes room for {slot.model.name}: {format_bytes(need.bytes)}")
                    self.unload(victim)
                elif not self._memory.waits_for_others(slot):
                    self._memory.check_most(slot, need)
                    break  # the model tries what there is, and says what it lacks
                await change_event.wait()
            slot.need, slot.state = need, LOADING
        except BaseException:
            slot.need = None
            raise
        finally:
            if slot in self._memory.queue:
                self._memory.queue.remove(slot)
            self._memory.reserve(slot, slot.need)

    async def _stop(self, slot: ModelSlot) -> None:
        if slot.state != READY or slot.process is None:
            return
        slot.state = STOPPING
        while slot.active and slot.state == STOPPING:
            slot.free.clear()
            await slot.free.wait()
        if slot.state == STOPPING:
            await slot.process.end()
            slot.state, slot.process = UNLOADED, None
            self._memory.reserve(slot, None)
            note(f"{slot.model.name} is unloaded")

    def _on_exit(self, slot: ModelSlot, process: ModelProcess | None, code: int) -> None:
        """A process has ended. If nobody meant it to, its requests end with an error, and the next one starts it."""
        if self.is_closing or slot.process is not process:
            return
        if slot.state == READY or (slot.state == STOPPING and slot.active):
            slot.state, slot.process = FAILED, None
            self._memory.reserve(slot, None)
            slot.error = refusals.model_ended(slot.model.name, code)
            note(f"The process of {slot.model.name} {how_ended(code)}; the next request starts it again")
            slot.free.set()

    def default_keep(self, slot: ModelSlot) -> float | None:
        """Seconds without requests after which a model is unloaded; None: as long as there is room."""
        minutes = self._config.idle_unload if slot.model.idle_minutes is None else slot.model.idle_minutes
        return 60 * minutes if minutes else None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for one in self._slots.values():
                is_due = one.keep_seconds is not None and time.monotonic() >= one.last_used + one.keep_seconds
                if one.state == READY and not one.active and is_due and not one.model.pinned:
                    self.unload(one)


def _cancelled_load(slot: ModelSlot) -> Refusal:
    name = slot.model.name
    return Refusal("model_not_loaded", f"{name} was unloaded before it was loaded: a new request loads it")


def without_folder(error: EngineError | Refusal, path: Path | None) -> EngineError | Refusal:
    """`error` for clients, who need not know where the files are."""
    if path is None or isinstance(error, Refusal):
        return error
    return EngineError(str(error).replace(f"{path.parent}{os.sep}", ""), error.code)

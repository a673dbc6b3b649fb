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
from polarlm.engine.state.plan import format_bytes, parse_size
from polarlm.server.config import ServerConfig
from polarlm.server.models.memory import Memory
from polarlm.server.models.process import FAILED, LOADING, READY, STOPPING, UNLOADED, WAITING, ModelProcess, Served
from polarlm.server.models.registry import NamedModel, Registry, in_words
from polarlm.server.running import refused
from polarlm.server.running.journal import note
from polarlm.server.running.refused import Refused

_SWEEP_SECONDS = 1.0  # most between two looks for idle models


class Supervisor:
    """The processes of all models. All methods belong to one event loop.

    Models are downloaded and loaded beside each other, each in a task. A process says whether its model fits into the
    memory that is left (`Memory`), and is asked again if that has changed meanwhile. A model without room queues for it
    and has others unloaded. It waits for these, for models that are being loaded, and for the models before it in the
    queue, so no two wait for each other.
    """

    def __init__(self, registry: Registry, config: ServerConfig) -> None:
        self.registry, self._config = registry, config
        self._served: dict[str, Served] = {}
        most = None if config.models_memory is None else parse_size(config.models_memory)
        self._memory = Memory(self._served, most)
        self._sweeper: asyncio.Task[None] | None = None
        self.closing = False

    def all(self) -> list[Served]:
        return [self._of(model) for model in self.registry.models()]

    def find(self, name: str) -> Served:
        """The model of this name; for an empty one, the model that was used last, or else the first. Raises Refused."""
        if name == "":
            used = [one for one in self._served.values() if one.starts]
            if used:
                return max(used, key=lambda one: one.used)
            if models := self.registry.models():
                return self._of(models[0])
        model = self.registry.find(name)
        if model is None:
            known = in_words(self.registry.models())
            raise Refused("model_not_found", f"There is no model called {name[:100]}; there are: {known}")
        return self._of(model)

    def _of(self, model: NamedModel) -> Served:
        served = self._served.setdefault(model.name, Served(model))
        if served.state in (UNLOADED, FAILED):
            served.model = model  # the folder may have another file of this name by now
        return served

    async def ready(self, served: Served) -> None:
        """Return when the model takes requests; load it if need be. Raises EngineError or Refused. The model then has
        one request more, until `using` or `release` ends it."""
        if self.closing:
            raise refused.closing()
        if served.state == READY:
            served.active += 1
            return
        admitted, loading = asyncio.Event(), self.begin(served)
        served.waiting.append(admitted)
        try:
            await asyncio.wait([loading])  # which goes on if this client leaves
            if loading.cancelled():
                raise refused.closing() if self.closing else _given_up(served)
            loading.result()
        except BaseException:  # the error of loading, or the client has gone
            if admitted.is_set():
                self.release(served)
            elif admitted in served.waiting:
                served.waiting.remove(admitted)
            raise

    @contextmanager
    def using(self, served: Served, keep: float | None) -> Iterator[ModelProcess]:
        """The process, for the request that `ready` admitted. keep: see `Served`. Raises Refused if it has ended."""
        try:
            if served.process is None or served.state not in (READY, STOPPING):
                sentence = f"The process of {served.model.name} has ended: send the request again, which starts it"
                raise Refused("model_ended", sentence)
            served.used = time.monotonic()
            served.keep = keep
            yield served.process
        finally:
            self.release(served)
            if keep == 0 and not served.model.pinned and served.state == READY:
                self.unload(served)

    def release(self, served: Served) -> None:
        served.active -= 1
        served.used = time.monotonic()
        served.free.set()

    def begin(self, served: Served) -> asyncio.Task[None]:
        """The task that loads a model, which is begun if need be. It goes on without clients, until `give_up`."""
        self._sweeper = self._sweeper or asyncio.create_task(self._sweep())
        if served.loading is None or served.loading.done():
            served.loading = asyncio.create_task(self._load(served))
            # Takes its error: whoever waits for the model gets it, and perhaps nobody waits any more.
            served.loading.add_done_callback(lambda loading: loading.cancelled() or loading.exception())
        return served.loading

    def unload(self, served: Served) -> asyncio.Task[None]:
        """End a loaded model's process once it has answered its requests; new ones wait, and start it again."""
        if served.stopping is None or served.stopping.done():
            served.stopping = asyncio.create_task(self._stop(served))
        return served.stopping

    def give_up(self, served: Served) -> None:
        """End the load of a model, at which its clients get an error, or else unload the model."""
        loading = served.loading
        if loading is None or loading.done():
            self.unload(served)
            return
        loading.cancel()
        served.loading = None
        if served.state != STOPPING:  # the task has a process to end; otherwise it waits for the one before to end
            served.state, served.stopping = STOPPING, loading

    async def close(self) -> None:
        """Take no more requests, let the processes finish their requests, and end the processes."""
        self.closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for one in self._served.values():
            if one.is_loading:
                self.give_up(one)
        given_up = [one.stopping for one in self._served.values() if one.stopping is not None and one.process is None]
        ends = [one.process.end() for one in self._served.values() if one.process is not None]
        await asyncio.gather(*given_up, *ends, return_exceptions=True)

    async def _load(self, served: Served) -> None:
        """Start the model's process, and have it load the model when there is room. Raises EngineError or Refused."""
        if served.stopping is not None:
            await asyncio.wait([served.stopping])  # which goes on if this task is cancelled
        if self.closing:
            raise refused.closing()
        served.state, served.error, name = LOADING, None, served.model.name
        served.starts += 1
        since, process = time.monotonic(), None
        try:
            process = ModelProcess(served.model, self._config, lambda code: self._ended(served, process, code))
            served.process = process
            await process.fetched()
            await self._take_memory(served, process)
            await process.load()
        except BaseException as error:
            was_given_up = isinstance(error, asyncio.CancelledError)
            try:
                if process is not None:
                    await process.end_at_once()
            finally:
                served.process, served.state = None, UNLOADED if was_given_up else FAILED
                self._memory.set_aside(served, None)
            if not self.closing:
                note(_given_up(served).message if was_given_up else f"{name} cannot be loaded: {error}")
            if not isinstance(error, (EngineError, Refused)):
                raise
            served.error = without_folder(error, served.model.path)
            raise served.error from None
        served.state = READY
        for admitted in served.waiting:  # they come before a model that needs the memory
            admitted.set()
        served.active += len(served.waiting)
        served.waiting.clear()
        served.keep = self.usual_keep(served)
        served.used = time.monotonic()
        self._memory.set_aside(served, served.need)  # from now on it can be unloaded
        note(f"{name} is loaded, after {time.monotonic() - since:.1f} s")

    async def _take_memory(self, served: Served, process: ModelProcess) -> None:
        """Set memory aside for the model, and unload others until there is enough. Raises EngineError or Refused."""
        try:
            while True:
                seen = self._memory.changed
                need = await process.need(self._memory.reserved(served), self._memory.left(served))
                if seen.is_set():
                    continue
                if need.fits:
                    break
                if served not in self._memory.short:
                    self._memory.short.append(served)
                served.need, served.state = need, WAITING
                if victim := self._memory.victim(served):
                    if victim.state == READY:
                        note(f"{victim.model.name} makes room for {served.model.name}: {format_bytes(need.bytes)}")
                    self.unload(victim)
                elif not self._memory.waits_for_others(served):
                    self._memory.check_most(served, need)
                    break  # the model tries what there is, and says what it lacks
                await seen.wait()
            served.need, served.state = need, LOADING
        except BaseException:
            served.need = None
            raise
        finally:
            if served in self._memory.short:
                self._memory.short.remove(served)
            self._memory.set_aside(served, served.need)

    async def _stop(self, served: Served) -> None:
        if served.state != READY or served.process is None:
            return
        served.state = STOPPING
        while served.active and served.state == STOPPING:
            served.free.clear()
            await served.free.wait()
        if served.state == STOPPING:
            await served.process.end()
            served.state, served.process = UNLOADED, None
            self._memory.set_aside(served, None)
            note(f"{served.model.name} is unloaded")

    def _ended(self, served: Served, process: ModelProcess | None, code: int) -> None:
        """A process has ended. If nobody meant it to, its requests end with an error, and the next one starts it."""
        if self.closing or served.process is not process:
            return
        if served.state == READY or (served.state == STOPPING and served.active):
            served.state, served.process = FAILED, None
            self._memory.set_aside(served, None)
            served.error = refused.model_ended(served.model.name, code)
            note(f"The process of {served.model.name} {how_ended(code)}; the next request starts it again")
            served.free.set()

    def usual_keep(self, served: Served) -> float | None:
        """Seconds without requests after which a model is unloaded; None: as long as there is room."""
        minutes = self._config.idle_unload if served.model.idle_minutes is None else served.model.idle_minutes
        return 60 * minutes if minutes else None

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for one in self._served.values():
                late = one.keep is not None and time.monotonic() >= one.used + one.keep
                if one.state == READY and not one.active and late and not one.model.pinned:
                    self.unload(one)


def _given_up(served: Served) -> Refused:
    name = served.model.name
    return Refused("model_not_loaded", f"{name} was unloaded before it was loaded: a new request loads it")


def without_folder(error: EngineError | Refused, path: Path | None) -> EngineError | Refused:
    """`error` for clients, who need not know where the files are."""
    if path is None or isinstance(error, Refused):
        return error
    return EngineError(str(error).replace(f"{path.parent}{os.sep}", ""), error.code)

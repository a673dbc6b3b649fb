"""Which models are in memory: starts a model's process when it is asked for, and ends it to make room, or when idle."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from polarlm.engine import EngineError
from polarlm.engine.loading.need import Need
from polarlm.engine.state.plan import format_bytes, parse_size
from polarlm.server.config import ServerConfig
from polarlm.server.models.process import ModelProcess, how
from polarlm.server.models.registry import NamedModel, Registry, listed
from polarlm.server.models.served import (
    FAILED,
    LOADING,
    READY,
    STOPPING,
    UNLOADED,
    Place,
    Served,
    ended,
    without_folder,
)
from polarlm.server.running import refused
from polarlm.server.running.refused import Refused, unknown_model

_SWEEP_SECONDS = 1.0  # most between two looks for idle models


class Supervisor:
    """The processes of all models. All methods belong to one event loop."""

    def __init__(self, registry: Registry, config: ServerConfig) -> None:
        self.registry, self._config = registry, config
        self._most = None if config.models_memory is None else parse_size(config.models_memory)
        self._served: dict[str, Served] = {}
        self._turn = asyncio.Lock()  # one model is loaded at a time: the next one sees what is left
        self._sweeper: asyncio.Task[None] | None = None
        self.closing = False

    # -- which models there are --------------------------------------------------------------------------------

    def all(self) -> list[Served]:
        """Every model, in the registry's order."""
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
            raise unknown_model(name, listed(self.registry.models()))
        return self._of(model)

    def _of(self, model: NamedModel) -> Served:
        served = self._served.setdefault(model.name, Served(model))
        if served.state in (UNLOADED, FAILED):
            served.model = model  # the folder may have another file of this name by now
        return served

    # -- asking for one ----------------------------------------------------------------------------------------

    async def ready(self, served: Served) -> None:
        """Return when the model takes requests; load it if need be. Raises EngineError or Refused.

        The model then has one request more, until `using` or `release` ends it.
        """
        if self.closing:
            raise refused.closing()
        if served.state == READY:
            served.active += 1
            return
        place = Place()
        served.waiting.append(place)
        try:
            await asyncio.shield(self.begin(served))
        except BaseException:  # the error of loading, or the client has gone
            if place.granted:
                self.release(served)
            elif place in served.waiting:
                served.waiting.remove(place)
            raise

    @contextmanager
    def using(self, served: Served, keep: float | None) -> Iterator[ModelProcess]:
        """A context in which the process has the request that `ready` admitted. keep: as `Served.keep`, afterwards.

        Raises Refused if the process has ended since then.
        """
        try:
            if served.process is None or served.state not in (READY, STOPPING):
                sentence = f"The process of {served.model.name} has ended: send the request again, which starts it"
                raise Refused("model_ended", sentence)
            served.touch()
            served.keep = keep
            yield served.process
        finally:
            self.release(served)
            if keep == 0 and not served.model.pinned:
                self.unload(served)

    def release(self, served: Served) -> None:
        """End a request that `ready` admitted."""
        served.active -= 1
        served.touch()
        served.free.set()

    def begin(self, served: Served) -> asyncio.Task[None]:
        """The task that loads a model, which is begun if need be."""
        self._sweeper = self._sweeper or asyncio.create_task(self._sweep())
        if served.loading is None or served.loading.done():
            served.loading = asyncio.create_task(self._load(served))
            served.loading.add_done_callback(_seen)
        return served.loading

    def unload(self, served: Served) -> asyncio.Task[None]:
        """End a loaded model's process once it has answered its requests; new ones wait, and start it again."""
        if served.stopping is None or served.stopping.done():
            served.stopping = asyncio.create_task(self._stop(served))
        return served.stopping

    async def close(self) -> None:
        """Take no more requests, let the processes end those that they have, and end the processes."""
        self.closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        running = [one for one in self._served.values() if one.process is not None]
        for one in running:
            if one.state == LOADING and one.process is not None:
                one.process.kill()
        await asyncio.gather(*(one.process.end() for one in running if one.process is not None))

    # -- loading and unloading ---------------------------------------------------------------------------------

    async def _load(self, served: Served) -> None:
        """Start the model's process, and unload others until it has room. Raises EngineError or Refused."""
        async with self._turn:
            if self.closing:
                raise refused.closing()
            if served.stopping is not None:
                await served.stopping
            served.state, served.error, name = LOADING, None, served.model.name
            served.starts += 1
            since = time.monotonic()
            try:
                process = await ModelProcess.start(
                    served.model,
                    self._config,
                    lambda code: self._ended(served, code),
                    self._reserved(),
                    self._left(),
                )
                served.process = process
                await process.fetched()
                need = await process.need()
                while not need.fits and await self._make_room(served, need):
                    process.look_again(self._reserved(), self._left())
                    need = await process.need()
                await process.load()
            except BaseException as error:
                if served.process is not None:
                    served.process.kill()
                    await served.process.ended()
                served.state, served.process = FAILED, None
                if not self.closing:
                    _note(f"{name} cannot be loaded: {error}")
                if not isinstance(error, (EngineError, Refused)):
                    raise
                served.error = without_folder(error, served.model.path)
                raise served.error from None
            served.need, served.state = need, READY
            for place in served.waiting:  # they come before a model that needs the memory
                place.granted = True
            served.active += len(served.waiting)
            served.waiting.clear()
            served.keep = self.usual_keep(served)
            served.touch()
            _note(f"{name} is loaded, after {time.monotonic() - since:.1f} s")

    async def _make_room(self, served: Served, need: Need) -> bool:
        """Unload another model; return False if there is none. Raises EngineError if --models-memory rules this out."""
        others = [one for one in self._served.values() if one.state in (READY, STOPPING) and one is not served]
        movable = [one for one in others if not one.model.pinned]
        if movable:
            victim = min(movable, key=lambda one: (one.active > 0, one.used))
            _note(f"{victim.model.name} makes room for {served.model.name}, which needs {format_bytes(need.bytes)}")
            await self.unload(victim)
            return True
        stay = f"; {listed([one.model for one in others])} stay, being pinned" if others else ""
        if self._most is not None and need.bytes > self._most - self._loaded():
            raise EngineError(
                f"There is no room for {served.model.name}: it needs {format_bytes(need.bytes)}, and --models-memory "
                f"leaves {format_bytes(max(0, self._most - self._loaded()))} of {format_bytes(self._most)}{stay}",
                "out_of_memory",
            )
        return False  # the model tries what there is, and says what it lacks

    async def _stop(self, served: Served) -> None:
        """End the process of a loaded model when it has no requests."""
        if served.state != READY or served.process is None:
            return
        served.state = STOPPING
        while served.active and served.state == STOPPING:
            served.free.clear()
            await served.free.wait()
        if served.state == STOPPING:
            await served.process.end()
            served.state, served.process, served.need = UNLOADED, None, None
            _note(f"{served.model.name} is unloaded")

    def _ended(self, served: Served, code: int) -> None:
        """A process has ended. If nobody meant it to, its requests end with an error, and the next one starts it."""
        if not self.closing and (served.state == READY or (served.state == STOPPING and served.active)):
            served.state, served.process, served.need = FAILED, None, None
            served.error = ended(served.model.name, code)
            _note(f"The process of {served.model.name} ended {how(code)}; the next request starts it again")
            served.free.set()

    # -- memory ------------------------------------------------------------------------------------------------

    def _loaded(self) -> int:
        """Bytes that loaded models may take."""
        return sum(one.need.bytes for one in self._served.values() if one.need is not None)

    def _left(self) -> int | None:
        """Bytes that --models-memory leaves."""
        return None if self._most is None else max(0, self._most - self._loaded())

    def _reserved(self) -> int:
        """Bytes of the computer's memory that loaded models have not taken yet: blocks that nothing was written to."""
        found = 0
        for one in self._served.values():
            if one.need is not None and one.process is not None and one.need.device == "cpu":
                try:
                    resident = psutil.Process(one.process.pid).memory_info().rss
                except psutil.Error:
                    continue
                found += max(0, one.need.bytes - resident)
        return found

    # -- idle models -------------------------------------------------------------------------------------------

    def usual_keep(self, served: Served) -> float | None:
        """Seconds without requests after which a model is unloaded; None: as long as there is room."""
        minutes = self._config.idle_unload if served.model.idle_minutes is None else served.model.idle_minutes
        return 60 * minutes if minutes else None

    async def _sweep(self) -> None:
        """Unload idle models whose time is up."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for one in self._served.values():
                late = one.keep is not None and time.monotonic() >= one.used + one.keep
                if one.is_idle and late and not one.model.pinned:
                    self.unload(one)


def _seen(loading: asyncio.Task[None]) -> None:
    """Take a task's error: whoever waits for the model gets it, and perhaps nobody waits any more."""
    if not loading.cancelled():
        loading.exception()


def _note(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)

"""One of several models: whether it is in memory, its process, and the requests that it has."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from polarlm.children import how_ended
from polarlm.engine import EngineError
from polarlm.engine.loading.need import Need
from polarlm.engine.state.plan import format_bytes
from polarlm.server.models.process import ModelProcess
from polarlm.server.models.registry import NamedModel
from polarlm.server.running.refused import Refused

# Unloaded → loading, which begins with a download → waiting, if there is no room → loading → loaded → stopping →
# unloaded. One that is given up while it loads or waits is stopping, too. A failed one is loaded again by a request.
UNLOADED, LOADING, WAITING, READY = "unloaded", "loading", "waiting for memory", "loaded"
STOPPING, FAILED = "stopping", "failed"


@dataclass(eq=False)
class Served:
    """A model and its process. `state` is one of the six above."""

    model: NamedModel
    state: str = UNLOADED
    process: ModelProcess | None = None
    need: Need | None = None  # memory that it has, or that is set aside for it
    error: Exception | None = None  # why it failed, if it did
    starts: int = 0
    active: int = 0  # requests that the process has
    used: float = field(default_factory=time.monotonic)  # when a request last began or ended
    keep: float | None = None  # seconds without requests until it is unloaded; None: as long as there is room
    waiting: list[asyncio.Event] = field(default_factory=list)  # an event for each request, set once it is admitted
    free: asyncio.Event = field(default_factory=asyncio.Event)  # set when a request or the process ends
    loading: asyncio.Task[None] | None = None  # it waits for `stopping` first
    stopping: asyncio.Task[None] | None = None

    @property
    def is_loading(self) -> bool:
        """Whether it is loaded, or will be once the process before has ended."""
        return self.loading is not None and not self.loading.done()

    @property
    def expires(self) -> datetime | None:
        """When it will be unloaded if nobody uses it; None if it stays."""
        if self.keep is None or self.model.pinned:
            return None
        return datetime.now(timezone.utc) + timedelta(seconds=self.used + self.keep - time.monotonic())

    def progress(self) -> str:
        if self.state != LOADING or self.process is None or self.process.fetching is None:
            return self.state
        done, total = self.process.fetching
        return f"downloading, {format_bytes(done)} of {format_bytes(total)}" if done < total else self.state

    def touch(self) -> None:
        self.used = time.monotonic()


def ended(name: str, code: int) -> Refused:
    return Refused(
        "model_ended",
        f"The process of {name} {how_ended(code)} while it answered: send the request again, which starts it",
    )


def without_folder(error: EngineError | Refused, path: Path | None) -> EngineError | Refused:
    """`error` for clients, who need not know where the files are."""
    if path is None or isinstance(error, Refused):
        return error
    return EngineError(str(error).replace(f"{path.parent}{os.sep}", ""), error.code)

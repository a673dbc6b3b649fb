"""One of several models: its process as the parent sees it, whether it is in memory, and the requests that it has."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil

from polarlm.children import Child, how_ended, python
from polarlm.engine import EngineError
from polarlm.engine.config import format_bytes
from polarlm.engine.loading.need import Need
from polarlm.engine.storage import files
from polarlm.server.config import ServerConfig
from polarlm.server.models.registry import NamedModel
from polarlm.server.running.refusals import Refusal

_INHERITED_SETTINGS = (  # settings of a child's server that are its parent's
    *("max_body", "max_connections", "max_queue", "max_tokens", "max_sessions_size", "request_seconds"),
    *("reasoning_budget", "parse_special", "hide_cached_tokens", "log_prompts", "context_edits"),
)
_OWNER = "model"  # the file with the name of the model whose sessions are in a folder
_END_SECONDS = 40.0  # for a process to end in order: it lets its answers end for 30
_KILLED_SECONDS = 5.0  # for a killed process to be gone; one that waits for a disk that hangs outlives SIGKILL
_IDLE_SECONDS = 120.0  # without any sign of work, after which a process that loads is given up
_POLL_SECONDS = 1.0  # between two looks for such signs


class ModelProcess:
    """A running process. Its methods belong to one event loop."""

    def __init__(
        self,
        model: NamedModel,
        config: ServerConfig | None,
        on_exit: Callable[[int], object],
        charge: Callable[[str, int], object] = lambda key, tokens: None,
    ) -> None:
        """config: of the parent; with None, the process only fetches the model. on_exit: called with the exit code.
        charge: called with a key's name and the tokens of a request."""
        self._charge = charge
        self.name = model.name
        self.key = secrets.token_urlsafe()  # that its HTTP server asks for
        self.port, self.reads_images = 0, False
        self.fetching: tuple[int, int] | None = None  # bytes that have arrived from the hub, and all
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = loop.create_future()
        self._code.add_done_callback(lambda code: on_exit(code.result()))
        self._child = Child(
            python("polarlm.server.models.child", model.name),  # the name is for lists of processes
            lambda message: loop.call_soon_threadsafe(self._hear, message),
            lambda code: loop.call_soon_threadsafe(self._end, code),
        )
        self.pid = self._child.pid
        server = None if config is None else asdict(_child_config(config, model.name, self.key))
        self._child.tell({"engine": asdict(model.config), "server": server})

    async def fetch(self) -> Path:
        """The path of the model's files, once they are there. Raises EngineError if that fails, or Refusal."""
        return Path((await self._answer())["fetched"]["path"])

    async def need(self, reserved_bytes: Mapping[str, int], most: int | None) -> Need:
        """What the model needs now, as `need` of `loading.need` says. Raises as `fetch` does."""
        self._child.tell({"load": False, "reserved": reserved_bytes, "most": most})
        return Need(**(await self._answer())["fit"])

    async def load(self) -> None:
        """Load the model; return when it takes requests. Raises as `fetch` does."""
        self._child.tell({"load": True})
        reply = (await self._answer())["loaded"]
        self.port, self.reads_images = reply["port"], reply["reads_images"]

    async def end(self) -> None:
        """End the process in order; after 40 seconds, at once."""
        self._child.terminate()
        _, pending = await asyncio.wait([self._code], timeout=_END_SECONDS)
        if pending:
            await self.end_at_once()

    async def end_at_once(self) -> None:
        """Kill the process, and return when it is gone, or after 5 seconds."""
        self._child.kill()
        await asyncio.wait([self._code], timeout=_KILLED_SECONDS)

    async def exit_code(self) -> int:
        return await asyncio.shield(self._code)

    def _hear(self, message: dict[str, Any]) -> None:
        if (progress := message.get("fetching")) is not None:
            self.fetching = (progress["done"], progress["total"])
        elif (used := message.get("used")) is not None:
            self._charge(used["key"], used["tokens"])
        else:
            self._messages.put_nowait(message)

    def _end(self, code: int) -> None:
        self._messages.put_nowait(None)
        self._code.set_result(code)

    async def _answer(self) -> dict[str, Any]:
        """The next message of the process that is no progress. Raises EngineError if it failed, and Refusal if it ended
        or does not work: what it has read changes on a slow disk or line, and its time in a long computation."""
        next_message = asyncio.ensure_future(self._messages.get())
        activity, last_change = self._activity(), time.monotonic()
        try:
            while not next_message.done():
                await asyncio.wait([next_message], timeout=_POLL_SECONDS)
                if (now := self._activity()) != activity:
                    activity, last_change = now, time.monotonic()
                elif time.monotonic() - last_change > _IDLE_SECONDS:
                    sentence = (
                        f"{self.name} was given up: its process neither read nor computed for {_IDLE_SECONDS:.0f} "
                        "seconds, as where a disk hangs; the next request tries again"
                    )
                    raise Refusal("timeout", sentence)
            message = next_message.result()
        finally:
            next_message.cancel()
        if message is None:
            how = how_ended(await self.exit_code())
            raise Refusal("model_ended", f"The process of {self.name} {how} while it loaded")
        if "failed" in message:
            raise EngineError(message["failed"]["message"], message["failed"]["code"])
        return message

    def _activity(self) -> Any:
        """Numbers that change while the process reads or computes."""
        try:
            process = psutil.Process(self.pid)
            bytes_read = process.io_counters().read_bytes if hasattr(process, "io_counters") else 0
            return self.fetching, bytes_read, process.memory_info().rss, process.cpu_times()[:2]
        except psutil.Error:  # it has just ended
            return None


def _child_config(config: ServerConfig, name: str, key: str) -> ServerConfig:
    """The settings of a child's server: the parent's limits of requests, and its own address, key and name."""
    folder = None if config.sessions is None else str(_session_folder(Path(config.sessions).expanduser(), name))
    inherited_settings = {name: getattr(config, name) for name in _INHERITED_SETTINGS}
    return replace(ServerConfig(), api_key=key, alias=name, sessions=folder, **inherited_settings)


def _session_folder(folder: Path, name: str) -> Path:
    """The folder of a model's sessions. A file in it has the model's name: names such as a.b and a_b, or, on some
    disks, A and a, would share a folder, and the second model gets another."""
    name_on_disk = re.sub("[^A-Za-z0-9_-]", "_", name)  # no name may lead elsewhere
    name_on_disk += "_" * files.is_device(name_on_disk)
    with suppress(OSError):  # the process says what is wrong with the folder
        (folder / name_on_disk).mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder / name_on_disk / _OWNER
        if not owner.exists():  # an earlier server wrote no such file
            owner.write_text(name, encoding="utf-8")
        if owner.read_text(encoding="utf-8", errors="replace") != name:
            name_on_disk += f"-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return folder / name_on_disk


# Unloaded → loading, which begins with a download → waiting, if there is no room → loading → loaded → stopping →
# unloaded. One that is given up while it loads or waits is stopping, too. A failed one is loaded again by a request.
UNLOADED, LOADING, WAITING_FOR_MEMORY, READY = "unloaded", "loading", "waiting for memory", "loaded"
STOPPING, FAILED = "stopping", "failed"


@dataclass(eq=False)
class ModelSlot:
    """A model and its process. `state` is one of the six above."""

    model: NamedModel
    state: str = UNLOADED
    process: ModelProcess | None = None
    need: Need | None = None  # memory that it has, or that is set aside for it
    error: Exception | None = None  # why it failed, if it did
    starts: int = 0
    active: int = 0  # requests that the process has
    last_used: float = field(default_factory=time.monotonic)  # when a request last began or ended
    keep_seconds: float | None = None  # seconds without requests until it is unloaded; None: as long as there is room
    waiters: list[asyncio.Event] = field(default_factory=list)  # an event for each request, set once it is admitted
    free: asyncio.Event = field(default_factory=asyncio.Event)  # set when a request or the process ends
    load_task: asyncio.Task[None] | None = None  # it waits for `stop_task` first
    stop_task: asyncio.Task[None] | None = None

    @property
    def is_loading(self) -> bool:
        """Whether it is loaded, or will be once the process before has ended."""
        return self.load_task is not None and not self.load_task.done()

    @property
    def expires(self) -> datetime | None:
        """When it will be unloaded if nobody uses it; None if it stays."""
        if self.keep_seconds is None or self.model.pinned:
            return None
        return datetime.now(timezone.utc) + timedelta(seconds=self.last_used + self.keep_seconds - time.monotonic())

    def progress(self) -> str:
        if self.state != LOADING or self.process is None or self.process.fetching is None:
            return self.state
        done, total = self.process.fetching
        return f"downloading, {format_bytes(done)} of {format_bytes(total)}" if done < total else self.state

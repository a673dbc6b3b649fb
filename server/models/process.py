"""A model's process as its parent sees it: started, told and asked over pipes, ended."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from polarlm.engine import EngineError
from polarlm.engine.loading.need import Need
from polarlm.engine.storage import files
from polarlm.model_loaders.child_python import python
from polarlm.server.config import ServerConfig
from polarlm.server.models.registry import NamedModel
from polarlm.server.running.refused import Refused

_END_SECONDS = 40.0  # for a process to end in order: it lets its answers end for 30


@dataclass(eq=False)
class ModelProcess:
    """A running process. Its methods belong to one event loop."""

    name: str
    key: str  # that its HTTP server asks for
    port: int
    _process: asyncio.subprocess.Process
    _said: asyncio.Queue[dict[str, Any] | None]
    fetching: tuple[int, int] | None = None  # bytes that have arrived from the hub, and all
    _reading: asyncio.Task[None] = field(init=False)

    @classmethod
    async def start(
        cls,
        model: NamedModel,
        config: ServerConfig | None,
        ended: Callable[[int], None],
        reserved: int = 0,
        most: int | None = None,
    ) -> ModelProcess:
        """Start the process of a model. config: that of its parent; None for a process that only fetches the model.

        ended: is called with the exit code. reserved, most: as for `need`.
        """
        key = secrets.token_urlsafe()
        process = await asyncio.create_subprocess_exec(
            *python("polarlm.server.models.child", model.name),  # the name is for lists of processes
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for the parent, which ends its children in order
        )
        started = cls(model.name, key, 0, process, asyncio.Queue())
        started._reading = asyncio.create_task(started._read(ended))
        engine = asdict(model.config)
        server = None if config is None else asdict(_of_child(config, model.name, key))
        started._tell(name=model.name, engine=engine, server=server, reserved=reserved, most=most)
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    async def fetched(self) -> Path:
        """The path of the model's files, once they are there. Raises EngineError if that fails, or Refused."""
        return Path((await self._hear())["fetched"]["path"])

    async def need(self) -> Need:
        """What the model needs. Raises as `fetched` does."""
        return Need(**(await self._hear())["fit"])

    def look_again(self, reserved: int, most: int | None) -> None:
        """Ask for another `need`."""
        self._tell(load=False, reserved=reserved, most=most)

    async def load(self) -> None:
        """Load the model; return when it takes requests. Raises EngineError."""
        self._tell(load=True)
        self.port = (await self._hear())["loaded"]["port"]

    async def end(self) -> None:
        """End the process in order; after 40 seconds, at once."""
        if self._process.returncode is None:
            self._process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self._reading), _END_SECONDS)
        except asyncio.TimeoutError:
            self.kill()
            await self._reading

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def ended(self) -> int:
        """The exit code, once the process has ended."""
        await asyncio.shield(self._reading)
        return self._process.returncode or 0

    def _tell(self, **said: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(said).encode() + b"\n")

    async def _hear(self) -> dict[str, Any]:
        said = await self._said.get()
        if said is None:
            raise Refused("model_ended", f"The process of {self.name} ended while it loaded, {how(await self.ended())}")
        if "failed" in said:
            raise EngineError(said["failed"]["message"], said["failed"]["code"])
        return said

    async def _read(self, ended: Callable[[int], None]) -> None:
        """Queue what the process says until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            if (progress := said.get("fetching")) is not None:
                self.fetching = (progress["done"], progress["total"])
            else:
                self._said.put_nowait(said)
        self._said.put_nowait(None)
        ended(await self._process.wait())


def how(code: int) -> str:
    """How a process ended, in words."""
    return f"with exit code {code}" if code >= 0 else f"by signal {-code}"


def _of_child(config: ServerConfig, name: str, key: str) -> ServerConfig:
    """The settings of a child's server: those of its parent about requests, and an address and a key of its own."""
    folder = None
    if config.sessions is not None:
        own = re.sub("[^A-Za-z0-9_-]", "_", name)  # no name may lead elsewhere
        own += "_" * files.is_device(own)
        folder = str(Path(config.sessions) / own)
    return replace(
        ServerConfig(),
        api_key=key,
        max_body=config.max_body,
        max_connections=config.max_connections,
        max_queue=config.max_queue,
        max_tokens=config.max_tokens,
        request_seconds=config.request_seconds,
        sessions=folder,
        max_sessions_size=config.max_sessions_size,
        parse_special=config.parse_special,
        hide_cached_tokens=config.hide_cached_tokens,
        log_prompts=config.log_prompts,
    )

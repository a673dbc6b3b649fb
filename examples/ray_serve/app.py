"""The deployment: replicas of the engine, each with the server's whole HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polarlm.engine import Engine, EngineConfig
from polarlm.engine.cli.flags import FlagError
from polarlm.server.config import ServerConfig, read_command_line
from polarlm.server.http.app import create_app
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver

_NOT_HERE = {
    "host": "Ray listens, where http_options says",
    "port": "Ray listens, where http_options says",
    "socket_port": "a replica has no socket for JSON lines",
    "unix": "a replica has no socket for JSON lines",
    "sessions": "only the replica that loads a session has it",
}


class EngineReplica:
    """One engine, with as many threads as Ray gives it cores, on the GPU that Ray gives it if there is one."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        resources = ray.get_runtime_context().get_assigned_resources()
        device = "cuda" if resources.get("GPU") else "cpu"
        model, config = read({"device": device, "threads": max(1, int(resources.get("CPU", 1))), **settings})
        journal.set_up()
        self._engine = await asyncio.to_thread(Engine.load, model.weights, config=model)
        self._driver = Driver(self._engine, config)
        await self._driver.start()
        name = serve.get_replica_context().replica_id.unique_id
        self._app = _Named(journal.JournalMiddleware(create_app(self._driver, config)), name)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def check_health(self) -> None:
        """Raises if the engine does not answer; Ray then replaces the replica."""
        await self._driver.status()

    async def __del__(self) -> None:
        """Called by Ray when no request is under way."""
        await self._driver.stop()
        self._engine.close()


class _Named:
    """ASGI middleware: the header x-replica of a response names the replica."""

    def __init__(self, app: ASGIApp, name: str) -> None:
        self._app, self._name = app, name.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-replica", self._name)]}
            await send(message)

        await self._app(scope, receive, send_named)


def read(settings: Mapping[str, Any]) -> tuple[EngineConfig, ServerConfig]:
    """The configurations of a replica from flags of `polarlm serve` without their dashes, as in {"ctx-size": 4096}.

    True stands for a flag without a value, a list for a flag that is repeated. Raises FlagError or EngineError with a
    sentence that names the flag.
    """
    flags: list[str] = []
    for name, setting in settings.items():
        for value in setting if isinstance(setting, list) else [setting]:
            if value is not False:
                flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    model, config = read_command_line(flags)
    for field, reason in _NOT_HERE.items():
        if getattr(config, field) != getattr(ServerConfig, field):
            raise FlagError(f"--{field.replace('_', '-')} cannot be set here: {reason}")
    return model, config


Replica = serve.deployment(
    name="Replica",
    max_ongoing_requests=16,
    max_queued_requests=256,
    graceful_shutdown_timeout_s=600,
    max_constructor_retry_count=3,
    request_router_config={
        "request_router_class": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
    },
)(serve.ingress()(EngineReplica))


def build(settings: dict[str, Any]) -> serve.Application:
    """The application of a configuration's `args`. Raises FlagError or EngineError."""
    read(settings)
    return Replica.bind(settings)

"""The application: replicas of the engine, each with the whole HTTP API, and an ingress that chooses among them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from examples.ray_serve.prefixes import prefix_key
from examples.ray_serve.settings import read
from polarlm.engine import Engine
from polarlm.server.http.app import create_app, error_shapes
from polarlm.server.http.bodies import read_bytes
from polarlm.server.http.errors import ApiError, api_error
from polarlm.server.running import journal, refused
from polarlm.server.running.driver import Driver

# Of a request's scope; the rest belongs to a process.
_SENT_ON = {"type", "http_version", "method", "scheme", "query_string", "headers", "client", "server"}
_ATTEMPTS = 3


class EngineReplica:
    """One engine, with as many threads as Ray gives it cores, on the GPU that Ray gives it if there is one."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray awaits it
        self._ends = AsyncExitStack()
        given = ray.get_runtime_context().get_assigned_resources()
        mine = {"device": "cuda" if given.get("GPU") else "cpu", "threads": max(1, int(given.get("CPU", 1)))}
        model, config = read({**mine, **settings})
        journal.set_up()
        engine = await asyncio.to_thread(Engine.load, model.weights, config=model)
        self._ends.callback(engine.close)
        self._driver = Driver(engine, config)
        await self._driver.start()
        self._ends.push_async_callback(self._driver.stop)
        self._app = journal.Journaled(create_app(self._driver, config))
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def __call__(self, _key: str, scope: Scope, body: bytes) -> AsyncGenerator[list[Message], None]:
        """The ASGI messages of the response to a request, in lists of those that are there at the same time."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            while not requests:
                await asyncio.sleep(3600)  # a client that disconnects ends this task
            return requests.pop()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-replica", self._name)]}
            messages.put_nowait(message)

        async def respond() -> None:
            try:
                await self._app(scope, receive, send)
            finally:
                messages.put_nowait(None)

        responding = asyncio.create_task(respond())
        try:
            ended = False
            while not ended:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                ended = ready[-1] is None
                if found := [message for message in ready if message is not None]:
                    yield found
            await responding
        finally:
            responding.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await responding

    async def check_health(self) -> None:
        """Raises if no answer comes from the engine."""
        await self._driver.status()

    async def __del__(self) -> None:
        """Called when no request is under way."""
        await self._ends.aclose()


class _Forward:
    """An ASGI application whose responses come from replicas."""

    def __init__(self, replicas: DeploymentHandle, max_body: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._max_body = max_body
        self._errors = error_shapes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = bytes(await read_bytes(Request(scope, receive), self._max_body))
            path = scope["path"].removeprefix(scope.get("root_path", ""))  # without the application's route_prefix
            sent_on = {**{name: scope[name] for name in _SENT_ON if name in scope}, "path": path}
            await self._forward(prefix_key(body), sent_on, body, send)
        except ClientDisconnect:
            return
        except ApiError as error:
            await self._errors.response(scope["path"], error)(scope, receive, send)

    async def _forward(self, key: str, scope: Scope, body: bytes, send: Send) -> None:
        """Send the response of a replica, or of another one if the first dies before it has sent anything."""
        for _ in range(_ATTEMPTS):
            response: Any = self._replicas.remote(key, scope, body)
            begun = False
            try:
                async for messages in response:
                    for message in messages:
                        begun = True
                        await send(message)
                return
            except BackPressureError:
                raise api_error(refused.busy("All replicas are busy", 1)) from None
            except RayActorError:
                if begun:
                    raise
            finally:
                response.cancel()  # where the client has gone
        raise ApiError(503, "Every replica that has tried to answer this request has died", "replica_died")


class PrefixIngress:
    """The HTTP API of all replicas: it reads the beginning of each prompt, which their router goes by."""

    def __init__(self, replicas: DeploymentHandle, max_body: int) -> None:
        self._forward = _Forward(replicas, max_body)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Starlette(routes=[Route("/{path:path}", self._forward)])


Replica = serve.deployment(
    name="Replica",
    max_ongoing_requests=16,
    max_queued_requests=256,
    graceful_shutdown_timeout_s=600,
    max_constructor_retry_count=3,
    request_router_config={"request_router_class": "examples.ray_serve.router:PrefixRouter"},
)(EngineReplica)
Ingress = serve.deployment(
    name="Ingress",
    max_ongoing_requests=1000,
    graceful_shutdown_timeout_s=600,
    ray_actor_options={"num_cpus": 0},
)(serve.ingress()(PrefixIngress))


def build(settings: dict[str, Any]) -> serve.Application:
    """The application, with settings of its replicas. Raises FlagError or EngineError if one is wrong."""
    _, config = read(settings)
    return Ingress.bind(Replica.bind(settings), config.max_body)

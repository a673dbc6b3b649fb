"""The HTTP application. Its caller starts and stops the driver, in the same event loop."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import release
from polarlm.engine.storage.payloads import Payloads
from polarlm.server.config import ServerConfig
from polarlm.server.http.conversations import Conversations
from polarlm.server.http.dialects import dialects
from polarlm.server.http.documents import Documents
from polarlm.server.http.errors import ApiError, ErrorShapes
from polarlm.server.http.generation import Generation
from polarlm.server.http.guard import Guard
from polarlm.server.http.openai.chat import OpenAI
from polarlm.server.http.openai.completions import Completions
from polarlm.server.http.openai.embeddings import Embeddings
from polarlm.server.http.openai.rerank import Rerank
from polarlm.server.http.openai.shapes import CHAT
from polarlm.server.http.page import page
from polarlm.server.http.plain.blocks import Blocks
from polarlm.server.http.plain.mcp_tools import McpTools
from polarlm.server.http.plain.metrics import exposition
from polarlm.server.http.plain.sessions import Sessions
from polarlm.server.http.plain.stats import asked_tokens, stats
from polarlm.server.http.plain.tokens import Tokens
from polarlm.server.http.warnings import HEADER
from polarlm.server.mcp.servers import McpServers
from polarlm.server.reading.values import BadRequest
from polarlm.server.running.driver import Driver
from polarlm.server.running.refused import Refused


def create_app(driver: Driver, config: ServerConfig, servers: McpServers | None = None) -> Starlette:
    """The ASGI application over `driver`: OpenAI's endpoints, the dialects, sessions, tokens, status and the page.

    servers: the MCP servers that the page may use.
    """
    api = _Api(driver, config)
    routes = [
        *with_and_without_v1("/chat/completions", Generation(driver, OpenAI(CHAT)).serve, methods=["POST"]),
        *with_and_without_v1("/completions", Generation(driver, Completions()).serve, methods=["POST"]),
        *with_and_without_v1("/models", api.models),
        *with_and_without_v1("/models/{name:path}", api.model),
        *with_and_without_v1("/health", api.health),
        *Embeddings(driver).routes(),
        *Rerank(driver).routes(),
        *Tokens(driver).routes(),
        Route("/ping", api.health),  # vLLM's other name of /health
        Route("/version", api.version),
        Route("/metrics", api.metrics),
        Route("/stats", api.stats),
        *Sessions(driver).routes(),
        *Conversations(config).routes(),
        *Documents(config).routes(),
        *McpTools(config, servers).routes(),
        *_blocks(driver, config),
        *(route for dialect in dialects() for route in dialect.routes(driver)),
        Route("/", page),
    ]
    shapes = error_shapes()
    errors: tuple[type[Exception], ...] = (ApiError, BadRequest, EngineError, Refused, HTTPException, Exception)
    return Starlette(
        routes=routes,
        middleware=[*cors(config), Middleware(Guard, config=config, errors=shapes)],
        exception_handlers={**dict.fromkeys(errors, shapes.handle), ClientDisconnect: no_response},
    )


def error_shapes() -> ErrorShapes:
    """The shapes of errors at the paths of every API."""
    return ErrorShapes({first: dialect.error_body for dialect in dialects() for first in dialect.PATHS})


def with_and_without_v1(path: str, endpoint: Callable[[Request], Awaitable[Response]], **more: Any) -> list[Route]:
    """The routes of one of OpenAI's endpoints, with and without /v1: users configure base URLs of both kinds."""
    return [Route(prefix + path, endpoint, **more) for prefix in ("/v1", "")]


def _blocks(driver: Driver, config: ServerConfig) -> list[Route]:
    """The routes of kept blocks; none without --share-blocks."""
    engine = driver.engine
    if not config.share_blocks or engine.kept_blocks is None:
        return []
    return Blocks(engine.kept_blocks, Payloads(engine.cache_shape).most_object_bytes).routes()


def cors(config: ServerConfig) -> list[Middleware]:
    """The middleware that lets web pages from other origins use the API; none without --cors-origin."""
    if not config.cors_origin:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=config.cors_origin,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # Authorization, and the headers of OpenAI's client for browsers
            allow_private_network=True,  # a page on the internet, a server on the user's machine
            expose_headers=["Retry-After", "X-Should-Retry", HEADER],
        )
    ]


ANTHROPIC = "anthropic-version"  # the header of Anthropic's clients


async def no_response(_request: Request, _error: Exception) -> Any:
    """Returns None: the client is gone."""


class _Api:
    def __init__(self, driver: Driver, config: ServerConfig) -> None:
        self._driver = driver
        self._config = config
        self._since = int(time.time())

    async def models(self, request: Request) -> Response:
        """The model and its adapters, in OpenAI's shape, or in Anthropic's for its clients."""
        found = [self._model(request, name) for name in self._names()]
        if ANTHROPIC in request.headers:
            ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]}
            return JSONResponse({"data": found, "has_more": False, **ends})
        return JSONResponse({"object": "list", "data": found})

    async def model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) not in self._names():
            raise ApiError(404, "There is no such model here; /v1/models lists what there is", "model_not_found")
        return JSONResponse(self._model(request, name))

    def _names(self) -> list[str]:
        """Names that requests may give as the model: its own, and those of its adapters."""
        return [self._driver.engine.model.name, *self._driver.engine.adapters.by_name]

    def _model(self, request: Request, name: str) -> dict[str, Any]:
        engine = self._driver.engine
        if ANTHROPIC in request.headers:
            created = datetime.fromtimestamp(self._since, timezone.utc).isoformat().replace("+00:00", "Z")
            return {"type": "model", "id": name, "display_name": name, "created_at": created}
        return {
            "id": name,
            "object": "model",
            "created": self._since,
            "owned_by": "polarlm",
            "context_length": engine.context,
            **({"parent": engine.model.name} if name in engine.adapters.by_name else {}),
        }

    async def health(self, _request: Request) -> Response:
        """200 while the server accepts requests, 503 while it closes."""
        closing = self._driver.closing
        return JSONResponse({"status": "closing" if closing else "ok"}, 503 if closing else 200)

    async def version(self, _request: Request) -> Response:
        """{"version"}, as vLLM's endpoint."""
        return JSONResponse({"version": release() or "0.0.0"})

    async def metrics(self, _request: Request) -> Response:
        hidden = self._config.hide_cached_tokens
        now, engine = await self._driver.status(), self._driver.engine
        page = exposition(engine, self._driver.snapshot(), now, without_cached=hidden)
        return Response(page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def stats(self, request: Request) -> Response:
        """/stats?tokens=N adds the memory of a sequence of N tokens."""
        tokens = asked_tokens(request.query_params)
        now, done = await self._driver.status(), self._driver.snapshot()
        return JSONResponse(stats(self._driver.engine, done, now, tokens))

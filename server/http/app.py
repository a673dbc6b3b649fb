"""The HTTP application. Its caller starts and stops the driver, in the same event loop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import release
from polarlm.server.config import ServerConfig
from polarlm.server.http.conversations import Conversations
from polarlm.server.http.dialects import dialects
from polarlm.server.http.documents import Documents
from polarlm.server.http.errors import ApiError, ErrorShapes
from polarlm.server.http.generation import Generation
from polarlm.server.http.guard import Guard
from polarlm.server.http.model_details import utc
from polarlm.server.http.openai.chat import ChatCompletions
from polarlm.server.http.openai.completions import Completions
from polarlm.server.http.openai.embeddings import Embeddings
from polarlm.server.http.openai.rerank import Rerank, Scores
from polarlm.server.http.page import page
from polarlm.server.http.plain.adapters import AdapterChanges
from polarlm.server.http.plain.mcp_tools import McpTools
from polarlm.server.http.plain.metrics import exposition
from polarlm.server.http.plain.sessions import Sessions
from polarlm.server.http.plain.stats import requested_tokens, stats
from polarlm.server.http.plain.tokens import Tokens
from polarlm.server.http.warnings import HEADER
from polarlm.server.mcp.session import McpServers
from polarlm.server.reading.values import BadRequest
from polarlm.server.running.driver import Driver
from polarlm.server.running.listening import HEALTH_PATHS
from polarlm.server.running.refusals import Refusal

_ANTHROPIC = "anthropic-version"  # the header of Anthropic's clients
_UNREAD_KEYS = {"api_key_file": "wrong or unreadable, as the log says: keys that were read before stay valid"}


def create_app(driver: Driver, config: ServerConfig, servers: McpServers | None = None) -> Starlette:
    """The ASGI application over `driver`. servers: the MCP servers that the page may use."""
    front = _OneModel(driver, config)
    routes = [
        *with_and_without_v1("/chat/completions", Generation(driver, ChatCompletions()).serve, methods=["POST"]),
        *with_and_without_v1("/completions", Generation(driver, Completions()).serve, methods=["POST"]),
        *Embeddings(driver).routes(),
        *Rerank(driver).routes(),
        *Scores(driver).routes(),
        *Tokens(driver).routes(),
        Route("/stats", front.stats),
        *Sessions(driver).routes(),
        *AdapterChanges(driver).routes(),
        *(route for dialect in dialects() for route in dialect.routes(driver)),
    ]
    return front.application(routes, servers)


class Front(ABC):
    """What an application of one model and one of several have in common: lists of models, monitors, the chat page."""

    def __init__(self, config: ServerConfig, closing: Callable[[], bool]) -> None:
        """closing: whether new requests are refused because the server is closing."""
        self._config, self._closing = config, closing
        self._start_time = int(time.time())

    def application(self, routes: Sequence[Route], servers: McpServers | None) -> Starlette:
        """The ASGI application with further routes. servers: the MCP servers that the page may use."""
        config, shapes = self._config, error_shapes()
        errors: tuple[type[Exception], ...] = (ApiError, BadRequest, EngineError, Refusal, HTTPException, Exception)
        handlers: dict[Any, Any] = {**dict.fromkeys(errors, shapes.handle), ClientDisconnect: _no_response}
        common = [
            *with_and_without_v1("/models", self.models),
            *with_and_without_v1("/models/{name:path}", self.model),
            *(Route(path, self.health) for path in HEALTH_PATHS),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            *Conversations(config).routes(),
            *Documents(config).routes(),
            *McpTools(config, servers).routes(),
            Route("/", page),
        ]
        return Starlette(
            routes=[*routes, *common],
            middleware=[*_cors(config), Middleware(Guard, config=config, errors=shapes)],
            exception_handlers=handlers,
        )

    @abstractmethod
    def list_models(self) -> dict[str, Mapping[str, Any]]:
        """The models that requests may name, with fields that OpenAI's lists do not have."""

    @abstractmethod
    def find(self, name: str) -> tuple[str, Mapping[str, Any]]:
        """One of them. Raises ApiError or Refusal."""

    @abstractmethod
    async def metrics(self, request: Request) -> Response:
        """/metrics, for Prometheus."""

    async def models(self, request: Request) -> Response:
        """The models, in OpenAI's shape, or in Anthropic's for its clients."""
        models = [self._entry(request, *model) for model in self.list_models().items()]
        if _ANTHROPIC in request.headers:
            ids = [model["id"] for model in models] or [None]
            return JSONResponse({"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})
        return JSONResponse({"object": "list", "data": models})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._entry(request, *self.find(request.path_params["name"])))

    def _entry(self, request: Request, name: str, more: Mapping[str, Any]) -> dict[str, Any]:
        if _ANTHROPIC in request.headers:
            created = utc(datetime.fromtimestamp(self._start_time, timezone.utc))
            return {"type": "model", "id": name, "display_name": name, "created_at": created}
        return {"id": name, "object": "model", "created": self._start_time, "owned_by": "polarlm", **more}

    async def health(self, _request: Request) -> Response:
        """200 while the server accepts requests, 503 while it closes."""
        status, code = ("closing", 503) if self._closing() else ("ok", 200)
        return JSONResponse({"status": status, **(_UNREAD_KEYS if self._config.keys.has_problem() else {})}, code)

    async def version(self, _request: Request) -> Response:
        return JSONResponse({"version": release() or "0.0.0"})


class _OneModel(Front):
    def __init__(self, driver: Driver, config: ServerConfig) -> None:
        super().__init__(config, lambda: driver.is_closing)
        self._driver = driver

    def list_models(self) -> dict[str, Mapping[str, Any]]:
        engine = self._driver.engine
        takes = {"input_modalities": ["text", *(["image"] if self._driver.engine.reads_images else [])]}
        fields = {"context_length": engine.context, "architecture": {**takes, "output_modalities": ["text"]}}
        return {
            engine.model.name: fields,
            **dict.fromkeys(engine.adapters.by_name, fields | {"parent": engine.model.name}),
        }

    def find(self, name: str) -> tuple[str, Mapping[str, Any]]:
        if name not in (models := self.list_models()):
            raise ApiError(404, "There is no such model here; /v1/models lists what there is", "model_not_found")
        return name, models[name]

    async def metrics(self, _request: Request) -> Response:
        hides_cached = self._config.hide_cached_tokens
        status, engine = await self._driver.status(), self._driver.engine
        return exposition(engine, self._driver.snapshot(), status, without_cached=hides_cached)

    async def stats(self, request: Request) -> Response:
        """/stats?tokens=N adds the memory of a sequence of N tokens."""
        tokens = requested_tokens(request.query_params)
        status, totals = await self._driver.status(), self._driver.snapshot()
        rereads = self._driver.recent_prompts.last_hour()
        return JSONResponse(stats(self._driver.engine, totals, status, tokens, rereads))


def error_shapes() -> ErrorShapes:
    return ErrorShapes({first: dialect.error_body for dialect in dialects() for first in dialect.PATHS})


def with_and_without_v1(path: str, endpoint: Callable[[Request], Awaitable[Response]], **more: Any) -> list[Route]:
    """The routes of one of OpenAI's endpoints, with and without /v1: users configure base URLs of both kinds."""
    return [Route(prefix + path, endpoint, **more) for prefix in ("/v1", "")]


def _cors(config: ServerConfig) -> list[Middleware]:
    """The middleware that lets web pages from other origins use the API; none without --cors-origin."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.cors_origin,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # Authorization, and the headers of OpenAI's client for browsers
        allow_private_network=True,  # a page on the internet, a server on the user's machine
        expose_headers=["Retry-After", "X-Should-Retry", HEADER],
    )
    return [cors] if config.cors_origin else []


async def _no_response(_request: Request, _error: Exception) -> Any:
    """Returns None: the client is gone."""

"""The HTTP application of several models: lists, loading and unloading; all else is passed on to a model's process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm import model_loaders
from polarlm.engine import EngineError
from polarlm.model_loaders import LoadError, hub
from polarlm.server.config import ServerConfig
from polarlm.server.http.app import Front, error_shapes
from polarlm.server.http.bodies import read_body
from polarlm.server.http.errors import ApiError, api_error
from polarlm.server.http.model_details import NEVER, list_entry, ollama_version, show_response, utc
from polarlm.server.http.plain.metrics import counters, gauges, merge_models, page
from polarlm.server.http.streams import LINES, EventStream, while_connected
from polarlm.server.http.uvicorn_server import Web
from polarlm.server.http.warnings import warn
from polarlm.server.mcp.session import McpServers
from polarlm.server.models.process import FAILED, LOADING, READY, STOPPING, WAITING_FOR_MEMORY, ModelProcess, ModelSlot
from polarlm.server.models.proxy import Proxy
from polarlm.server.models.registry import NamedModel, Registry, in_words
from polarlm.server.models.supervisor import Supervisor
from polarlm.server.reading.fields import MODEL_FIELDS, unknown_fields
from polarlm.server.reading.values import BadRequest, flag, text
from polarlm.server.running import journal
from polarlm.server.running.listening import quiet_accept_errors
from polarlm.server.running.refusals import Refusal
from polarlm.server.serving import serve_until_signal

__all__ = ["Registry", "create_models_app", "in_words", "serve"]

# Paths that a model's process answers, by method; those with * also without /v1.
POST_PATHS = (
    *("*/chat/completions", "*/completions", "*/embeddings", "*/chat/completions/input_tokens"),
    *("*/rerank", "*/reranking", "/v2/rerank", "*/score", "/pooling"),
    *("*/responses", "*/responses/compact", "*/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"),
    *("/completion", "/infill", "/embedding", "/apply-template", "/tokenize", "/detokenize"),
    *("/sessions/save", "/sessions/load", "/props", "/slots/{slot}"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
_PROGRESS_SECONDS = 0.5  # between two lines of progress
_PULLS_AT_ONCE = 2  # models that are downloaded for clients; others wait

GET_PATHS = ("/props", "/slots", "/lora-adapters", "/stats", "/sessions", "/v1/packs")


def create_models_app(
    supervisor: Supervisor, proxy: Proxy, config: ServerConfig, servers: McpServers | None = None
) -> Starlette:
    """The ASGI application over the models' processes. servers: the MCP servers that the page may use."""
    front = _SeveralModels(supervisor, proxy, config)
    routes = [
        Route("/models/load", front.load, methods=["POST"]),
        Route("/models/unload", front.unload, methods=["POST"]),
        Route("/api/tags", front.tags),
        Route("/api/ps", front.running),
        Route("/api/show", front.show, methods=["POST"]),
        Route("/api/pull", front.pull, methods=["POST"]),
        Route("/api/version", ollama_version),
        *(Route(path, proxy.serve, methods=["POST"]) for path in expand_v1(POST_PATHS)),
        *(Route(path, proxy.serve) for path in expand_v1(GET_PATHS)),
        Route("/sessions/{name}", proxy.serve, methods=["DELETE"]),
    ]
    return front.application(routes, servers)


def expand_v1(paths: tuple[str, ...]) -> list[str]:
    """The paths, those with * twice: with /v1 and without."""
    return [path.replace("*", prefix) for path in paths for prefix in (("/v1", "") if path[0] == "*" else ("",))]


async def serve(registry: Registry, config: ServerConfig, http: socket.socket, ready: Callable[[], None]) -> None:
    """Serve the models at a listening socket until a signal arrives. ready: is called when requests are taken."""
    asyncio.get_running_loop().set_exception_handler(quiet_accept_errors())
    supervisor, servers = Supervisor(registry, config), McpServers(config)
    proxy = Proxy(supervisor, config, error_shapes())
    app = create_models_app(supervisor, proxy, config, servers)
    web = Web(journal.JournalMiddleware(app), config, http)
    try:
        await web.start()
        ends = asyncio.Event()
        closing = (supervisor, servers)
        await serve_until_signal(ends, [web], ready, lambda: asyncio.gather(*(one.close() for one in closing)))
    finally:
        await servers.close()
        await supervisor.close()
        await proxy.close()


class _SeveralModels(Front):
    def __init__(self, supervisor: Supervisor, proxy: Proxy, config: ServerConfig) -> None:
        super().__init__(config, lambda: supervisor.is_closing)
        self._supervisor, self._proxy = supervisor, proxy
        self._read: dict[tuple[str, float], dict[str, Any]] = {}  # entries of `_entry_of_ollama`
        self._pulls = asyncio.Semaphore(_PULLS_AT_ONCE)

    def list_models(self) -> dict[str, Mapping[str, Any]]:
        return {one.model.name: _router_fields(one) for one in self._supervisor.all()}

    def find(self, name: str) -> tuple[str, Mapping[str, Any]]:
        slot = self._supervisor.find(name)
        return slot.model.name, _router_fields(slot)

    async def load(self, request: Request) -> Response:
        """POST /models/load: begins to load a model; /models tells when it is. Raises ApiError or Refusal."""
        slot, warnings = await self._find_named(request)
        if slot.is_loading or slot.state == READY:
            raise ApiError(400, f"{slot.model.name} is {slot.state} already", "invalid_request", "model")
        self._supervisor.begin_load(slot)
        return warn(JSONResponse({"success": True}), warnings)

    async def unload(self, request: Request) -> Response:
        """POST /models/unload: ends a model's process after its answers, and a load or download at once."""
        slot, warnings = await self._find_named(request)
        if not slot.is_loading and slot.state != READY:
            raise ApiError(400, f"{slot.model.name} is {slot.state}, not loaded", "invalid_request", "model")
        self._supervisor.give_up(slot)
        return warn(JSONResponse({"success": True}), warnings)

    async def _find_named(self, request: Request) -> tuple[ModelSlot, list[str]]:
        """The model that a body names, and sentences on its unknown fields. Raises ApiError, BadRequest or Refusal."""
        body = await read_body(request, self._config.max_body)
        name = text("model", body.get("model") or body.get("name") or "")
        if not name:
            raise BadRequest("model", f"model must name one of {in_words(self._supervisor.registry.models())}")
        return self._supervisor.find(name), unknown_fields(body, MODEL_FIELDS)

    async def tags(self, _request: Request) -> Response:
        slots = self._supervisor.all()
        return JSONResponse({"models": [await asyncio.to_thread(self._entry_of_ollama, one.model) for one in slots]})

    async def running(self, _request: Request) -> Response:
        entries = []
        for one in self._supervisor.known():
            if one.state in (READY, STOPPING):
                expires, need = one.expires, one.need
                size, device, tokens = (need.bytes, need.device, need.tokens) if need else (0, "cpu", 0)
                more: dict[str, Any] = {"size": size, "size_vram": 0 if device == "cpu" else size}
                more |= {"expires_at": NEVER if expires is None else utc(expires), "context_length": tokens}
                entries.append(await asyncio.to_thread(self._entry_of_ollama, one.model) | more)
        return JSONResponse({"models": entries})

    async def show(self, request: Request) -> Response:
        """POST /api/show: a model's template and shape, without loading it. Raises ApiError, BadRequest or Refusal."""
        slot, warnings = await self._find_named(request)
        model = slot.model
        if model.path is None:
            raise Refusal("model_not_loaded", f"{model.name} has to be fetched first: pull it, or ask it something")
        try:
            return warn(JSONResponse(await asyncio.to_thread(self._read_model, model, model.path)), warnings)
        except LoadError as error:
            raise ApiError(500, str(error), "model_unavailable") from None

    def _read_model(self, model: NamedModel, path: Path) -> dict[str, Any]:
        """The details of a model for Ollama's clients, from its files. Raises LoadError."""
        files = model_loaders.load(path)
        try:
            return show_response(files, model.config.ctx_size or files.config.max_context, self._entry_of_ollama(model))
        finally:
            files.weights.close()

    def _entry_of_ollama(self, model: NamedModel) -> dict[str, Any]:
        """An entry of /api/tags, without details if the model has to be fetched yet or its files are wrong. What is
        read from files is kept as long as these do not change."""
        path, names = model.path, {"name": model.name, "model": model.name}
        if path is None:
            return _UNREAD_ENTRY | names
        try:
            key = (str(path), path.stat().st_mtime)
            if key not in self._read:
                config, weights, dtype = model_loaders.load_weights(path)
                try:
                    self._read[key] = list_entry(model.name, config, weights, dtype, path.is_dir())
                finally:
                    weights.close()
            return self._read[key] | names
        except (LoadError, OSError):
            return _UNREAD_ENTRY | names

    async def pull(self, request: Request) -> Response:
        """POST /api/pull: downloads a model of the hub, and adds it. Raises ApiError or BadRequest."""
        body = await read_body(request, self._config.max_body)
        name = text("model", body.get("model") or body.get("name") or "")
        is_stream = flag("stream", True if body.get("stream") is None else body["stream"])
        lines = self._pull_lines(name)
        if is_stream:
            return EventStream(lines, LINES)
        last = (await while_connected(request.receive, _collect(lines)))[-1]
        if "error" in last:
            raise ApiError(500, str(last["error"]), "model_unavailable")
        return JSONResponse(last)

    async def _pull_lines(self, name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Lines of progress; an error after the first is the last line. Raises ApiError before that."""
        registry = self._supervisor.registry
        model = registry.find(name) if name else None
        if model is not None and model.path is not None:
            yield {"status": "success"}
            return
        if not self._config.allow_pull:
            raise ApiError(501, "This server pulls no models: start it with --allow-pull", "not_supported", "model")
        hub_name = _hub_name(name)
        yield {"status": "pulling manifest"}
        try:
            async with self._pulls, aclosing(_download_lines(registry, hub_name)) as lines:
                async for line in lines:
                    yield line
        except (EngineError, Refusal) as error:
            yield {"error": api_error(error).message}

    async def metrics(self, request: Request) -> Response:
        """The models' states, and the metrics of loaded ones; with ?model=NAME, those of one of them."""
        if request.query_params.get("model"):
            return await self._proxy.serve(request)
        pages, slots = await self._proxy.metrics(), {one.model.name: one for one in self._supervisor.known()}
        is_loaded = {name: one.state == READY for name, one in slots.items()}
        up = {name: text is not None for name, text in pages.items()}
        starts = {name: one.starts for name, one in slots.items()}
        active = {name: one.active for name, one in slots.items()}
        states = [
            gauges("polarlm_model_loaded", "Whether a model is in memory", "model", is_loaded),
            gauges("polarlm_model_up", "Whether a loaded model gave its metrics in time", "model", up),
            counters("polarlm_model_starts", "How often its process was started", "model", starts),
            gauges("polarlm_model_requests", "Requests that it has", "model", active),
        ]
        return page(states, merge_models({name: text for name, text in pages.items() if text is not None}))


async def _collect(lines: AsyncGenerator[dict[str, Any], None]) -> list[dict[str, Any]]:
    async with aclosing(lines):
        return [line async for line in lines]


def _hub_name(name: str) -> hub.HubName:
    """The model that a client names, as user/repo:QUANT or hf.co/user/repo:QUANT. Raises ApiError."""
    try:
        return hub.parse(name)
    except LoadError as error:
        raise ApiError(400, str(error), "invalid_request", "model") from None


async def _download_lines(registry: Registry, name: hub.HubName) -> AsyncGenerator[dict[str, Any], None]:
    """Yield lines of Ollama's progress while the model is downloaded; then it is in the registry. Closing the generator
    ends the download, which a later one continues. Raises EngineError or Refusal."""
    process = ModelProcess(registry.hub_model(str(name)), None, lambda code: None)
    fetch = asyncio.create_task(process.fetch())
    try:
        while not fetch.done():
            await asyncio.wait([fetch], timeout=_PROGRESS_SECONDS)
            if process.fetching is not None:
                done, total = process.fetching
                yield {"status": f"pulling {name}", "digest": str(name), "total": total, "completed": done}
        path = fetch.result()
        if path.is_file() and name.quantization is None:  # the next start takes the same file
            name = replace(name, quantization=hub.quantization_of(path))
        registry.add(registry.hub_model(str(name)))
        yield {"status": "success"}
    finally:
        fetch.cancel()
        await asyncio.gather(fetch, process.end_at_once(), return_exceptions=True)


def _router_fields(slot: ModelSlot) -> dict[str, Any]:
    """The fields of llama-server's router in OpenAI's lists: aliases, and "unloaded", "loading", "loaded"."""
    value = {STOPPING: READY, WAITING_FOR_MEMORY: LOADING}.get(slot.state, slot.state)
    status: dict[str, Any] = {"value": value, "args": []}
    if slot.state == FAILED:
        status |= {"value": "unloaded", "failed": True, "error": str(slot.error or "an unexpected error")}
    fields: dict[str, Any] = {
        "aliases": list(slot.model.aliases),
        "status": status,
        "pinned": slot.model.pinned,
    }
    if slot.need is not None and slot.need.tokens:
        fields |= {"context_length": slot.need.tokens, "memory": slot.need.bytes}
    return fields


_EMPTY_DETAILS = dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), "")
_UNREAD_ENTRY = {
    **{"modified_at": "1970-01-01T00:00:00Z", "size": 0, "digest": ""},
    "details": _EMPTY_DETAILS | {"families": []},
}

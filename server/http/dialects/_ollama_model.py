"""Ollama's endpoints about the model: its name, its shape, and whether it is loaded."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polarlm.model_loaders.forks import cached_property
from polarlm.server.http.bodies import read_body
from polarlm.server.http.described import OLLAMA, listed, shown
from polarlm.server.http.errors import ApiError
from polarlm.server.http.streams import LINES
from polarlm.server.reading.values import flag, text
from polarlm.server.running.driver import Driver

_NEVER = "9999-12-31T23:59:59Z"  # the time at which the model is unloaded


class ModelFacts:
    """Endpoints about the one model of this server, whatever name a request gives."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    async def tags(self, _request: Request) -> Response:
        """GET /api/tags: the models."""
        return JSONResponse({"models": [self._entry]})

    async def running(self, _request: Request) -> Response:
        """GET /api/ps: the models that are in memory."""
        on_gpu = (await self._driver.status()).threads is None
        size = self._entry["size"] if on_gpu else 0
        loaded = {"expires_at": _NEVER, "size_vram": size, "context_length": self._driver.engine.context}
        return JSONResponse({"models": [self._entry | loaded]})

    async def show(self, request: Request) -> Response:
        """POST /api/show: the model's template and shape. Raises ApiError or BadRequest."""
        body = await read_body(request, self._driver.config.max_body)
        text("model", body.get("model") or body.get("name") or "")
        engine = self._driver.engine
        return JSONResponse(shown(engine.model, engine.context, self._entry))

    async def pull(self, request: Request) -> Response:
        """POST /api/pull: success for this server's model, for which it does nothing. Raises ApiError or BadRequest."""
        body = await read_body(request, self._driver.config.max_body)
        name, own = text("model", body.get("model") or body.get("name") or ""), self._driver.engine.model.name
        if name.removesuffix(":latest") != own:
            raise ApiError(501, f"This server pulls no models: it has {own} alone", "not_supported", "model")
        stream = flag("stream", True if body.get("stream") is None else body["stream"])
        done = {"status": "success"}
        return Response(LINES.frame(done), media_type=LINES.media_type) if stream else JSONResponse(done)

    async def version(self, _request: Request) -> Response:
        """GET /api/version: the version of Ollama whose API this is; clients compare it with the one they need."""
        return JSONResponse({"version": OLLAMA})

    @cached_property
    def _entry(self) -> dict[str, Any]:
        """The model as an entry of a list."""
        model = self._driver.engine.model
        return listed(model.name, model.config, model.weights, model.dtype, model.path.is_dir())

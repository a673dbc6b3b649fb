"""Ollama's endpoints about the model: its name, its shape, and whether it is loaded."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from functools import cached_property
from math import prod
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polarlm.engine.cli.flags import release
from polarlm.model_loaders import Model
from polarlm.model_loaders.config import Experts
from polarlm.server.http.bodies import read_body
from polarlm.server.http.errors import ApiError
from polarlm.server.http.streams import LINES
from polarlm.server.reading.infill import infill_of
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
        model = engine.model
        return JSONResponse(
            {
                "modelfile": "",
                "parameters": "",
                "template": model.template.source,
                "modified_at": self._entry["modified_at"],
                "details": self._entry["details"],
                "model_info": _shape(model, engine.context, len(model.vocabulary)),
                "capabilities": self._capabilities,
            }
        )

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
        """GET /api/version: this server's version."""
        return JSONResponse({"version": release() or "0.0.0"})

    @cached_property
    def _capabilities(self) -> list[str]:
        """What the model can do; "insert" is writing text before a suffix."""
        if self._driver.engine.model.config.is_encoder:
            return ["embedding"]
        inserts = infill_of(self._driver.engine.model.tokenizer) is not None
        return ["completion", "tools", "embedding", *(["insert"] if inserts else [])]

    @cached_property
    def _entry(self) -> dict[str, Any]:
        """The model as an entry of a list. Its digest identifies it, but is not computed from its bytes."""
        model = self._driver.engine.model
        status = [file.stat() for file in model.weights.files()]
        size = sum(one.st_size for one in status)
        modified = datetime.fromtimestamp(max((one.st_mtime for one in status), default=0), timezone.utc)
        named = f"{model.name} {size} {modified.timestamp()}"
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": modified.isoformat().replace("+00:00", "Z"),
            "size": size,
            "digest": hashlib.sha256(named.encode(errors="surrogatepass")).hexdigest(),
            "details": {
                "parent_model": "",
                "format": "safetensors" if model.path.is_dir() else "gguf",
                "family": model.config.family,
                "families": [model.config.family],
                "parameter_size": _in_short(_parameters(model)),
                "quantization_level": model.dtype,
            },
        }


def _parameters(model: Model) -> int:
    """The number of parameters in a model's matrices."""
    shapes = map(model.weights.shape, model.weights.names())
    return sum(prod(shape) for shape in shapes if len(shape) > 1)


def _in_short(count: int) -> str:
    """A number of parameters as Ollama writes it, such as 134.5M."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _shape(model: Model, context: int, vocabulary: int) -> dict[str, Any]:
    """The shape of a model under the names of GGUF files."""
    config = model.config
    shape = {
        "context_length": context,
        "embedding_length": config.hidden_size,
        "block_count": len(config.layers),
        "feed_forward_length": config.ffn.size,
        "attention.head_count": config.attention.heads,
        "attention.head_count_kv": config.attention.kv_heads,
        "vocab_size": vocabulary,
    }
    if isinstance(config.ffn, Experts):
        shape |= {"expert_count": config.ffn.count, "expert_used_count": config.ffn.top_k}
    general = {"general.architecture": config.family, "general.parameter_count": _parameters(model)}
    return general | {f"{config.family}.{name}": value for name, value in shape.items()}

"""What clients are told about the models, loaded or not, in the shape of each API. None of it loads a model."""

from __future__ import annotations

import asyncio
from typing import Any

from polarlm import model_loaders
from polarlm.server.http.described import listed, shown
from polarlm.server.models.registry import NamedModel
from polarlm.server.models.served import FAILED, LOADING, READY, STOPPING, WAITING, Served
from polarlm.server.models.supervisor import Supervisor

_NEVER = "9999-12-31T23:59:59Z"
_EPOCH = "1970-01-01T00:00:00Z"


class Lists:
    """The models in the shapes of several APIs. What is read from files is kept as long as these do not change."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._read: dict[tuple[str, float], dict[str, Any]] = {}

    def openai(self, served: Served) -> dict[str, Any]:
        """The fields of llama-server's router in OpenAI's lists: aliases, and "unloaded", "loading", "loaded"."""
        value = {STOPPING: READY, WAITING: LOADING}.get(served.state, served.state)
        status: dict[str, Any] = {"value": value, "args": []}
        if served.state == FAILED:
            status |= {"value": "unloaded", "failed": True, "error": str(served.error or "an unexpected error")}
        described: dict[str, Any] = {
            "aliases": list(served.model.aliases),
            "status": status,
            "pinned": served.model.pinned,
        }
        if served.need is not None and served.need.tokens:
            described |= {"context_length": served.need.tokens, "memory": served.need.bytes}
        return described

    async def ollama(self, served: Served) -> dict[str, Any]:
        """An entry of /api/tags, without details if the model has to be fetched yet or its files are wrong."""
        return await asyncio.to_thread(self._entry, served.model)

    async def ollama_loaded(self) -> list[dict[str, Any]]:
        entries = []
        for one in self._supervisor.all():
            if one.state in (READY, STOPPING):
                until, need = one.expires, one.need
                on_gpu = need is not None and need.device != "cpu"
                entries.append(
                    await self.ollama(one)
                    | {
                        "size": need.bytes if need else 0,
                        "size_vram": need.bytes if need and on_gpu else 0,
                        "expires_at": _NEVER if until is None else until.isoformat().replace("+00:00", "Z"),
                        "context_length": need.tokens if need else 0,
                    }
                )
        return entries

    async def ollama_shown(self, model: NamedModel) -> dict[str, Any] | None:
        """The answer of /api/show, from the model's files; None if they have to be fetched yet. Raises LoadError."""
        return None if model.path is None else await asyncio.to_thread(self._show, model)

    def _entry(self, model: NamedModel) -> dict[str, Any]:
        name, path = model.name, model.path
        empty = {"name": name, "model": name, "modified_at": _EPOCH, "size": 0, "digest": "", "details": _NO_DETAILS}
        if path is None:
            return empty
        try:
            key = (str(path), path.stat().st_mtime)
            if key not in self._read:
                config, weights, dtype = model_loaders.load_weights(path)
                try:
                    self._read[key] = listed(name, config, weights, dtype, path.is_dir())
                finally:
                    weights.close()
            return self._read[key] | {"name": name, "model": name}
        except (model_loaders.LoadError, OSError):
            return empty

    def _show(self, model: NamedModel) -> dict[str, Any]:
        read = model_loaders.load(model.path)
        try:
            context = model.config.ctx_size or read.config.max_context
            return shown(read, context, self._entry(model))
        finally:
            read.weights.close()


_NO_DETAILS = {
    **dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), ""),
    "families": [],
}

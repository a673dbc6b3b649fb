"""vLLM's endpoints that load adapters while the server runs, and unload them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from polarlm.engine import EngineError
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.errors import ApiError
from polarlm.server.http.guard import adapters_folder
from polarlm.server.http.warnings import warn
from polarlm.server.reading.fields import unknown_fields
from polarlm.server.reading.prompts import adapter_name
from polarlm.server.reading.values import BadRequest, text
from polarlm.server.running import journal

_FIELDS = ("lora_name", "lora_path", "model")
_LATEST = "latest"  # which Ollama's clients put behind any model's name and a colon


class AdapterChanges(Endpoints):
    def routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """{"lora_name", "lora_path"} → a sentence, as of vLLM. lora_path: in the folder of --adapters-folder."""
        body, folder = await self._body(request), adapters_folder(request, self._driver.config)
        name = text("lora_name", body.get("lora_name"))
        if name in (_LATEST, adapter_name({"model": self._driver.engine.model.name})):
            sentence = f"lora_name is {name}, which names the model itself: give the adapter another name"
            raise BadRequest("lora_name", sentence)
        path = _inside(folder, text("lora_path", body.get("lora_path")))
        try:
            await self._driver.run_on_disk("loaded", partial(self._driver.engine.load_adapter, name, path))
        except EngineError as error:  # clients do not learn where the folder is
            error.args = (str(error).replace(f"{folder}{os.sep}", ""),)
            raise
        return _success(body, f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """{"lora_name"} → a sentence. Requests that have chosen the adapter end as they would."""
        body, _ = await self._body(request), adapters_folder(request, self._driver.config)
        if (name := text("lora_name", body.get("lora_name"))) not in self._driver.engine.adapters.by_name:
            raise ApiError(404, f"There is no adapter called {name}; /v1/models lists them", "not_found", "lora_name")
        await self._driver.unload_adapter(name)
        return _success(body, f"Success: LoRA adapter '{name}' removed successfully.")


def _inside(folder: Path, name: str) -> Path:
    """What has this name in a folder, also as a whole path. Raises BadRequest or ApiError."""
    try:
        path = (folder / name).resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or NUL
        path = folder
    if folder not in path.parents:
        raise BadRequest("lora_path", "lora_path must name what is in the folder that --adapters-folder names")
    if not path.exists():
        raise ApiError(404, f"The folder of adapters has no {name}", "not_found", "lora_path")
    return path


def _success(body: dict[str, Any], sentence: str) -> Response:
    if entry := journal.current():
        entry.adapter = body["lora_name"]
    return warn(PlainTextResponse(sentence), unknown_fields(body, _FIELDS))

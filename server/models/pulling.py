"""/api/pull: adds a model of the Hugging Face hub, which a process of its own downloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from polarlm.model_loaders import LoadError, hub
from polarlm.server.http.errors import ApiError
from polarlm.server.models.process import ModelProcess
from polarlm.server.models.registry import Registry

_HOSTS = ("https://", "hf.co/", "huggingface.co/", hub.PREFIX)
_TOLD_SECONDS = 0.5  # between two lines of progress
AT_ONCE = 2  # models that are downloaded for clients; others wait


def hub_name(asked: str) -> hub.HubName:
    """The model that a client names, as user/repo:QUANT or hf.co/user/repo:QUANT. Raises ApiError."""
    for host in _HOSTS:
        asked = asked.removeprefix(host)
    try:
        return hub.parse(asked.removesuffix(":latest"))
    except LoadError as error:
        raise ApiError(400, str(error), "invalid_request", "model") from None


async def pulled(
    registry: Registry, name: hub.HubName, free: asyncio.Semaphore
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield lines of Ollama's progress while the model is downloaded; then it is in the registry.

    free: waits while too many models are downloaded. Closing the generator ends the download, which a later one
    continues. Raises EngineError or Refused.
    """
    yield {"status": "pulling manifest"}
    async with free, aclosing(_downloaded(registry, name)) as lines:
        async for line in lines:
            yield line


async def _downloaded(registry: Registry, name: hub.HubName) -> AsyncGenerator[dict[str, Any], None]:
    process = ModelProcess(registry.on_hub(str(name)), None, lambda code: None)
    fetching = asyncio.create_task(process.fetched())
    try:
        while not fetching.done():
            await asyncio.wait([fetching], timeout=_TOLD_SECONDS)
            if process.fetching is not None:
                done, total = process.fetching
                yield {"status": f"pulling {name}", "digest": str(name), "total": total, "completed": done}
        path = fetching.result()
        if path.is_file() and name.quantization is None:  # the next start takes the same file
            name = replace(name, quantization=hub.quantization_of(path.name))
        registry.add(registry.on_hub(str(name)))
        yield {"status": "success"}
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, process.end_at_once(), return_exceptions=True)

"""/blocks: computes prompts for engines on weaker machines; /encoding: how keys and values are encoded here."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polarlm.engine import PromptOptions, SamplingParams
from polarlm.engine.storage.tiers.prompt_blocks import note
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.errors import ApiError
from polarlm.server.http.streams import EventStream, Framing, while_connected
from polarlm.server.reading.prompts import read_salt
from polarlm.server.reading.values import BadRequest

_TYPE = "application/octet-stream"
_ROOT = re.compile("[0-9a-f]{32}")
_SILENT_SECONDS = 1.0  # an engine that waits gives a silent server up
_PACKED = "packed"  # the field of an event that is an object already; others are a note
_OBJECTS = Framing(_TYPE, lambda event: (event or {}).get(_PACKED) or note(**(event or {})))


class Prefill(Endpoints):
    def routes(self) -> list[Route]:
        return [
            *(Route(f"{prefix}/blocks", self.compute, methods=["POST"]) for prefix in ("/v1", "")),
            *(Route(f"{prefix}/encoding", self.encoding) for prefix in ("/v1", "")),
        ]

    async def encoding(self, _request: Request) -> Response:
        """An object that --encoding takes."""
        return Response(await asyncio.to_thread(self._driver.engine.encoding), media_type=_TYPE)

    async def compute(self, request: Request) -> Response:
        """As `prompt_blocks` describes. A prompt counts as an answer of one token."""
        body = await self._body(request)
        ids, first, root, settings = (body.get(name) for name in ("ids", "first", "root", "settings"))
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise BadRequest("ids", "ids is not a list of token ids")
        if type(first) is not int or first < 0:
            raise BadRequest("first", "first is not the number of a block")
        if not isinstance(root, str) or _ROOT.fullmatch(root) is None:
            raise BadRequest("root", "root does not have 32 hexadecimal digits")
        if not isinstance(settings, dict):
            raise BadRequest("settings", "settings are not those of an engine")
        if (sentence := self._driver.engine.differs_from(settings)) is not None:
            raise ApiError(409, f"This server has other settings: {sentence}", "other_settings")
        if (other := self._driver.engine.config.prefill_at) is not None:
            raise ApiError(409, f"This server lets {other} compute its prompts: ask that one", "other_server")
        events = self._events(ids, read_salt(body.get("cache_salt")), bytes.fromhex(root), first)
        begun = await while_connected(request.receive, anext(events))
        stream = EventStream(begun, events, _OBJECTS, lambda error: {"error": error.message}, note)
        stream.silent_seconds = _SILENT_SECONDS
        return stream

    async def _events(self, ids: list[int], salt: str, root: bytes, first: int) -> AsyncGenerator[dict[str, Any], None]:
        params, options = SamplingParams(max_tokens=1, temperature=0), PromptOptions(cache_salt=salt)
        chunks = self._driver.stream(ids, params, options, announces_prompt=True, progress=True)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield {"tokens": chunk.prefilled}
        blocks = self._driver.engine.packed_blocks(ids, salt, root, first)
        while (packed := await asyncio.to_thread(partial(next, blocks, None))) is not None:
            yield {_PACKED: packed}

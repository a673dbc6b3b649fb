"""Embeddings: OpenAI's /v1/embeddings, and llama-server's /embedding and /embeddings."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polarlm.engine import Embedding, PromptOptions
from polarlm.engine.limits import POOLINGS
from polarlm.engine.requests.prompts import Prompt
from polarlm.server.http.bodies import read_body
from polarlm.server.http.streams import while_there
from polarlm.server.reading.fields import given
from polarlm.server.reading.prompts import one_given, read_options, read_prompts, read_vector_options
from polarlm.server.reading.values import BadRequest, text, wrong
from polarlm.server.running.driver import Driver

MOST_INPUTS = 2048  # as at OpenAI

_ENCODINGS = ("float", "base64")


@dataclass(frozen=True)
class _Asked:
    prompts: list[Prompt]
    options: PromptOptions
    as_base64: bool


class Embeddings:
    """Three endpoints, which read requests in the same way."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.openai, methods=["POST"]),
            Route("/embeddings", self.plain, methods=["POST"]),
            Route("/embedding", self.plain, methods=["POST"]),
        ]

    async def openai(self, request: Request) -> Response:
        """{"input"} → {"data": [{"index", "embedding"}], "usage"}, and the "pooling" that was used."""
        asked = self._read(await read_body(request, self._driver.config.max_body))
        found = await while_there(request.receive, self._embed(asked))
        tokens = sum(count for _, count in found)
        parts = (
            f'{{"object":"embedding","index":{index},"embedding":{written}}}'
            for index, (written, _) in enumerate(found)
        )
        about = {
            "model": self._driver.engine.model.name,
            "pooling": asked.options.pooling,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return _json(f'{{"object":"list","data":[{",".join(parts)}],{json.dumps(about)[1:]}')

    async def plain(self, request: Request) -> Response:
        """{"content"} → [{"index", "embedding": [vector]}]"""
        asked = self._read(await read_body(request, self._driver.config.max_body))
        found = await while_there(request.receive, self._embed(asked))
        parts = (f'{{"index":{index},"embedding":[{written}]}}' for index, (written, _) in enumerate(found))
        return _json(f"[{','.join(parts)}]")

    def _read(self, body: Mapping[str, Any]) -> _Asked:
        body = given(body)
        name = one_given(body, ("input", "content"))
        prompts = read_prompts(name, body[name], MOST_INPUTS)
        if body.get("truncate_prompt_tokens") not in (None, -1):
            sentence = "a text is cut to the context alone, with truncate or -1; leave it out"
            raise BadRequest("truncate_prompt_tokens", f"truncate_prompt_tokens: {sentence}")
        if body.get("embd_normalize") not in (None, 2):
            raise BadRequest("embd_normalize", "embd_normalize: vectors have the Euclidean length 1 here; leave it out")
        if body.get("model") is not None:
            text("model", body["model"])
        asked = None if body.get("pooling") is None else _one_of("pooling", body["pooling"], POOLINGS)
        options = read_options(body, parse_special=self._driver.config.parse_special)
        options = self._driver.engine.embedding_options(asked, options)
        truncates = body.get("truncate_prompt_tokens") == -1
        options = replace(options, **read_vector_options(body, truncates=truncates))
        encoding = _one_of("encoding_format", body.get("encoding_format"), _ENCODINGS)
        return _Asked(prompts, options, encoding == "base64")

    async def _embed(self, asked: _Asked) -> list[tuple[str, int]]:
        """(JSON of the vector, tokens of the text) for each prompt."""

        def written(found: Embedding) -> tuple[str, int]:
            vector = found.vector.astype("<f4")
            if asked.as_base64:
                return json.dumps(base64.b64encode(vector.tobytes()).decode()), found.usage.prompt_tokens
            return json.dumps(vector.tolist(), separators=(",", ":")), found.usage.prompt_tokens

        return await self._driver.embed(asked.prompts, asked.options, written)


def _one_of(field: str, value: Any, names: tuple[str, ...]) -> str:
    """`value`, which must be one of `names`; the first of them for None. Raises BadRequest."""
    if value is None:
        return names[0]
    if not isinstance(value, str) or value not in names:
        raise wrong(field, " or ".join(names), value)
    return value


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")

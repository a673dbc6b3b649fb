"""Embeddings: OpenAI's /v1/embeddings, and llama-server's /embedding and /embeddings."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polarlm.engine import Embedding, PromptOptions, SamplingParams
from polarlm.engine.limits import POOLINGS
from polarlm.engine.requests.prompts import Prompt
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.streams import while_connected
from polarlm.server.http.warnings import warn, warnings_of_items
from polarlm.server.reading.fields import requested_fields, unknown_fields
from polarlm.server.reading.prompts import read_options, read_prompts, read_vector_options, spelling
from polarlm.server.reading.values import BadRequest, FieldWarnings, one_of, text
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver

MOST_INPUTS = 2048  # as at OpenAI
_TEXTS = ("input", "content")  # two spellings
_KNOWN_FIELDS = (
    *(*_TEXTS, "model", "encoding_format", "pooling", "embd_normalize", "dimensions", "prompt_name", "user"),
    "service_tier",
    *("truncate", "truncation", "truncate_prompt_tokens", "parse_special", "cache_prompt", "cache_salt", "task"),
)


class Embeddings(Endpoints):
    def routes(self) -> list[Route]:
        return [
            Route("/v1/embeddings", self.openai, methods=["POST"]),
            Route("/embeddings", self.plain, methods=["POST"]),
            Route("/embedding", self.plain, methods=["POST"]),
            Route("/pooling", self.pool, methods=["POST"]),
        ]

    async def openai(self, request: Request) -> Response:
        """{"input"} → {"data": [{"index", "embedding"}], "usage"}, and the "pooling" that was used."""
        vectors, tokens, options, warnings = await self._embed(request)
        parts = (f'{{"object":"embedding","index":{i},"embedding":{vector}}}' for i, vector in enumerate(vectors))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        members = {"model": self._driver.engine.model.name, "pooling": options.pooling, "usage": usage}
        content = f'{{"object":"list","data":[{",".join(parts)}],{json.dumps(members)[1:]}'
        return warn(Response(content, media_type="application/json"), warnings)

    async def plain(self, request: Request) -> Response:
        """{"content"} → [{"index", "embedding": [vector]}]"""
        vectors, _, _, warnings = await self._embed(request)
        parts = (f'{{"index":{index},"embedding":[{vector}]}}' for index, vector in enumerate(vectors))
        return warn(Response(f"[{','.join(parts)}]", media_type="application/json"), warnings)

    async def pool(self, request: Request) -> Response:
        """{"input"} → {"data": [{"index", "object": "pooling", "data": vector}], "usage"}, as at vLLM."""
        vectors, tokens, _, warnings = await self._embed(request)
        parts = (f'{{"index":{i},"object":"pooling","data":{vector}}}' for i, vector in enumerate(vectors))
        head = {"id": f"pool-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        head |= {"model": self._driver.engine.model.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        content = f'{json.dumps(head)[:-1]},"data":[{",".join(parts)}]}}'
        return warn(Response(content, media_type="application/json"), warnings)

    async def _embed(self, request: Request) -> tuple[list[str], int, PromptOptions, list[str]]:
        """(JSON of each vector, tokens of all texts, options, sentences about what is not done as asked) of a request.
        Raises BadRequest and as `vectors_of`."""
        fields_sent = await self._body(request)
        journal.read_tier_and_slot(fields_sent)
        body, fields = requested_fields(fields_sent), FieldWarnings()
        name = spelling(body, _TEXTS, fields)
        prompts = read_prompts(name, body.get(name), MOST_INPUTS)
        if body.get("truncate_prompt_tokens") not in (None, -1):
            sentence = "a text is cut to the context alone, with truncate or -1; leave it out"
            raise BadRequest("truncate_prompt_tokens", f"truncate_prompt_tokens: {sentence}")
        if body.get("embd_normalize") not in (None, 2):
            raise BadRequest("embd_normalize", "embd_normalize: vectors have the Euclidean length 1 here; leave it out")
        if body.get("task") not in (None, "embed"):
            raise BadRequest("task", "task: a text has one vector here, as with embed; leave it out")
        text("model", body.get("model", ""))
        pooling = one_of("pooling", body["pooling"], POOLINGS) if "pooling" in body else None
        options = read_options(body, self._driver.model_info)
        options = self._driver.engine.embedding_options(pooling, options)
        options = replace(options, **read_vector_options(body, truncates="truncate_prompt_tokens" in body))
        encoding = one_of("encoding_format", body.get("encoding_format", "float"), ("float", "base64"))
        warnings = [*(sentence for _, sentence in fields), *unknown_fields(fields_sent, _KNOWN_FIELDS)]
        as_base64 = encoding == "base64"
        vectors, tokens, cuts = await vectors_of(request, self._driver, prompts, options, name, as_base64=as_base64)
        return vectors, tokens, options, [*warnings, *cuts]


async def vectors_of(
    request: Request,
    driver: Driver,
    prompts: Sequence[Prompt],
    options: PromptOptions,
    field: str,
    *,
    as_base64: bool = False,
) -> tuple[list[str], int, list[str]]:
    """(JSON of the vector of each prompt, tokens of all prompts, sentences about prompts of `field` that are not read
    as a whole). Raises Refusal, EngineError or ClientDisconnect."""

    def vector_json(embedding: Embedding) -> tuple[str, int, tuple[str, ...]]:
        vector, tokens = embedding.vector.astype("<f4"), embedding.usage.prompt_tokens
        text = json.dumps(vector.tolist(), separators=(",", ":"))
        if as_base64:
            text = json.dumps(base64.b64encode(vector.tobytes()).decode())
        return text, tokens, embedding.warnings

    jobs = [(prompt, SamplingParams(max_tokens=0), options) for prompt in prompts]
    found = await while_connected(request.receive, driver.embed_all(jobs, vector_json, "embedded", field))
    cuts = {at: sentence for at, (_, _, sentences) in enumerate(found) for sentence in sentences}
    return [vector for vector, _, _ in found], sum(tokens for _, tokens, _ in found), warnings_of_items(field, cuts)

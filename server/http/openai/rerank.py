"""POST /v1/rerank, in the shape of Jina and Cohere, as llama-server has it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import Embedding
from polarlm.server.http.bodies import read_body
from polarlm.server.http.openai.embeddings import MOST_INPUTS
from polarlm.server.http.streams import while_there
from polarlm.server.reading.fields import asking
from polarlm.server.reading.prompts import read_salt
from polarlm.server.reading.values import LARGEST, BadRequest, count, flag, text, wrong
from polarlm.server.running.driver import Driver

_PATHS = ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")


class Rerank:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def routes(self) -> list[Route]:
        return [Route(path, self.serve, methods=["POST"]) for path in _PATHS]

    async def serve(self, request: Request) -> Response:
        """{"query", "documents"} → {"results": [{"index", "relevance_score"}]}, the best first, at most "top_n"."""
        body = asking(await read_body(request, self._driver.config.max_body))
        documents = _documents(body.get("documents"))
        query = text("query", body.get("query", ""))
        if not query:
            raise wrong("query", "a text that is not empty", query)
        top = body.get("top_n")
        most = len(documents) if top in (None, 0, -1) else count("top_n", top, 1, LARGEST)
        returns = flag("return_documents", body.get("return_documents") or False)
        engine = self._driver.engine
        salt = read_salt(body.get("cache_salt"))
        instruction = text("instruction", body["instruction"]) if "instruction" in body else None

        def score(document: Embedding) -> tuple[float, int]:
            return float(document.vector[0]), document.usage.prompt_tokens

        ranked = await asyncio.to_thread(engine.rank_jobs, query, documents, instruction)
        jobs = [(prompt, params, replace(options, cache_salt=salt)) for prompt, params, options in ranked]
        scores = await while_there(request.receive, self._driver.each(jobs, score, "ranked"))
        best = sorted(range(len(scores)), key=lambda index: -scores[index][0])[:most]
        tokens = sum(count for _, count in scores)
        return JSONResponse(
            {
                "model": engine.model.name,
                "object": "list",
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
                "results": [
                    {"index": index, "relevance_score": scores[index][0]}
                    | ({"document": {"text": documents[index]}} if returns else {})
                    for index in best
                ],
            }
        )


def _documents(value: Any) -> list[str]:
    """1 to MOST_INPUTS strings, or objects with a text. Raises BadRequest."""
    if not isinstance(value, list) or not value:
        raise wrong("documents", "an array of strings, or of objects with a text", value)
    if len(value) > MOST_INPUTS:
        raise BadRequest("documents", f"documents has {len(value)} texts, but at most {MOST_INPUTS} are taken here")
    return [
        text(f"documents[{index}].text", one.get("text")) if isinstance(one, dict) else text(f"documents[{index}]", one)
        for index, one in enumerate(value)
    ]

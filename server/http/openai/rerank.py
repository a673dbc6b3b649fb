"""POST /v1/rerank and /v2/rerank, in the shapes of Jina, Cohere and Text Embeddings Inference."""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import Embedding
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.openai.embeddings import MOST_INPUTS
from polarlm.server.http.streams import while_there
from polarlm.server.reading.fields import asking
from polarlm.server.reading.prompts import one_given, read_salt
from polarlm.server.reading.values import LARGEST, array, at_most, count, flag, text, wrong

_PATHS = ("/v1/rerank", "/v2/rerank", "/v1/reranking", "/rerank", "/reranking")
_RETURNS = {"documents": "return_documents", "texts": "return_text"}  # field of the texts → whether results have them
_LEAST, _MOST = 2.0**-149, 1 - 2.0**-25  # scores of which no float32 is nearer to 0, or to 1


class Rerank(Endpoints):
    def routes(self) -> list[Route]:
        return [Route(path, self.serve, methods=["POST"]) for path in _PATHS]

    async def serve(self, request: Request) -> Response:
        """{"query", "documents"} → {"results": [{"index", "relevance_score"}]}, the best first, at most "top_n";
        {"query", "texts"} → [{"index", "score"}]."""
        body = asking(await self._body(request))
        name = one_given(body, _RETURNS)
        documents = _documents(name, body[name])
        query = text("query", body.get("query", ""))
        if not query:
            raise wrong("query", "a text that is not empty", query)
        top = body.get("top_n")
        most = len(documents) if top in (None, 0, -1) else count("top_n", top, 1, LARGEST)
        flags = (_RETURNS[name], "raw_scores", "truncate")
        returns, raw, truncate = (flag(field, body.get(field, False)) for field in flags)
        engine = self._driver.engine
        salt = read_salt(body.get("cache_salt"))
        instruction = text("instruction", body["instruction"]) if "instruction" in body else None

        def score(document: Embedding) -> tuple[float, int]:
            return float(document.vector[0]), document.usage.prompt_tokens

        ranked = await asyncio.to_thread(engine.rank_jobs, query, documents, instruction, truncate)
        jobs = [(prompt, params, replace(options, cache_salt=salt)) for prompt, params, options in ranked]
        scores = await while_there(request.receive, self._driver.each(jobs, score, "ranked"))
        best = sorted(range(len(scores)), key=lambda index: -scores[index][0])[:most]
        if name == "texts":
            ranks = ((at, _logit(scores[at][0]) if raw else scores[at][0]) for at in best)
            return JSONResponse(
                [{"index": at, "score": score} | ({"text": documents[at]} if returns else {}) for at, score in ranks]
            )
        tokens = sum(count for _, count in scores)
        results = [
            {"index": at, "relevance_score": scores[at][0]} | ({"document": {"text": documents[at]}} if returns else {})
            for at in best
        ]
        answer = {
            "id": str(uuid.uuid4()),
            "model": engine.model.name,
            "object": "list",
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"api_version": {"version": "2"}, "tokens": {"input_tokens": tokens, "output_tokens": 0}},
            "results": results,
        }
        return JSONResponse(answer)


def _logit(score: float) -> float:
    """What a score is σ of; finite for a score that was rounded to 0 or 1."""
    score = min(max(score, _LEAST), _MOST)
    return math.log(score / (1 - score))


def _documents(field: str, value: Any) -> list[str]:
    """1 to MOST_INPUTS strings, or objects with a text. Raises BadRequest."""
    texts = array(field, value, "an array of strings, or of objects with a text", 1)
    at_most(MOST_INPUTS, field, len(texts), "texts")
    return [
        text(f"{field}[{index}].text", one.get("text")) if isinstance(one, dict) else text(f"{field}[{index}]", one)
        for index, one in enumerate(texts)
    ]

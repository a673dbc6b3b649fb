"""POST /v1/rerank and /v2/rerank, in the shapes of Jina, Cohere and Text Embeddings Inference."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import Embedding
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.openai.embeddings import MOST_INPUTS
from polarlm.server.http.streams import while_connected
from polarlm.server.http.warnings import warn, warnings_of_items
from polarlm.server.reading.fields import requested_fields, unknown_fields
from polarlm.server.reading.prompts import read_salt, read_truncate, spelling
from polarlm.server.reading.values import LARGEST, FieldWarnings, array, check_at_most, count, flag, text, wrong_value

_PATHS = ("/v1/rerank", "/v2/rerank", "/v1/reranking", "/rerank", "/reranking")
_TEXTS, _LIMITS, _RETURNS = ("documents", "texts"), ("top_n", "top_k"), ("return_documents", "return_text")  # spellings
_KNOWN_FIELDS = (
    *("query", *_TEXTS, *_LIMITS, *_RETURNS, "model", "raw_scores", "instruction", "user", "cache_salt"),
    *("truncate", "truncation", "truncate_prompt_tokens", "max_tokens_per_doc"),
)
_LEAST, _MOST = 2.0**-149, 1 - 2.0**-25  # scores of which no float32 is nearer to 0, or to 1


class Rerank(Endpoints):
    def routes(self) -> list[Route]:
        return [Route(path, self.serve, methods=["POST"]) for path in _PATHS]

    async def serve(self, request: Request) -> Response:
        """{"query", "documents"} → {"results": [{"index", "relevance_score"}]}, the best first, at most "top_n";
        {"query", "texts"} → [{"index", "score"}]."""
        fields_sent = await self._body(request)
        body, fields = requested_fields(fields_sent), FieldWarnings()
        name = spelling(body, _TEXTS, fields)
        documents = _documents(name, body.get(name))
        query = text("query", body.get("query", ""))
        if not query:
            raise wrong_value("query", "a text that is not empty", query)
        limit = spelling(body, _LIMITS, fields)
        most = len(documents) if body.get(limit) in (None, 0, -1) else count(limit, body[limit], 1, LARGEST)
        returns, is_raw = (
            any(flag(one, body.get(one, False)) for one in names) for names in (_RETURNS, ("raw_scores",))
        )
        engine = self._driver.engine
        salt = read_salt(body.get("cache_salt"))
        instruction = text("instruction", body["instruction"]) if "instruction" in body else None
        warnings = [*(sentence for _, sentence in fields), *unknown_fields(fields_sent, _KNOWN_FIELDS)]
        cuts = dict[int, str]()  # number of a document → what is said of it

        def score(document: Embedding) -> tuple[float, int]:
            return float(document.vector[0]), document.usage.prompt_tokens

        rank = partial(engine.rank_jobs, query, documents, instruction, **_cuts(body), warn=cuts.__setitem__)
        rank_jobs = await asyncio.to_thread(rank)
        warnings += warnings_of_items(name, cuts)
        jobs = [(prompt, params, replace(options, cache_salt=salt)) for prompt, params, options in rank_jobs]
        scores = await while_connected(request.receive, self._driver.embed_all(jobs, score, "ranked"))
        best = sorted(range(len(scores)), key=lambda index: -scores[index][0])[:most]
        if name == "texts":
            ranks = ((at, _logit(scores[at][0]) if is_raw else scores[at][0]) for at in best)
            results_json = [
                {"index": at, "score": score} | ({"text": documents[at]} if returns else {}) for at, score in ranks
            ]
            return warn(JSONResponse(results_json), warnings)
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
        return warn(JSONResponse(answer), warnings)


def _cuts(body: Mapping[str, Any]) -> dict[str, Any]:
    """How `Engine.rank_jobs` cuts documents. Raises BadRequest."""
    names = {"truncate_prompt_tokens": "most", "max_tokens_per_doc": "most_of_document"}
    limits = {field: count(field, body[field], 1, LARGEST) for field in names if body.get(field) not in (None, -1)}
    return {"truncate": read_truncate(body, default=True), **{names[field]: value for field, value in limits.items()}}


def _logit(score: float) -> float:
    """What a score is σ of; finite for a score that was rounded to 0 or 1."""
    score = min(max(score, _LEAST), _MOST)
    return math.log(score / (1 - score))


def _documents(field: str, value: Any) -> list[str]:
    """1 to MOST_INPUTS strings, or objects with a text. Raises BadRequest."""
    texts = array(field, value, "an array of strings, or of objects with a text", 1)
    check_at_most(MOST_INPUTS, field, len(texts), "texts")
    return [
        text(f"{field}[{index}].text", one.get("text")) if isinstance(one, dict) else text(f"{field}[{index}]", one)
        for index, one in enumerate(texts)
    ]

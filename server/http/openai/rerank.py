"""/v1/rerank and /v2/rerank, in the shapes of Jina, Cohere and Text Embeddings Inference; /v1/score, in vLLM's."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine import Embedding, SamplingParams
from polarlm.engine.vectors import Job
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.openai.embeddings import MOST_INPUTS
from polarlm.server.http.streams import while_connected
from polarlm.server.http.warnings import warn, warnings_of_items
from polarlm.server.reading.fields import requested_fields, unknown_fields
from polarlm.server.reading.prompts import read_salt, read_truncate, spelling
from polarlm.server.reading.values import (
    LARGEST,
    BadRequest,
    FieldWarnings,
    array,
    check_at_most,
    count,
    flag,
    text,
    wrong_value,
)

_PATHS = ("/v1/rerank", "/v2/rerank", "/v1/reranking", "/rerank", "/reranking")
_TEXTS, _LIMITS, _RETURNS = ("documents", "texts"), ("top_n", "top_k"), ("return_documents", "return_text")  # spellings
_CUTS = ("truncate", "truncation", "truncate_prompt_tokens", "max_tokens_per_doc")  # fields of `_cuts`
_FIRST, _SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")  # spellings of vLLM
_COMMON = (*_CUTS, "instruction", "model", "user", "cache_salt")
_RANK_FIELDS = ("query", "raw_scores", *_TEXTS, *_LIMITS, *_RETURNS, *_COMMON)
_SCORE_FIELDS = (*_FIRST, *_SECOND, "use_activation", "priority", *_COMMON)
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
        documents = _texts(name, body.get(name))
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
        warnings = [*(sentence for _, sentence in fields), *unknown_fields(fields_sent, _RANK_FIELDS)]
        cuts = dict[int, str]()  # number of a document → what is said of it

        def score(document: Embedding) -> tuple[float, int]:
            return float(document.vector[0]), document.usage.prompt_tokens

        rank = partial(engine.rank_jobs, query, documents, instruction, **_cuts(body), warn=cuts.__setitem__)
        rank_jobs = await asyncio.to_thread(rank)
        warnings += [*warnings_of_items(name, cuts), *filter(None, [engine.ranking_note()])]
        jobs = [(prompt, params, replace(options, cache_salt=salt)) for prompt, params, options in rank_jobs]
        scores = await while_connected(request.receive, self._driver.embed_all(jobs, score, "ranked", field=name))
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


class Scores(Endpoints):
    def routes(self) -> list[Route]:
        return [Route(path, self.serve, methods=["POST"]) for path in ("/v1/score", "/score")]

    async def serve(self, request: Request) -> Response:
        """{"text_1", "text_2"} → {"data": [{"index", "object": "score", "score"}], "usage"}. One text in "text_1" is
        scored with each in "text_2", several with the one in the same place."""
        fields_sent = await self._body(request)
        body, fields = requested_fields(fields_sent), FieldWarnings()
        names = [spelling(body, spellings, fields) for spellings in (_FIRST, _SECOND)]
        ones, others = (_texts(name, [one] if isinstance(one := body.get(name), str) else one) for name in names)
        if len(ones) not in (1, len(others)):
            raise wrong_value(names[0], f"one text, or as many as {names[1]} has, {len(others)}", body[names[0]])
        text("model", body.get("model", ""))
        is_raw, model = not flag("use_activation", body.get("use_activation", True)), self._driver.engine.model
        ranks = model.config.scores_pairs or not (model.config.is_encoder or model.pooling)
        cuts = [dict[int, str](), dict[int, str]()]  # of both: number of a text → what is said of it
        jobs = await asyncio.to_thread(self._pairs if ranks else self._single_texts, body, ones, others, cuts[1])

        def write(embedding: Embedding) -> tuple[np.ndarray, int, tuple[str, ...]]:
            return embedding.vector.astype(np.float64), embedding.usage.prompt_tokens, embedding.warnings

        outcome, begin = ("ranked", 0) if ranks else ("embedded", len(ones))  # of the second texts' jobs
        found = await while_connected(request.receive, self._driver.embed_all(jobs, write, outcome))
        vectors, tokens = [vector for vector, _, _ in found], sum(count for _, count, _ in found)
        for at, (_, _, sentences) in enumerate(found):
            for sentence in sentences:
                cuts[at >= begin][at - begin if at >= begin else at] = sentence
        if ranks:
            scores = [_logit(float(one[0])) if is_raw else float(one[0]) for one in vectors]
        else:
            pairs = zip(vectors[: len(ones)] * (len(others) // len(ones)), vectors[len(ones) :], strict=True)
            scores = [float(one @ other) for one, other in pairs]
        head = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": model.name}
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        answer = {**head, "data": data, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        warnings = [*(sentence for _, sentence in fields), *unknown_fields(fields_sent, _SCORE_FIELDS)]
        warnings += filter(None, [self._driver.engine.ranking_note() if ranks else None])
        return warn(JSONResponse(answer), [*warnings, *chain.from_iterable(map(warnings_of_items, names, cuts))])

    def _pairs(self, body: Mapping[str, Any], ones: list[str], others: list[str], cuts: dict[int, str]) -> list[Job]:
        """The requests of a model that ranks. cuts: gets a sentence for each pair whose second text is cut."""
        instruction = text("instruction", body["instruction"]) if "instruction" in body else None
        settings, salt, jobs = _cuts(body), read_salt(body.get("cache_salt")), list[Job]()
        for one, other in zip(ones * (len(others) // len(ones)), others, strict=True):
            tell = partial(lambda at, _, sentence: cuts.update({at: sentence}), len(jobs))
            jobs += self._driver.engine.rank_jobs(one, [other], instruction, **settings, warn=tell)
        return [(prompt, params, replace(options, cache_salt=salt)) for prompt, params, options in jobs]

    def _single_texts(
        self, body: Mapping[str, Any], ones: list[str], others: list[str], _: dict[int, str]
    ) -> list[Job]:
        """The requests of an embedding model, for the texts of both lists. Raises BadRequest."""
        for name in ("truncate_prompt_tokens", "max_tokens_per_doc"):
            if body.get(name) not in (None, -1):
                raise wrong_value(name, "-1, since embedding models cut a text to the context alone", body[name])
        options = self._driver.engine.embedding_options(None)
        options = replace(options, truncate=read_truncate(body, True), cache_salt=read_salt(body.get("cache_salt")))
        return [(one, SamplingParams(max_tokens=0), options) for one in (*ones, *others)]


def _cuts(body: Mapping[str, Any]) -> dict[str, Any]:
    """How `Engine.rank_jobs` cuts documents. Raises BadRequest."""
    names = {"truncate_prompt_tokens": "most", "max_tokens_per_doc": "most_of_document"}
    limits = {field: count(field, body[field], 1, LARGEST) for field in names if body.get(field) not in (None, -1)}
    return {"truncate": read_truncate(body, default=True), **{names[field]: value for field, value in limits.items()}}


def _logit(score: float) -> float:
    """What a score is σ of; finite for a score that was rounded to 0 or 1."""
    score = min(max(score, _LEAST), _MOST)
    return math.log(score / (1 - score))


def _texts(field: str, value: Any) -> list[str]:
    """1 to MOST_INPUTS strings, or objects with a text. Raises BadRequest."""
    if value is None:  # an empty array is left out, too
        raise BadRequest(field, f"{field} needs at least one text")
    texts = array(field, value, "an array of strings, or of objects with a text")
    check_at_most(MOST_INPUTS, field, len(texts), "texts")
    return [
        text(f"{field}[{index}].text", one.get("text")) if isinstance(one, dict) else text(f"{field}[{index}]", one)
        for index, one in enumerate(texts)
    ]

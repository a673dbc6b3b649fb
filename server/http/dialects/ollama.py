"""Ollama's API: /api/chat, /api/generate, /api/embed, and endpoints about the model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polarlm.engine.params import OPTIONS
from polarlm.engine.parsing.pieces import Answer, Call, Piece
from polarlm.engine.requests.prompts import Prompt
from polarlm.model_loaders.forks import cached_property
from polarlm.server.http.bodies import Endpoints
from polarlm.server.http.dialects._shared import (
    FieldPaths,
    FieldTable,
    arguments_of,
    known_fields,
    message_of,
    objects_with_paths,
)
from polarlm.server.http.errors import ApiError
from polarlm.server.http.generation import Endpoint, Generation, ModelInfo, Writer
from polarlm.server.http.model_details import NEVER, answer_line, list_entry, ollama_version, show_response
from polarlm.server.http.openai.embeddings import MOST_INPUTS, vectors_of
from polarlm.server.http.openai.logprobs import ChatLogprobs
from polarlm.server.http.streams import HEADERS, LINES, Event
from polarlm.server.http.warnings import warn
from polarlm.server.reading.fields import ABSENT_SAMPLERS, MODEL_FIELDS, requested_fields, unknown_fields
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.prompts import read_options, read_prompts, read_vector_options
from polarlm.server.reading.sampling import EXTENSIONS
from polarlm.server.reading.values import BadRequest, array, flag, is_empty, text, wrong_value
from polarlm.server.running.driver import Driver

PATHS = ("/api",)

_CACHE = ("cache_prompt", "cache_salt")  # not in Ollama's API
_EMBED_FIELDS = known_fields("ollama", "model", "truncate", "dimensions", "prompt_name", "options", *_CACHE)


def routes(driver: Driver) -> list[Route]:
    server = _ModelEndpoints(driver)
    return [
        *(Route(one.path, _Generation(driver, one).serve, methods=["POST"]) for one in (CHAT, GENERATE)),
        Route("/api/embed", server.embed, methods=["POST"]),
        Route("/api/embeddings", server.embed_older, methods=["POST"]),
        Route("/api/pull", server.pull, methods=["POST"]),
        Route("/api/tags", server.tags),
        Route("/api/ps", server.running_models),
        Route("/api/show", server.show, methods=["POST"]),
        Route("/api/version", ollama_version),
    ]


class _Generation(Generation):
    """An endpoint. A request without a prompt asks to load the model, which is always loaded."""

    async def respond(self, raw_request: Request, body: dict[str, Any]) -> Response:
        if all(is_empty(body.get(name)) for name in ("messages", "prompt", "suffix", "images")):
            text("model", body.get("model") or "")
            assert isinstance(self._endpoint, GenerateEndpoint)
            line = answer_line(self._endpoint.path, self._driver.engine.model.name, {"content": ""})
            return JSONResponse(line | {"done": True, "done_reason": "load"})
        return await super().respond(raw_request, body)


class _ModelEndpoints(Endpoints):
    """Endpoints of the one model of this server, whatever name a request gives."""

    async def embed(self, request: Request) -> Response:
        """POST /api/embed: {"input"} → {"embeddings"}, which is [] for an empty text and for none."""
        start = time.monotonic()
        body = await self._body(request)
        texts = body.get("input")
        prompts = [] if is_empty(texts) else read_prompts("input", texts, MOST_INPUTS)
        vectors, tokens, warnings = await self._embed(request, body, prompts, "input")
        name, nanoseconds_taken = self._driver.engine.model.name, nanoseconds(time.monotonic() - start)
        counts = {"model": name, "total_duration": nanoseconds_taken, "load_duration": 0, "prompt_eval_count": tokens}
        content = f'{json.dumps(counts)[:-1]},"embeddings":[{",".join(vectors)}]}}'
        return warn(Response(content, media_type="application/json"), warnings)

    async def embed_older(self, request: Request) -> Response:
        """POST /api/embeddings: {"prompt"} → {"embedding"}, which is [] for an empty text. Raises as `embed` does."""
        body = await self._body(request)
        prompt = text("prompt", body.get("prompt") or "")
        vectors, _, warnings = await self._embed(request, body, [prompt] if prompt else [], "prompt")
        content = f'{{"embedding":{vectors[0] if vectors else "[]"}}}'
        return warn(Response(content, media_type="application/json"), warnings)

    async def _embed(
        self, request: Request, body: Mapping[str, Any], prompts: Sequence[Prompt], field: str
    ) -> tuple[list[str], int, list[str]]:
        """(JSON of each vector, tokens of all prompts, sentences about what is not done as asked)."""
        text("model", body.get("model") or "")
        cache_fields = {name: body[name] for name in _CACHE if body.get(name) is not None}
        options = read_options(cache_fields, self._driver.model_info)
        options = self._driver.engine.embedding_options(None, options)
        options = replace(options, **read_vector_options(requested_fields(body), truncates=True))
        vectors, tokens, cuts = await vectors_of(request, self._driver, prompts, options, field)
        return vectors, tokens, [*unknown_fields(body, (field, *_EMBED_FIELDS)), *cuts]

    async def tags(self, _request: Request) -> Response:
        return JSONResponse({"models": [self._entry]})

    async def running_models(self, _request: Request) -> Response:
        on_gpu = (await self._driver.status()).threads is None
        size = self._entry["size"] if on_gpu else 0
        state = {"expires_at": NEVER, "size_vram": size, "context_length": self._driver.engine.context}
        return JSONResponse({"models": [self._entry | state]})

    async def show(self, request: Request) -> Response:
        """POST /api/show: the model's template and shape. Raises ApiError or BadRequest."""
        body = await self._body(request)
        text("model", body.get("model") or body.get("name") or "")
        engine = self._driver.engine
        shown = await asyncio.to_thread(show_response, engine.model, engine.context, self._entry)
        return warn(JSONResponse(shown), unknown_fields(body, MODEL_FIELDS))

    async def pull(self, request: Request) -> Response:
        """POST /api/pull: success for this server's model, for which it does nothing. Raises ApiError or BadRequest."""
        body = await self._body(request)
        name, model = text("model", body.get("model") or body.get("name") or ""), self._driver.engine.model.name
        if name.removesuffix(":latest") != model:
            raise ApiError(501, f"This server pulls no models: it has {model} alone", "not_supported", "model")
        stream = flag("stream", True if body.get("stream") is None else body["stream"])
        success = {"status": "success"}
        if not stream:
            return JSONResponse(success)
        return Response(LINES.frame(success), headers=HEADERS, media_type=LINES.media_type)

    @cached_property
    def _entry(self) -> dict[str, Any]:
        model = self._driver.engine.model
        return list_entry(model.name, model.config, model.weights, model.dtype, model.path.is_dir())


def _read_format(field: str, value: Any) -> dict[str, Any]:
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        inner, paths = {"schema": value}, FieldPaths({".json_schema.schema": field})
        return {"type": "json_schema", "json_schema": inner, "paths": paths}
    raise wrong_value(field, 'a JSON schema or "json"', value)


def _read_thinking(field: str, value: Any) -> dict[str, Any] | None:
    """The template's variable that says whether the model reasons before it answers."""
    if not isinstance(value, (bool, str)):
        raise wrong_value(field, 'true, false, or an effort such as "high"', value)
    return {"enable_thinking": value} if isinstance(value, bool) else None


OPTION_ROWS = (
    *((f"options.{name}", name) for name in EXTENSIONS if name in OPTIONS and name != "max_tokens"),
    *((f"options.{name}", name) for name in ("tfs_z", "logit_bias", "reasoning_budget_tokens", *ABSENT_SAMPLERS)),
    ("options.penalize_newline", "penalize_nl"),
    ("options.num_predict", "max_tokens"),
)
"""Options that change an answer; others are about memory and speed."""

TABLE = FieldTable(
    "ollama",
    ("model", *_CACHE, "pack", "stream"),
    *OPTION_ROWS,
    ("format", "response_format", _read_format),
    ("logprobs", "logprobs", lambda field, value: 0 if flag(field, value) else None),
    ("top_logprobs", "logprobs"),
    ("think", "chat_template_kwargs", _read_thinking),
    ("think", "reasoning_effort", lambda field, value: value if isinstance(value, str) else None),
)
"""The fields of both endpoints that generate, but for the prompt."""


def _conversation(body: Mapping[str, Any]) -> dict[str, Any]:
    tools = array("tools", body.get("tools", []))
    return {"messages": objects_with_paths("messages", body.get("messages"))} | ({"tools": tools} if tools else {})


def _completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt of /api/generate: a question to the model, or a raw text."""
    TABLE.refuse(body)
    prompt, system = text("prompt", body.get("prompt", "")), text("system", body.get("system", ""))
    is_raw = flag("raw", body.get("raw", False))
    if body.get("images") and ("suffix" in body or is_raw):
        raise BadRequest("images", "images: a raw prompt has none; leave out raw and suffix")
    if "suffix" in body:
        return {"prompt": prompt, "suffix": body["suffix"]}
    if is_raw:
        return {"prompt": prompt}
    paths = FieldPaths({".images": "images", "": "prompt"})
    question = {"paths": paths, "role": "user", "content": prompt, "images": body.get("images")}
    return {"messages": [*([message_of("system", "system", system)] if system else []), question]}


@dataclass(frozen=True)
class GenerateEndpoint(Endpoint):
    path: str
    prompt_of: Callable[[Mapping[str, Any]], dict[str, Any]]  # the prompt of a body, in our own names
    known: Collection[str] = field()
    framing = LINES

    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, LinesWriter]:
        body = {"stream": True} | requested_fields(body)
        if not body.get("logprobs"):
            body.pop("top_logprobs", None)  # which asks for nothing by itself
        request = TABLE.read(self.prompt_of(body) | TABLE.translate(body), info, ("messages", "prompt"))
        logprobs = None if request.params.logprobs is None else ChatLogprobs(info.model.tokenizer)
        return request, LinesWriter(info.name, self.path, logprobs)

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        known_options = known_fields("ollama's options", *(name.removeprefix("options.") for name, _ in OPTION_ROWS))
        return super().warnings(body) + unknown_fields(body.get("options") or {}, known_options, "options.")


CHAT = GenerateEndpoint("/api/chat", _conversation, {*TABLE.known, "messages", "tools"})
GENERATE = GenerateEndpoint("/api/generate", _completion, {*TABLE.known, "prompt", "system", "suffix", "raw", "images"})


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message_for("ollama")}


@dataclass
class LinesWriter(Writer):
    error_body = error_body

    model: str
    path: str
    logprobs: ChatLogprobs | None
    _start_time: float = field(default_factory=time.monotonic)
    _call: Call | None = None  # the current call, which is written when it is complete
    _calls: int = 0

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        calls = [entry for call in answer.calls for entry in self._call_entries(call)]
        return self._object(answer, calls) | self._end(answer)

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        """The lines of a piece; one without text for a piece that is still waited for."""
        calls: list[dict[str, Any]] = []
        if piece.call is not None:
            calls += self._call_entries(self._call)
            self._call = Call(piece.call.id, piece.call.name, "")
        if self._call is not None:
            self._call = Call(self._call.id, self._call.name, self._call.arguments + piece.arguments)
        if piece.finish_reason is not None:
            calls += self._call_entries(self._call)
        if piece.text or piece.reasoning or calls or piece.logprobs or piece.is_waiting:
            yield self._object(piece, calls) | {"done": False}
        if piece.finish_reason is not None:
            yield self._object(Piece(), []) | self._end(piece)

    def _call_entries(self, call: Call | None) -> list[dict[str, Any]]:
        """A list with a whole call; empty for one that was cut off."""
        if call is None or (arguments := arguments_of(call.arguments)) is None:
            return []
        self._calls += 1
        function = {"index": self._calls - 1, "name": call.name, "arguments": arguments}
        return [{"id": call.id, "function": function}]

    def _object(self, piece: Piece | Answer, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"thinking": piece.reasoning, "tool_calls": calls}
        content = {"content": piece.text, **{name: part for name, part in more.items() if part}}
        line = answer_line(self.path, self.model, content)
        if self.logprobs is not None and piece.logprobs:
            line["logprobs"] = self.logprobs.write(piece.logprobs)["content"]
        return line

    def _end(self, last: Piece | Answer) -> dict[str, Any]:
        usage = last.usage
        assert usage is not None
        return {
            "done": True,
            "done_reason": "length" if last.finish_reason == "length" else "stop",
            "total_duration": nanoseconds(time.monotonic() - self._start_time),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": nanoseconds(usage.prefill_seconds),
            "eval_count": usage.completion_tokens,
            "eval_duration": nanoseconds(usage.generation_seconds),
        }


def nanoseconds(seconds: float) -> int:
    """`seconds` in whole nanoseconds, the unit of this API."""
    return round(seconds * 1e9)

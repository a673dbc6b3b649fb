"""OpenAI's Responses: /v1/responses, /v1/responses/compact, and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polarlm.engine import EngineError
from polarlm.engine.parsing.pieces import Piece
from polarlm.engine.sampling.sample import resolve
from polarlm.server.http.dialects._response_events import (
    CompactionWriter,
    NameFields,
    ResponseWriter,
    name_fields_of,
    read_choice,
    read_tools,
)
from polarlm.server.http.dialects._shared import FieldPaths, FieldTable, members, message_of, objects_with_paths
from polarlm.server.http.errors import TOO_LONG, ApiError, api_error
from polarlm.server.http.generation import Endpoint, Generation, ModelInfo
from polarlm.server.http.openai.logprobs import ChatLogprobs
from polarlm.server.http.streams import HEADERS, NAMED
from polarlm.server.http.warnings import add_to_stream, warn
from polarlm.server.reading.edits import Compaction
from polarlm.server.reading.fields import requested_fields
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.parts import kind_of, list_kinds
from polarlm.server.reading.sampling import EXTENSIONS
from polarlm.server.reading.values import LARGEST, BadRequest, array, check_at_most, count, flag, one_of, text
from polarlm.server.running import journal
from polarlm.server.running.driver import Driver
from polarlm.server.running.stored_responses import StoredResponses

PATHS = ("/v1/responses", "/responses")

_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"  # reasoning is in the response as it is
_TRIGGER = "compaction_trigger"  # the last item of a request for a compaction alone
_COMPACT_ABOVE = 200_000  # tokens
_MOST_PAIRS, _LONGEST = 16, 576  # characters of a pair of metadata


def routes(driver: Driver) -> list[Route]:
    responses = Responses(lambda: driver.stored_responses)
    generation = _Generation(driver, responses, {"object": "response.input_tokens"})
    compact = Generation(driver, _Compact()).serve
    return [
        *(Route(path, generation.serve, methods=["POST"]) for path in PATHS),
        *(Route(f"{path}/compact", compact, methods=["POST"]) for path in PATHS),
        *(Route(f"{path}/input_tokens", generation.count, methods=["POST"]) for path in PATHS),
    ]


error_body = ApiError.body


def _read_input(field: str, value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [message_of(field, "user", value)]
    return objects_with_paths(field, array(field, value, "a string, or an array with at least one item", 1))


def _read_context(field: str, value: Any) -> list[Compaction]:
    compactions = []
    for index, one in enumerate(array(field, value)):
        path = f"{field}[{index}]"
        one_of(f"{path}.type", members(path, one).get("type"), ("compaction",))
        threshold = members(path, one).get("compact_threshold", _COMPACT_ABOVE)
        tokens = count(f"{path}.compact_threshold", threshold, 1, LARGEST)
        compactions.append(Compaction(threshold=tokens, goes_on=True))
    return compactions


def _read_format(field: str, value: Any) -> dict[str, Any] | None:
    if not value:
        return None
    format = members(field, value)
    return {"type": format.get("type"), "json_schema": format, "paths": FieldPaths({".json_schema": field})}


TABLE = FieldTable(
    "responses",
    ("model", "temperature", "top_p", "parallel_tool_calls", "stream", *EXTENSIONS),
    ("truncation", "", lambda field, value: one_of(field, value, ("auto", "disabled"))),
    ("max_output_tokens", "max_tokens"),
    ("include", "logprobs", lambda field, value: 0 if _LOGPROBS in array(field, value) else None),
    ("top_logprobs", "logprobs"),
    ("instructions", "messages", lambda field, value: [message_of(field, "system", text(field, value))]),
    ("input", "messages", _read_input),
    ("context_management", "edits", _read_context),
    ("tool_choice", "tool_choice", read_choice),
    ("text.verbosity", "verbosity"),
    ("text.format", "response_format", _read_format),
    ("reasoning.effort", "reasoning_effort"),
    ("reasoning.max_tokens", "reasoning_budget_tokens"),
    ("tools", "tools", read_tools),
    ("metadata",),
    ("previous_response_id", "", text),
    ("store", "", flag),
)


class Responses(Endpoint):
    framing = NAMED
    known = TABLE.known
    _writer: ClassVar[type[ResponseWriter]] = ResponseWriter

    def __init__(self, stored: Callable[[], StoredResponses | None] = lambda: None) -> None:
        """stored: returns the earlier responses, if such are kept."""
        self._stored = stored

    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, ResponseWriter]:
        body = requested_fields(body)
        TABLE.refuse(body)
        compaction, items = None, body.get("input")
        if isinstance(items, list) and items and kind_of(items[-1]) == _TRIGGER:
            compaction, body = Compaction(), body | {"input": items[:-1]}
        ours = TABLE.translate({"input": None} | body)
        entry, stored, previous = journal.current(), self._stored(), body.get("previous_response_id") or None
        key = (entry and entry.key) or ""
        if previous is not None:
            after = 1 if body.get("instructions") is not None else 0  # those of the earlier response count no more
            ours["messages"][after:after] = _earlier_items(stored, previous, key)
        ours["continue_final_message"] = False  # an answer is an item of its own
        edits = () if compaction else tuple(ours.get("edits", ()))
        request = replace(TABLE.read(ours, info), edits=edits, compaction=compaction)
        params, name_fields = request.params, name_fields_of(ours.get("tools", []))
        logprobs = None if params.logprobs is None else ChatLogprobs(info.model.tokenizer)
        repeated_fields = {
            "instructions": body.get("instructions"),
            "max_output_tokens": None if (most := resolve(params, info.model.generation).max_tokens) < 0 else most,
            "metadata": _metadata(body.get("metadata", {})),
            "parallel_tool_calls": flag("parallel_tool_calls", body.get("parallel_tool_calls", True)),
            "temperature": params.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _choice(ours.get("tool_choice", "auto"), name_fields),
            "top_p": params.top_p,
            "previous_response_id": previous,
            "store": stored is not None and body.get("store") is not False,
        }
        writer = self._writer(info.name, info.tells_cached, repeated_fields, logprobs, name_fields)
        if stored is not None and repeated_fields["store"]:
            given = body["input"]
            items = [{"role": "user", "content": given}] if isinstance(given, str) else given
            writer.keep = lambda output: stored.keep(writer.id, key, previous, [*items, *output])
        return replace(request, has_custom_calls=True), writer

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        truncation = ["truncation is ignored: this server cuts no prompt"] if body.get("truncation") == "auto" else []
        include = body.get("include")
        names = include if isinstance(include, list) else ()
        parts = [str(one) for one in names if one not in (None, _LOGPROBS, _ENCRYPTED)]
        others = [f"include names {list_kinds(parts)}, which responses here do not have"] if parts else []
        return [*truncation, *others, *super().warnings(body)]


class _Compact(Responses):
    """/v1/responses/compact, whose response has the user's messages and the compaction of all."""

    _writer = CompactionWriter

    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, ResponseWriter]:
        items = body.get("input")
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        if isinstance(items, list) and (not items or kind_of(items[-1]) != _TRIGGER):
            body = body | {"input": [*items, {"type": _TRIGGER}]}
        request, writer = super().read(body, info)
        assert isinstance(writer, CompactionWriter)
        writer.kept = [{"type": "message", **one} for one in items or () if one.get("role") == "user"]
        return replace(request, stream=False), writer


class _Generation(Generation):
    """The endpoint. A stream whose prompt is too long is a response that failed, as at OpenAI: Codex, which would go on
    with a shorter one, takes an error's status for the end."""

    async def respond(self, raw_request: Request, body: dict[str, Any]) -> Response:
        try:
            return await super().respond(raw_request, body)
        except EngineError as error:
            if error.code != TOO_LONG or not body.get("stream"):
                raise
            request, writer = await self._parse(body)
            events = [*writer.events(0, Piece(), first=True), writer.failure(api_error(error))]
            content = b"".join(map(NAMED.frame, add_to_stream(events, request.sentences)))
            return warn(Response(content, headers=HEADERS, media_type=NAMED.media_type), request.sentences)


def _earlier_items(stored: StoredResponses | None, id: str, key: str) -> list[dict[str, Any]]:
    """What a response went on from, and its own items. Raises BadRequest if it is not kept."""
    items = None if stored is None else stored.items(id, key)
    if items is None:
        why = f"{id} is not kept here" if stored else "this server keeps no responses without --cache-disk"
        sentence = f"previous_response_id: {why}: send the earlier items in input"
        raise BadRequest("previous_response_id", sentence)
    return [members("input", item) for item in items]


def _choice(choice: Any, name_fields: NameFields) -> Any:
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed_tools = choice[kind]
        kinds = ("function", "custom")
        tools = [_choice(one, name_fields) for one in allowed_tools["tools"] if one.get("type") in kinds]
        return {"type": "allowed_tools", **allowed_tools, "tools": tools} if tools else "auto"
    if kind not in ("function", "custom"):
        return "auto"
    name = choice[kind]["name"]
    return {"type": kind, **name_fields.get(name, {"name": name})}


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the answer as a response repeats it; `_read_format` has validated it."""
    format: dict[str, Any] = (body.get("text") or {}).get("format") or {"type": "text"}
    return {"name": "answer", **format} if format["type"] == "json_schema" else format


def _metadata(value: Any) -> dict[str, str]:
    """The request's metadata, pairs of strings, which a response repeats. Raises BadRequest."""
    pairs = members("metadata", value)
    check_at_most(_MOST_PAIRS, "metadata", len(pairs), "pairs")
    for name, one in pairs.items():
        if len(text("metadata", name)) + len(text(f"metadata.{name}", one)) > _LONGEST:
            raise BadRequest("metadata", f"metadata has a pair of more than {_LONGEST} characters")
    return pairs

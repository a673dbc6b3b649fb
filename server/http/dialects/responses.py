"""OpenAI's Responses: /v1/responses, and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polarlm.engine import EngineError
from polarlm.engine.parsing.pieces import Piece
from polarlm.engine.sampling.sample import most_tokens
from polarlm.server.http.dialects._response_events import ResponseTools, ResponseWriter, read_choice, tools_of
from polarlm.server.http.dialects._shared import FieldPaths, known_fields, members, objects_with_paths, read_own, refuse
from polarlm.server.http.errors import TOO_LONG, ApiError, api_error
from polarlm.server.http.generation import Endpoint, Generation, ModelInfo
from polarlm.server.http.openai.logprobs import ChatLogprobs
from polarlm.server.http.streams import HEADERS, NAMED
from polarlm.server.http.warnings import add_to_stream, warn
from polarlm.server.reading.fields import requested_fields
from polarlm.server.reading.parameters import ParsedRequest
from polarlm.server.reading.parts import list_kinds
from polarlm.server.reading.sampling import EXTENSIONS
from polarlm.server.reading.values import BadRequest, array, check_at_most, flag, one_of, text
from polarlm.server.running.driver import Driver

PATHS = ("/v1/responses", "/responses")

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "tool_choice.allowed_tools": "tool_choice",
    "verbosity": "text.verbosity",
    "reasoning_effort": "reasoning.effort",
}  # our name of a field → this API's
_SAME_NAMES = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "stream"),
    *(name for name in EXTENSIONS if name not in _NAMES),  # not in OpenAI's API
)
_OWN_NAMES = (
    *("input", "instructions", "max_output_tokens", "top_logprobs", "include", "text"),
    *("tools", "tool_choice", "reasoning", "metadata", "truncation"),
)
_LOGPROBS = "message.output_text.logprobs"
_ENCRYPTED = "reasoning.encrypted_content"  # reasoning is in the response as it is
_MOST_PAIRS, _LONGEST = 16, 576  # characters of a pair of metadata


def routes(driver: Driver) -> list[Route]:
    generation = _Generation(driver, Responses(), {"object": "response.input_tokens"})
    return [
        *(Route(path, generation.serve, methods=["POST"]) for path in PATHS),
        *(Route(f"{path}/input_tokens", generation.count, methods=["POST"]) for path in PATHS),
    ]


error_body = ApiError.body


class Responses(Endpoint):
    framing = NAMED
    known = known_fields("responses", *_SAME_NAMES, *_OWN_NAMES)

    def read(self, body: dict[str, Any], info: ModelInfo) -> tuple[ParsedRequest, ResponseWriter]:
        body = requested_fields(body)
        ours = _in_own_names(body)
        tools = tools_of(body.get("tools", []))
        if tools.tools:
            ours["tools"] = tools.tools
        request = read_own(ours, _NAMES, info)
        params = request.params
        logprobs = None if params.logprobs is None else ChatLogprobs(info.model.tokenizer)
        repeated_fields = {
            "instructions": body.get("instructions"),
            "max_output_tokens": None if (most := most_tokens(params, info.model.generation)) < 0 else most,
            "metadata": _metadata(body.get("metadata", {})),
            "parallel_tool_calls": flag("parallel_tool_calls", body.get("parallel_tool_calls", True)),
            "temperature": params.temperature,
            "text": {"format": _format(body)},
            "tool_choice": _choice(ours.get("tool_choice", "auto"), tools),
            "top_p": params.top_p,
        }
        return request, ResponseWriter(info.name, info.tells_cached, repeated_fields, logprobs, tools)

    def warnings(self, body: Mapping[str, Any]) -> list[str]:
        truncation = ["truncation is ignored: this server cuts no prompt"] if body.get("truncation") == "auto" else []
        include = body.get("include")
        names = include if isinstance(include, list) else ()
        unsupported = [str(one) for one in names if one not in (None, _LOGPROBS, _ENCRYPTED)]
        others = [f"include names {list_kinds(unsupported)}, which responses here do not have"] if unsupported else []
        return [*truncation, *others, *super().warnings(body)]


class _Generation(Generation):
    """The endpoint. A stream whose prompt is too long is a response that failed, as at OpenAI: Codex, which would go on
    with a shorter one, takes an error's status for the end."""

    async def respond(self, raw_request: Request, body: dict[str, Any]) -> Response:
        try:
            return await super().respond(raw_request, body)
        except EngineError as error:
            if error.code != TOO_LONG or not body.get("stream"):
                raise
            _, writer, warnings = await self._parse(body)
            events = [*writer.events(0, Piece(), first=True), writer.failure(api_error(error))]
            content = b"".join(map(NAMED.frame, add_to_stream(events, warnings)))
            return warn(Response(content, headers=HEADERS, media_type=NAMED.media_type), warnings)


def _in_own_names(body: Mapping[str, Any]) -> dict[str, Any]:
    refuse(body, "responses")
    one_of("truncation", body.get("truncation", "auto"), ("auto", "disabled"))
    ours = {name: body[name] for name in _SAME_NAMES if name in body}
    if "max_output_tokens" in body:
        ours["max_tokens"] = body["max_output_tokens"]
    if "top_logprobs" in body or _LOGPROBS in array("include", body.get("include", [])):
        ours["logprobs"] = body.get("top_logprobs", 0)
    ours["messages"] = _messages(body)
    ours["continue_final_message"] = False  # an answer is an item of its own
    return ours | read_choice(body.get("tool_choice")) | _text_settings(body.get("text")) | _reasoning(body)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    first: list[dict[str, Any]] = []
    if "instructions" in body and (instructions := text("instructions", body["instructions"])):
        first.append({"paths": FieldPaths({"": "instructions"}), "role": "system", "content": instructions})
    items = body.get("input")
    if isinstance(items, str):
        return [*first, {"paths": FieldPaths({"": "input"}), "role": "user", "content": items}]
    return first + objects_with_paths("input", array("input", items, "a string, or an array with at least one item", 1))


def _choice(choice: Any, tools: ResponseTools) -> Any:
    if isinstance(choice, str):
        return choice
    if (allowed_tools := choice.get("allowed_tools")) is not None:
        functions = [_choice(one, tools) for one in allowed_tools["tools"] if "function" in one]
        return {"type": "allowed_tools", **allowed_tools, "tools": functions} if functions else "auto"
    return {"type": "function", **tools.name_fields(choice["function"]["name"])} if "function" in choice else "auto"


def _text_settings(value: Any) -> dict[str, Any]:
    """The constraint and the verbosity of the answer, in our own names."""
    if value is None:
        return {}
    settings = members("text", value)
    ours = {"verbosity": settings["verbosity"]} if "verbosity" in settings else {}
    if settings.get("format"):
        format = members("text.format", settings["format"])
        ours["response_format"] = {"type": format.get("type"), "json_schema": format}
    return ours


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the answer as a response repeats it; `_text_settings` has validated it."""
    format: dict[str, Any] = (body.get("text") or {}).get("format") or {"type": "text"}
    return {"name": "answer", **format} if format["type"] == "json_schema" else format


def _reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    settings = members("reasoning", body.get("reasoning", {}))
    return {"reasoning_effort": settings["effort"]} if "effort" in settings else {}


def _metadata(value: Any) -> dict[str, str]:
    """The request's metadata, pairs of strings, which a response repeats. Raises BadRequest."""
    pairs = members("metadata", value)
    check_at_most(_MOST_PAIRS, "metadata", len(pairs), "pairs")
    for name, one in pairs.items():
        if len(text("metadata", name)) + len(text(f"metadata.{name}", one)) > _LONGEST:
            raise BadRequest("metadata", f"metadata has a pair of more than {_LONGEST} characters")
    return pairs

"""Errors as clients see them: in OpenAI's shape, {"error": {"message", "type", "param", "code"}}, or a dialect's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from polarlm.engine import EngineError
from polarlm.engine.cli.flags import in_flags
from polarlm.engine.errors import ConstraintError
from polarlm.server.reading.values import BadRequest
from polarlm.server.running.refusals import Refusal

TOO_LONG = "context_length_exceeded"
CLOSE = {"Connection": "close"}  # for responses after which the connection cannot be used
_FULL = {  # what is said of a full context, with the words by which each API's clients know it
    "openai": "{message}. This model's maximum context length is {n_ctx} tokens here",
    "anthropic": "prompt is too long: {n_prompt_tokens} tokens > {n_ctx} maximum. {message}",
    "ollama": "the input length exceeds the context length. {message}",
    "llama-server": "{message}",
}
_MOST_PATH = 200  # characters of a path, which clients choose
_RETRYING_IS_NO_USE = {"X-Should-Retry": "false"}  # a header that OpenAI's clients obey

# Code of an engine's error that is not the client's fault → HTTP status; all others are a 400.
_ENGINE_STATUS = {
    "out_of_memory": 503,
    "closed": 503,
    "device_unavailable": 503,
    "model_damaged": 500,
    "model_not_found": 404,
    "session": 422,
    "storage": 507,
}
_REFUSED_STATUS = {
    "busy": 429,
    "rate_limited": 429,
    "timeout": 504,
    "internal": 500,
    "sessions_off": 501,
    "unknown_session": 404,
    "model_not_found": 404,
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response. `message` is a sentence for the client, `param` the wrong field."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)

    def message_for(self, api: str) -> str:
        """The message in the words of an API."""
        is_full = self.code == TOO_LONG and "n_ctx" in self.numbers
        return _FULL[api].format(message=self.message, **self.numbers) if is_full else self.message

    def body(self) -> dict[str, Any]:
        kind = "exceed_context_size_error" if self.code == TOO_LONG else _type(self.status)  # as llama-server has it
        fields = {"message": self.message_for("openai"), "type": kind, "param": self.param, "code": self.code}
        return {"error": {**fields, **self.numbers}}

    def response(self) -> Response:
        return JSONResponse(self.body(), self.status, self.headers)


def _type(status: int) -> str:
    return "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"


def api_error(error: Exception) -> ApiError:
    """`error` in the form that clients see; a generic one if it is unexpected."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BadRequest):
        return ApiError(400, error.message, "invalid_request", error.field)
    if isinstance(error, EngineError):
        field = error.field if isinstance(error, ConstraintError) else None
        return ApiError(_ENGINE_STATUS.get(error.code, 400), in_flags(error), error.code, field, numbers=error.numbers)
    if isinstance(error, Refusal):
        headers = dict(_RETRYING_IS_NO_USE) if error.code in ("timeout", "model_not_loaded") else {}
        if error.retry_after is not None:
            headers["Retry-After"] = str(error.retry_after)
        return ApiError(_REFUSED_STATUS.get(error.code, 503), error.message, error.code, headers=headers)
    return ApiError(500, "The server could not answer this request", "internal", headers=CLOSE)


class ErrorShapes:
    def __init__(self, bodies: Mapping[str, Callable[[ApiError], dict[str, Any]]]) -> None:
        """bodies: first part of a path, such as "/api" → shape of errors; other paths have OpenAI's."""
        self._bodies = bodies

    def body(self, path: str, error: ApiError) -> dict[str, Any]:
        for first, body in self._bodies.items():
            if path == first or path.startswith(f"{first}/"):
                return body(error)
        return error.body()

    def response(self, path: str, error: ApiError) -> Response:
        return JSONResponse(self.body(path, error), error.status, error.headers)

    async def handle(self, request: Request, error: Exception) -> Response:
        path = request.scope["path"]
        if isinstance(error, HTTPException):
            sentence = f"{error.detail}: this API has no {request.method} {path[:_MOST_PATH]}"
            code = error.detail.lower().replace(" ", "_")
            error = ApiError(error.status_code, sentence, code, headers=error.headers or {})
        return self.response(path, api_error(error))

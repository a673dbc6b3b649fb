"""The messages of the socket, as docs/socket-protocol.md describes them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from polarlm.engine import Chunk, EngineError, TokenLogprob
from polarlm.engine.cli.flags import in_flags
from polarlm.model_loaders.tokenizers import Tokenizer
from polarlm.server.reading.values import BadRequest

_MOST_ID = 200  # characters
Id = str | int


def read_id(message: dict[str, Any]) -> Id:
    value = message.get("id")
    if isinstance(value, str) and len(value) <= _MOST_ID and value.isprintable():
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    raise BadRequest("id", f"id must be a whole number or a string of at most {_MOST_ID} printable characters")


def likelihood(tokenizer: Tokenizer, token: TokenLogprob) -> dict[str, Any]:
    """A token's log-probability, and the log-probabilities of the most likely tokens at its position."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"id": token_id, "token": data.decode("utf-8", "replace"), "logprob": logprob}

    return entry(token.id, token.logprob) | {"top": [entry(*other) for other in token.top]}


def last_of(chunk: Chunk, hide_cached: bool) -> dict[str, Any]:
    usage = chunk.usage
    assert usage is not None
    counts: dict[str, Any] = {name: value for name, value in asdict(usage).items() if name.endswith("_tokens")}
    if hide_cached:
        del counts["cached_tokens"]
    elif usage.from_tiers:
        counts["cached_from"] = usage.cached_from
    if not usage.drafted_tokens:
        del counts["drafted_tokens"], counts["accepted_tokens"]
    seconds = {name: round(value, 6) for name, value in asdict(usage).items() if name.endswith("_seconds")}
    return {"done": True, "finish_reason": chunk.finish_reason, "usage": counts, "timings": seconds}


def error_of(error: Exception) -> dict[str, Any]:
    message = in_flags(error) if isinstance(error, EngineError) else str(error)
    fields: dict[str, Any] = {"code": getattr(error, "code", "invalid_request"), "message": message}
    for name in ("field", "retry_after"):
        if (value := getattr(error, name, None)) is not None:
            fields[name] = value
    return {"error": fields | getattr(error, "numbers", {})}

"""What dialects share: requests in our own names, and JSON that may be nested, as the arguments of calls are."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from polarlm.server.http.generation import About
from polarlm.server.parameters import Asked, read
from polarlm.server.pieces import Call
from polarlm.server.values import BadRequest, text, wrong


def read_own(
    body: Mapping[str, Any], names: Mapping[str, str], about: About, takes: Collection[str] = ("messages",)
) -> Asked:
    """The request in `body`, which has our own names; each of its messages has its place in the client's body as well.

    names: our name → the client's, for sentences about fields that are called otherwise there. Raises BadRequest.
    """
    places = {f"messages[{i}]": message["place"] for i, message in enumerate(body.get("messages", ()))}
    try:
        return read(body, about.model.tokenizer.tokenize, takes, parse_special=about.parse_special)
    except BadRequest as error:
        raise _renamed(error, {**places, **names}) from None


def _renamed(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """`error` with the client's name of the field."""
    for ours, theirs in names.items():
        rest = (error.field or "").removeprefix(ours)
        if rest != error.field and rest[:1] in ("", ".", "["):
            message = error.message
            return BadRequest(
                theirs + rest, theirs + message.removeprefix(ours) if message.startswith(ours) else message
            )
    return error


def members(field: str, value: Any) -> dict[str, Any]:
    """The members of a JSON object that are not null. Raises BadRequest."""
    if not isinstance(value, dict):
        raise wrong(field, "an object", value)
    return {name: member for name, member in value.items() if member is not None}


def items(field: str, value: Any) -> list[Any]:
    """A JSON array. Raises BadRequest."""
    if not isinstance(value, list):
        raise wrong(field, "an array", value)
    return value


def json_text(field: str, value: Any) -> str:
    """The text of a JSON object, as the arguments of a call are kept. Raises BadRequest."""
    if not isinstance(value, dict):
        raise wrong(field, "an object", value)
    try:
        return text(field, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RecursionError:
        raise BadRequest(field, f"{field} is nested too deeply") from None
    except ValueError:
        raise BadRequest(field, f"{field} holds a number that JSON does not have") from None


def arguments_of(call: Call) -> dict[str, Any] | None:
    """The arguments of a call; None for those of a call that the limit of tokens has cut off."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None

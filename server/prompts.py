"""Reading the prompt of a request: JSON in, an engine's Prompt and PromptOptions out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine import PromptOptions
from engine.requests.prompts import Prompt
from server.values import LARGEST, BadRequest, count, flag, shown, text, wrong

MOST_SALT = 1024  # characters

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles that clients may use, and their names in templates."""


def read_prompt(body: Mapping[str, Any], takes: Collection[str] = ("messages", "prompt")) -> Prompt:
    """The prompt under one of the names in `takes`. Raises BadRequest."""
    given = [name for name in takes if body.get(name) is not None]
    if len(given) != 1:
        missing = f"{' or '.join(takes)} is missing"
        raise BadRequest(next(iter(takes)), "give either messages or prompt, not both" if given else missing)
    return _messages(body["messages"]) if given == ["messages"] else _raw_prompt(body["prompt"])


def read_options(body: Mapping[str, Any], *, parse_special: bool) -> PromptOptions:
    """The options of a prompt; parse_special: the default, whether a raw prompt has control tokens.

    Raises BadRequest.
    """
    cache_prompt, salt = body.get("cache_prompt"), body.get("cache_salt")
    special = body.get("parse_special")
    return PromptOptions(
        parse_special=parse_special if special is None else flag("parse_special", special),
        cache_prompt=True if cache_prompt is None else flag("cache_prompt", cache_prompt),
        cache_salt=read_salt(salt),
    )


def read_salt(value: Any) -> str:
    """A cache salt; empty for none. Raises BadRequest."""
    if value is None:
        return ""
    if not 1 <= len(text("cache_salt", value)) <= MOST_SALT:
        raise BadRequest("cache_salt", f"cache_salt must have 1 to {MOST_SALT} characters, not {len(value)}")
    return str(value)


def _raw_prompt(value: Any) -> str | list[int]:
    """A string, or token ids; either may stand in an array of its own."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        if len(value) > 1:
            raise BadRequest("prompt", "several prompts in one request are not supported: send one at a time")
        value = value[0]
    if isinstance(value, str):
        return text("prompt", value)
    if not isinstance(value, list) or not value:
        raise wrong("prompt", "a string or an array of token ids", value)
    return [count(f"prompt[{index}]", token, 0, LARGEST) for index, token in enumerate(value)]


def _messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", "an array with at least one message", value)
    return [_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _message(field: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise wrong(field, "an object with a role and a content", message)
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise BadRequest(f"{field}.{name}", f"{name} in a message is not supported")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{field}.role", f"one of {', '.join(ROLES)}", role)
    field = f"{field}.content"
    if isinstance(content, list):
        content = "".join(_part(f"{field}[{index}]", part) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise wrong(field, "a string or an array of text parts", content)
    return {"role": ROLES[role], "content": text(field, content)}


def _part(field: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise wrong(field, 'an object such as {"type": "text", "text": "…"}', part)
    kind = part.get("type")
    if kind != "text":
        named = f"{shown(kind)} parts are" if isinstance(kind, str) else "a part without a type is"
        raise BadRequest(f"{field}.type", f"{named} not supported: this server takes text alone")
    return text(f"{field}.text", part.get("text"))

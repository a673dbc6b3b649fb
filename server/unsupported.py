"""Fields that ask for what this server does not do. They may be there where their value asks for nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def complaint(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first field of a request that asks for what is not there, and a sentence that names it; None if none does."""
    for name, (harmless, reason) in _UNSUPPORTED.items():
        if name in body and not harmless(body[name]):
            return name, f"{name}: {reason}"
    return None


def _is_plain_text_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


_Refusal = tuple[Callable[[Any], bool], str]
_NO_TOOLS: _Refusal = (lambda value: value == [], "this server calls no tools; leave it out")
_NO_CHOICE: _Refusal = (lambda value: value == "none", "this server calls no tools; leave it out")

_UNSUPPORTED: Mapping[str, _Refusal] = {
    "tools": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "tool_choice": _NO_CHOICE,
    "function_call": _NO_CHOICE,
    "response_format": (_is_plain_text_format, "this server writes plain text alone; leave it out"),
    "modalities": (lambda value: value == ["text"], "this server writes text alone; leave it out"),
    "audio": (lambda value: False, "this server writes text alone; leave it out"),
    "suffix": (lambda value: value == "", "this server does not write into the middle of a text"),
    "echo": (lambda value: value is False, "this server does not repeat the prompt; leave it out"),
    "best_of": (lambda value: value == 1 and value is not True, "this server does not rank answers"),
}

"""Checks the messages of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polarlm.model_loaders.tokenizers import Tokenizer

_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")  # passed to templates


@dataclass(frozen=True)
class Message:
    """A message as a template gets it, and the ids that it was generated as."""

    fields: dict[str, Any]  # what the template gets; "role" and "content" are text
    token_ids: tuple[int, ...] | None = None  # the generated ids; they replace the ids of content, reasoning and calls
    has_reasoning: bool = False  # whether these ids begin with reasoning

    @property
    def is_whole_turn(self) -> bool:
        """Whether the ids include more than the content."""
        return self.token_ids is not None and (self.has_reasoning or bool(self.fields.get("tool_calls")))


def check_messages(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> list[Message]:
    """The messages, checked. Raises ValueError for malformed ones."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ValueError("messages must be a list with at least one message.")
    return [_check_message(message, index, tokenizer) for index, message in enumerate(messages)]


def _check_message(message: Any, index: int, tokenizer: Tokenizer) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"messages[{index}] must be an object with a role and a content.")
    content: dict[str, Any] = {name: message[name] for name in _FIELDS if message.get(name) is not None}
    if calls := content.pop("tool_calls", None):
        content = {"content": "", **content, "tool_calls": _check_calls(calls, index)}
    for field in ("role", "content"):
        if not isinstance(content.get(field), str):
            parts = " or a list of parts, as {'type': 'text', 'text': '…'}" if field == "content" else ""
            raise ValueError(f"messages[{index}].{field} must be a string{parts}.")
    return Message(content, _check_ids(message, index, tokenizer), message.get("reasoned") is True)


def _check_calls(calls: Any, index: int) -> list[dict[str, Any]]:
    calls_checked = []
    for number, call in enumerate(calls if isinstance(calls, (list, tuple)) else [calls]):
        function = call.get("function") if isinstance(call, Mapping) else None
        name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, Mapping) else (0, 0)
        if not isinstance(name, str) or not isinstance(arguments, str):
            expected = "a function's name, and the text of its arguments"
            raise ValueError(f"messages[{index}].tool_calls[{number}] must have {expected}.")
        id_field = {"id": call["id"] if isinstance(call.get("id"), str) else ""}
        calls_checked.append({**id_field, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls_checked


def _check_ids(message: Mapping[str, Any], index: int, tokenizer: Tokenizer) -> tuple[int, ...] | None:
    ids = message.get("token_ids")
    if ids is None or message["role"] != "assistant":
        return None
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
        raise ValueError(f"messages[{index}].token_ids must be a list of token ids.")
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < tokenizer.vocab_size:
            raise ValueError(f"messages[{index}].token_ids has {token_id!r}, which is not a token of this model.")
    return tuple(ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids)

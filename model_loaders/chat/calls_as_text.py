"""Conversations with tools for templates that accept none: the tools, calls and results become text of messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_TEXT = (
    "You can call these functions. Each line describes one of them in JSON:\n{tools}\n"
    "To call a function, write its name and its arguments as JSON in tags:\n"
    '<tool_call>\n{{"name": "the name", "arguments": {{}}}}\n</tool_call>\n'
    "The next message has the result. Call none if you need none."
)


def calls_as_text(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    *,
    shown: Callable[[Iterable[tuple[str, str, str]]], str],
    takes_system: bool,
) -> list[dict[str, Any]]:
    """Messages of text alone: tools are listed first, calls follow an answer's text, results are the user's.

    shown: `CallFormat.shown`. takes_system: whether the template accepts a system message.
    """
    said: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if said and said[-1].pop("results", False):
                text = f"{said.pop()['content']}\n{text}"
            said.append({"role": "user", "content": text, "results": True})
        elif calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            written = shown((function["name"], function["arguments"], "") for function in functions)
            plain = {name: value for name, value in message.items() if name != "tool_calls"}
            said.append({**plain, "content": "\n".join(filter(None, (message["content"], written)))})
        else:
            said.append(dict(message))
    for message in said:
        message.pop("results", None)
    if not tools:
        return said
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TEXT.format(tools=listed)
    if said[0]["role"] == "system":
        return [{**said[0], "content": f"{said[0]['content']}\n\n{text}"}, *said[1:]]
    if takes_system:
        return [{"role": "system", "content": text}, *said]
    return [{**said[0], "content": f"{text}\n\n{said[0]['content']}"}, *said[1:]]

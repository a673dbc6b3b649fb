"""The text that all turns of a conversation begin with, read from the body of a request in any of the APIs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_BLOCK = 256  # characters, about the 64 tokens of a block
_BLOCKS = 16  # of a user's first message: a long document with another question after it has the same ones


def prefix_key(body: bytes) -> str:
    """A short hash of the beginning that a request's prompt shares with later turns; empty where it has none.

    That is what stands before the first message of a user, and the first 4,096 characters of that message. A prompt
    without messages has its first 256 characters, if it has as many: a shorter one fills no block.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    text = _conversation(request) or _raw_prompt(request)
    if not text:
        return ""
    salted = f"{request.get('cache_salt')}\n{text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(salted, digest_size=16).hexdigest()


def _conversation(request: Mapping[str, Any]) -> str:
    """The text up to the end of the first user's message; empty if there is none."""
    before = [_text(request.get(name)) for name in ("system", "instructions")]  # Anthropic's, and Responses'
    messages = request.get("messages") or request.get("input")
    if isinstance(messages, str):  # Responses' short form of one message
        messages = [{"role": "user", "content": messages}]
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            return ""
        text = _text(message.get("content"))
        if message.get("role") == "user":
            return "\n".join([*before, text[: _BLOCK * _BLOCKS]])
        before.append(text)
    return ""


def _raw_prompt(request: Mapping[str, Any]) -> str:
    """The first block of a prompt that is a text or token ids."""
    prompt = request.get("prompt") or request.get("input_prefix")
    if isinstance(prompt, list):
        prompt = json.dumps(prompt)
    return prompt[:_BLOCK] if isinstance(prompt, str) and len(prompt) >= _BLOCK else ""


def _text(content: Any) -> str:
    """The text of a message's content: a string, or a list of parts with "text"."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""

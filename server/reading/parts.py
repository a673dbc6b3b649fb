"""Parts of messages: blocks and items of any API, also of types that do not exist yet. Their texts, and images."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from polarlm.engine.data_urls import file_in, is_data_url
from polarlm.server.reading.values import BadRequest, describe

_MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "computer_screenshot", "image_generation_call"), "image"),
    **dict.fromkeys(("audio", "input_audio", "output_audio"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "container_upload"), "file"),
}
CALLED_WITH = ("arguments", "input", "action", "actions", "operation", "code", "queries")
"""Members of a call of a tool, of any provider's, that have what it was called with."""

_TEXTS = {  # members that have text, or objects with text
    *("title", "url", "filename", "context", "text", "refusal", "content", "source", "summary", "message"),
    *("output", "outputs", "results", "logs", "stdout", "stderr", "error", "error_code"),
}
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")
"""Members of a message that have the reasoning of an answer; the first with a text counts."""

_REASONING_TEXTS = (*REASONING, "text", "content", "summary")  # members of a part of such reasoning
_SEALED = ("encrypted_content", "signature", "data")  # members of it that only its maker can read
_LONGEST_SCHEME = 16  # characters of an address up to its colon; base64 has none
_MOST_DEPTH = 8  # nesting of the texts in a part
_MOST_NAMED, _LONGEST = 5, 38  # names in a sentence, and characters of each


@dataclass(frozen=True)
class Losses:
    """Types of parts that a prompt lacks, or has as text, in the order in which they were read."""

    left_out: dict[str, None] = field(default_factory=dict)
    as_text: dict[str, None] = field(default_factory=dict)


def text_of_part(part: Any, losses: Losses) -> str:
    """The text of a part: its own, or its type and the texts in it, a line each; a note for an image, a sound, a video
    or a file; "" for what else has no text."""
    if isinstance(part, str):
        return part
    kind, part = kind_of(part), part if isinstance(part, dict) else {}
    if note := _note(part, losses):
        return note
    for name in ("text", "refusal"):
        if isinstance(part.get(name), str):
            return str(part[name])
    texts = list(_inner_texts(part, losses, _MOST_DEPTH))
    if not texts and kind.endswith("text") and part.get("text") is None:  # an empty one, however it is written
        return ""
    if not texts:
        losses.left_out[kind] = None
        return ""
    losses.as_text[kind] = None
    name = part.get("name")
    head = f"{kind} {name}" if isinstance(name, str) else kind
    return "\n".join((f"\n[{head}]", *texts, ""))


def kind_of(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else "untyped"


def is_reasoning(kind: str) -> bool:
    return kind.startswith(("reasoning", "thinking", "redacted"))


def reasoning_in(value: Any, losses: Losses) -> str:
    """The text of past reasoning in the form of any API: a text, a part or an item, or a list of these."""
    if isinstance(value, list):
        return "".join(reasoning_in(one, losses) for one in value)
    if not isinstance(value, dict):
        return value if isinstance(value, str) else ""
    names = [name for name in _REASONING_TEXTS if name in value]
    text = next(filter(None, (reasoning_in(value[name], losses) for name in names)), "")
    if value and not text and (not names or any(value.get(name) for name in _SEALED)):
        losses.left_out[kind_of(value)] = None
    return text


def is_image(part: Any) -> bool:
    return _MEDIA.get(kind_of(part)) == "image"


def image_in(at: str, part: Mapping[str, Any]) -> bytes:
    """The file of an image, which a part has in base64 or as a data URL. Raises BadRequest, which names `at`."""
    value: Any = part
    while isinstance(value, dict):
        value = next((value[name] for name in ("image_url", "source", "url", "data") if value.get(name)), None)
    if not isinstance(value, str):
        raise BadRequest(at, f"{at} has no image in it: send one in base64, or as a data URL")
    if ":" in value[:_LONGEST_SCHEME] and not is_data_url(value):
        sentence = "this server fetches no addresses: send the image itself, as a data URL: data:image/png;base64,…"
        raise BadRequest(at, f"{at}: {sentence}")
    try:
        return file_in(value)
    except ValueError:
        raise BadRequest(at, f"{at} has an image that is not base64") from None


def list_kinds(kinds: Iterable[str]) -> str:
    names = [describe(kind[:_LONGEST]) for kind in kinds]
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _note(part: dict[str, Any], losses: Losses) -> str:
    """What stands for a part that is no text; "" for others."""
    kind = kind_of(part)
    medium = _MEDIA.get(kind)
    if kind == "document":
        source = part.get("source")
        if isinstance(source, dict) and source.get("type") not in ("text", "content"):
            medium = kind
    if medium is None:
        return ""
    losses.left_out[kind] = None
    return f"[{medium} left out]"


def _inner_texts(value: Any, losses: Losses, depth: int) -> Iterator[str]:
    """The texts in a part, in their order. What may be data, such as an encrypted member, is none."""
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, list) and depth:
        for one in value:
            yield from _inner_texts(one, losses, depth - 1)
    elif isinstance(value, dict) and depth:
        if note := _note(value, losses):
            yield note
            return
        for name, member in value.items():
            if name in CALLED_WITH and member:
                yield member if isinstance(member, str) else json.dumps(member, ensure_ascii=False)
            elif name in _TEXTS or (name == "data" and value.get("type") == "text"):
                yield from _inner_texts(member, losses, depth - 1)

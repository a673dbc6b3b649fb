"""Finds the tags around a model's reasoning by rendering an answer with reasoning through its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polarlm.model_loaders.chat.renders import Renders
from polarlm.model_loaders.errors import LoadError

Place = Literal["before", "inside", "after"]


@dataclass(frozen=True)
class Tags:
    """The text before and after reasoning, such as <think> and </think>."""

    open: str
    close: str


_QUESTION, _REASONING, _ANSWER = "alphaquestion", "alphareasoning", "alphaanswer"
_USUAL = Tags("<think>", "</think>")
_KNOWN = (_USUAL, Tags("<|channel>thought", "<channel|>"))  # which templates do not write, but remove or open
_BEFORE = re.compile(r"(<[^<>\s]+>|\[[^\[\]\s]+\])\s*$")
_AFTER = re.compile(r"\s*(<[^<>\s]+>|\[[^\[\]\s]+\])")


def find_tags(template: Renders) -> Tags | None:
    """The tags of the template's reasoning; None if it knows none. Raises LoadError if it cannot run.

    Most templates write the reasoning of the last answer. Others remove an answer's text up to the closing tag, or
    write the opening tag at the end of a prompt. For these, some pairs of tags are tried.
    """
    question = {"role": "user", "content": _QUESTION}
    shown = {"role": "assistant", "content": _ANSWER, "reasoning_content": _REASONING}
    answers = [f"{tags.open}\n{_REASONING}{tags.close}{_ANSWER}" for tags in _KNOWN]
    inside = [[question, {"role": "assistant", "content": answer}] for answer in answers]
    written, *stripped = template.render_each([[question, shown], *inside], add_generation_prompt=False)
    (prompt,) = template.render_each([[question]])
    if isinstance(written, str) and (tags := _around(written)):
        return tags
    for known, text in zip(_KNOWN, stripped, strict=True):
        strips = isinstance(text, str) and _REASONING not in text and _ANSWER in text
        if strips or _ends_with(prompt, known.open):
            return known
    return None


def _around(text: str) -> Tags | None:
    before, found, rest = text.partition(_REASONING)
    after, answered, _ = rest.partition(_ANSWER)
    if not found or not answered:
        return None
    open, close = _BEFORE.search(before), _AFTER.match(after)
    return Tags(open[1], close[1]) if open and close else None


_CALL = {"id": "alphaid01", "type": "function", "function": {"name": "alphaname", "arguments": "{}"}}
ASKED: Sequence[Mapping[str, Any]] = [{"role": "user", "content": _QUESTION}]
CALLED: Sequence[Mapping[str, Any]] = [
    *ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _CALL["id"], "name": "alphaname", "content": "alpharesult"},
]


def place_of_answer(
    template: Renders, tags: Tags, variables: Mapping[str, object], messages: Sequence[Mapping[str, Any]] = ASKED
) -> Place:
    """Where an answer to `messages` begins: before, inside or after its reasoning, if the template gets `variables`."""
    (prompt,) = template.render_each([messages], **variables)
    if _ends_with(prompt, tags.open):
        return "inside"
    return "after" if _ends_with(prompt, tags.close) else "before"


def _ends_with(prompt: str | LoadError, tag: str) -> bool:
    return isinstance(prompt, str) and prompt.rstrip().endswith(tag)

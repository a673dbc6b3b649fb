"""Finds the tags around a model's reasoning by rendering an answer with reasoning through its chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polarlm.model_loaders.chat.call_format import Message, Render
from polarlm.model_loaders.errors import LoadError

Place = Literal["before", "inside", "after"]


@dataclass(frozen=True)
class Tags:
    """The text before and after reasoning, such as <think> and </think>."""

    open: str
    close: str


_QUESTION, _REASONING, _ANSWER = "alphaquestion", "alphareasoning", "alphaanswer"
_KNOWN_TAGS = (Tags("<think>", "</think>"), Tags("<|channel>thought", "<channel|>"))  # which templates remove or open
_TAG = r"(<[^<>\s]+>|\[[^\[\]\s]+\])"
_REASONING_PATTERN = re.compile(rf"{_TAG}\s*{_REASONING}\s*{_TAG}.*{_ANSWER}", re.DOTALL)
_CALL = {"id": "alphaid01", "type": "function", "function": {"name": "alphaname", "arguments": "{}"}}
QUESTION: Sequence[Message] = [{"role": "user", "content": _QUESTION}]
QUESTION_WITH_CALL: Sequence[Message] = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": _CALL["id"], "name": "alphaname", "content": "alpharesult"},
]


def find_tags(render: Render) -> Tags | None:
    """The tags of the template's reasoning; None if it knows none. Raises LoadError if it cannot run.

    Most templates write the reasoning of the last answer. Others remove an answer's text up to the closing tag, or
    write the opening tag at the end of a prompt. For these, some pairs of tags are tried.
    """
    answer: dict[str, Any] = {"role": "assistant", "content": _ANSWER}
    answers = [{**answer, "reasoning_content": _REASONING}]
    answers += [{**answer, "content": f"{tags.open}\n{_REASONING}{tags.close}{_ANSWER}"} for tags in _KNOWN_TAGS]
    answer_text, *texts = render([[*QUESTION, one] for one in answers], add_generation_prompt=False)
    (prompt,) = render([QUESTION])
    if isinstance(answer_text, str) and (pair := _REASONING_PATTERN.search(answer_text)):
        return Tags(pair[1], pair[2])
    for tags, text in zip(_KNOWN_TAGS, texts, strict=True):
        strips = isinstance(text, str) and _REASONING not in text and _ANSWER in text
        if strips or _ends_with(prompt, tags.open):
            return tags
    return None


def find_ending(render: Render, tags: Tags) -> str:
    """The text between reasoning and answer, with its white space; the usual one if the template does not show it."""
    answer = {"role": "assistant", "content": _ANSWER, "reasoning_content": _REASONING}
    (text,) = render([[*QUESTION, answer]], add_generation_prompt=False)
    ending = (
        re.search(rf"{_REASONING}(\s*{re.escape(tags.close)}\s*){_ANSWER}", text) if isinstance(text, str) else None
    )
    return ending[1] if ending else f"\n{tags.close}\n\n"


def knows_effort(render: Render) -> bool:
    """Whether the template writes how much the model is to reason."""
    texts = [render([QUESTION], reasoning_effort=effort)[0] for effort in ("low", "high")]
    return all(isinstance(text, str) for text in texts) and texts[0] != texts[1]


def place_of_answer(
    render: Render, tags: Tags, variables: Mapping[str, object], messages: Sequence[Message] = QUESTION
) -> Place:
    """Where an answer to `messages` begins: before, inside or after its reasoning, if the template gets `variables`."""
    (prompt,) = render([messages], **variables)
    if _ends_with(prompt, tags.open):
        return "inside"
    return "after" if _ends_with(prompt, tags.close) else "before"


def _ends_with(prompt: str | LoadError, tag: str) -> bool:
    return isinstance(prompt, str) and prompt.rstrip().endswith(tag)

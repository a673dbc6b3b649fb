"""How OpenAI writes answers: whole ones and streamed ones, to conversations and to plain prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine import Completion, Usage


class Dialect(Protocol):
    """What differs between the two ways to ask."""

    takes: str  # the field that holds the prompt
    prefix: str  # of an answer's id
    whole: str  # names of the objects
    part: str

    def answer(self, text: str) -> dict[str, Any]:
        """A whole answer, as a part of a choice."""

    def opening(self) -> dict[str, Any] | None:
        """What a streamed answer begins with, before any text."""

    def piece(self, text: str) -> dict[str, Any]:
        """Some of a streamed answer; without text, its end."""


class Chat:
    """/v1/chat/completions"""

    takes, prefix, whole, part = "messages", "chatcmpl", "chat.completion", "chat.completion.chunk"

    def answer(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


class Text:
    """/v1/completions"""

    takes, prefix, whole, part = "prompt", "cmpl", "text_completion", "text_completion"

    def answer(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}


@dataclass(frozen=True)
class Writer:
    """Writes the objects of one response."""

    dialect: Dialect
    model: str
    with_usage: bool  # a streamed response: ends with the usage, and all before it says null
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = [
            _choice(index, self.dialect.answer(answer.text), answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return self._object(self.dialect.whole, choices) | {"usage": usage([answer.usage for answer in answers])}

    def opening(self, index: int) -> dict[str, Any] | None:
        opening = self.dialect.opening()
        return None if opening is None else self._part([_choice(index, opening)])

    def text(self, index: int, text: str) -> dict[str, Any]:
        return self._part([_choice(index, self.dialect.piece(text))])

    def end(self, index: int, reason: str) -> dict[str, Any]:
        return self._part([_choice(index, self.dialect.piece(""), reason)])

    def usage(self, of_answers: Sequence[Usage]) -> dict[str, Any]:
        """The event behind the last answer's end."""
        return self._part([]) | {"usage": usage(of_answers)}

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        part = self._object(self.dialect.part, choices)
        return part | {"usage": None} if self.with_usage else part

    def _object(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.dialect.prefix}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _choice(index: int, content: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def usage(of_answers: Sequence[Usage]) -> dict[str, Any]:
    """The usage of answers to one prompt, which counts once: cached is of it what no answer had to read again."""
    prompt = of_answers[0].prompt_tokens
    completion = sum(answer.completion_tokens for answer in of_answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(answer.cached_tokens for answer in of_answers)},
    }

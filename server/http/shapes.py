"""How OpenAI writes answers: whole ones and streamed ones, to conversations and to plain prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine import Chunk, Completion, TokenLogprob, Usage
from model_loaders.tokenizers import Tokenizer
from server.http.logprobs import ChatLogprobs, Logprobs, TextLogprobs


class Dialect(Protocol):
    """What differs between the two ways to ask."""

    takes: str  # the field that holds the prompt
    prefix: str  # of an answer's id
    whole: str  # names of the objects
    part: str
    switched_logprobs: bool  # asked for with true, and a count beside it

    def answer(self, text: str) -> dict[str, Any]:
        """A whole answer, as a part of a choice."""

    def opening(self) -> dict[str, Any] | None:
        """What a streamed answer begins with, before any text."""

    def piece(self, text: str) -> dict[str, Any]:
        """Some of a streamed answer; without text, its end."""

    def logprobs(self, tokenizer: Tokenizer) -> Logprobs:
        """What writes the log-probabilities of an answer."""


class Chat:
    """/v1/chat/completions"""

    takes, prefix, whole, part = "messages", "chatcmpl", "chat.completion", "chat.completion.chunk"
    switched_logprobs = True

    def answer(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def logprobs(self, tokenizer: Tokenizer) -> Logprobs:
        return ChatLogprobs(tokenizer)


class Text:
    """/v1/completions"""

    takes, prefix, whole, part = "prompt", "cmpl", "text_completion", "text_completion"
    switched_logprobs = False

    def answer(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, tokenizer: Tokenizer) -> Logprobs:
        return TextLogprobs(tokenizer)


@dataclass(frozen=True)
class Writer:
    """Writes the objects of one response."""

    dialect: Dialect
    model: str
    with_usage: bool  # a streamed response: ends with the usage, and all before it says null
    logprobs: Sequence[Logprobs] = ()  # for each answer, where they are asked for
    tells_cached: bool = True  # how much of the prompt was in the cache
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = [
            self._choice(index, self.dialect.answer(answer.text), answer.finish_reason, answer.logprobs)
            for index, answer in enumerate(answers)
        ]
        return self._object(self.dialect.whole, choices) | {"usage": self._usage([answer.usage for answer in answers])}

    def events(self, index: int, chunk: Chunk, *, first: bool) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer's chunk; the answer's `first` one has the opening before it.

        A token whose text is held back has an event where it has log-probabilities.
        """
        if first and (opening := self.dialect.opening()) is not None:
            yield self._part(self._choice(index, opening))
        if chunk.text or chunk.logprobs:
            yield self._part(self._choice(index, self.dialect.piece(chunk.text), tokens=chunk.logprobs or None))
        if chunk.finish_reason is not None:
            yield self._part(self._choice(index, self.dialect.piece(""), chunk.finish_reason))

    def usage(self, of_answers: Sequence[Usage]) -> dict[str, Any]:
        """The event behind the last answer's end."""
        return self._part() | {"usage": self._usage(of_answers)}

    def _usage(self, of_answers: Sequence[Usage]) -> dict[str, Any]:
        told = usage(of_answers)
        return told if self.tells_cached else told | {"prompt_tokens_details": None}

    def _part(self, *choices: dict[str, Any]) -> dict[str, Any]:
        part = self._object(self.dialect.part, choices)
        return part | {"usage": None} if self.with_usage else part

    def _object(self, name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.dialect.prefix}-{self.id}",
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(
        self,
        index: int,
        content: Mapping[str, Any],
        reason: str | None = None,
        tokens: Sequence[TokenLogprob] | None = None,
    ) -> dict[str, Any]:
        told = self.logprobs[index].write(tokens) if self.logprobs and tokens is not None else None
        return {"index": index, **content, "logprobs": told, "finish_reason": reason}


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

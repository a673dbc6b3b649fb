"""Answers in OpenAI's shapes: whole and streamed ones, to conversations and to plain prompts."""

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
    """The difference between the endpoints for conversations and for plain prompts."""

    takes: str  # field of the prompt
    prefix: str  # of an answer's id
    whole: str  # names of the objects
    part: str
    switched_logprobs: bool  # whether log-probabilities are requested by true and a count beside it

    def answer(self, text: str) -> dict[str, Any]:
        """The fields of a choice for a whole answer."""

    def opening(self) -> dict[str, Any] | None:
        """The fields of a streamed answer's first choice, before any text; None for no such choice."""

    def piece(self, text: str) -> dict[str, Any]:
        """The fields of a choice for a piece of a streamed answer; for its end without text."""

    def logprobs(self, tokenizer: Tokenizer) -> Logprobs:
        """A writer of the log-probabilities of one answer."""


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
    """Makes the JSON objects of one response."""

    dialect: Dialect
    model: str
    with_usage: bool  # whether a streamed response ends with the usage; it is null in all events before
    logprobs: Sequence[Logprobs] = ()  # one for each answer, if requested
    tells_cached: bool = True  # whether the usage has the number of cached tokens
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
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

    def usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The event after the end of the last answer."""
        return self._part() | {"usage": self._usage(usages)}

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        return usage(usages) | ({} if self.tells_cached else {"prompt_tokens_details": None})

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
        logprobs = self.logprobs[index].write(tokens) if self.logprobs and tokens is not None else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """The usage of answers to one prompt, which counts once; its cached tokens are those that every answer found."""
    prompt = usages[0].prompt_tokens
    completion = sum(answer.completion_tokens for answer in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(answer.cached_tokens for answer in usages)},
    }

"""Answers in OpenAI's shapes: whole and streamed ones, to conversations and to plain prompts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import Chunk, Completion, TokenLogprob, Usage
from model_loaders.tokenizers import Tokenizer
from server.http.logprobs import ChatLogprobs, Logprobs, TextLogprobs


@dataclass(frozen=True)
class Dialect:
    """The difference between the endpoints for conversations and for plain prompts."""

    takes: str  # field of the prompt
    prefix: str  # of an answer's id
    whole: str  # names of the objects
    part: str
    switched_logprobs: bool  # whether log-probabilities are requested by true and a count beside it
    answer: Callable[[str], dict[str, Any]]  # fields of a choice for a whole answer
    opening: dict[str, Any] | None  # of a streamed answer's first choice, before any text; None for no such choice
    piece: Callable[[str], dict[str, Any]]  # of a choice for some text of a streamed answer; for its end without text
    logprobs: Callable[[Tokenizer], Logprobs]  # writes those of one answer


CHAT = Dialect(
    takes="messages",
    prefix="chatcmpl",
    whole="chat.completion",
    part="chat.completion.chunk",
    switched_logprobs=True,
    answer=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    opening={"delta": {"role": "assistant", "content": ""}},
    piece=lambda text: {"delta": {"content": text} if text else {}},
    logprobs=ChatLogprobs,
)
"""/v1/chat/completions"""

TEXT = Dialect(
    takes="prompt",
    prefix="cmpl",
    whole="text_completion",
    part="text_completion",
    switched_logprobs=False,
    answer=lambda text: {"text": text},
    opening=None,
    piece=lambda text: {"text": text},
    logprobs=TextLogprobs,
)
"""/v1/completions"""


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
        if first and self.dialect.opening is not None:
            yield self._part(self._choice(index, self.dialect.opening))
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

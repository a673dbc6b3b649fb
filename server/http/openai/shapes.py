"""What OpenAI's two endpoints for answers have in common: responses with choices, whole and streamed."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from polarlm.engine import TokenLogprob, Usage
from polarlm.engine.parsing.pieces import Answer, Piece, Progress
from polarlm.server.http.generation import Writer
from polarlm.server.http.openai.logprobs import Logprobs
from polarlm.server.http.streams import Event


@dataclass(frozen=True)
class ChoicesWriter(Writer):
    """Makes the JSON objects of one response: what answers to conversations and to raw prompts have in common."""

    prefix: ClassVar[str]  # begins a response's id
    kind: ClassVar[str]  # the "object" of a whole response
    part_kind: ClassVar[str]  # the "object" of an event
    opening: ClassVar[dict[str, Any] | None] = None  # fields of a streamed answer's first choice, before any text

    model: str
    with_usage: bool  # whether a streamed response ends with the usage, which is null in all earlier events
    logprobs: Sequence[Logprobs] = ()  # one for each answer, if requested
    tells_cached: bool = True  # whether the usage has the number of cached tokens
    n: int = 1  # answers to each prompt
    fingerprint: str = ""  # of an engine whose answers can be replayed
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _start_time: float = field(default_factory=time.monotonic)
    _calls: dict[int, int] = field(default_factory=dict)  # answer → number of the call that began last

    @abstractmethod
    def fields(self, answer: Answer) -> dict[str, Any]:
        """The fields of a choice for a whole answer."""

    @abstractmethod
    def piece_fields(self, piece: Piece, number: int) -> dict[str, Any]:
        """The fields of a choice for a piece. number: of its call."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            self._choice(index, self.fields(answer), answer.finish_reason, answer.logprobs) | _replay(answer.usage)
            for index, answer in enumerate(answers)
        ]
        return self._object(self.kind, choices) | {"usage": self._usage([answer.usage for answer in answers])}

    def events(self, index: int, piece: Piece, *, first: bool) -> Iterator[Event]:
        """The events of a piece. A token whose text is held back gets an event if it has log-probabilities."""
        if first and self.opening is not None:
            yield self._part(self._choice(index, self.opening))
        if piece.call is not None:
            self._calls[index] = piece.call.index
        if piece.progress is not None:
            part = self._part(self._choice(index, self.piece_fields(piece, 0)))
            yield part | {"prompt_progress": prompt_progress(piece.progress, self._start_time)}
            return
        number = self._calls.get(index, 0)
        if piece.text or piece.reasoning or piece.call or piece.arguments or piece.logprobs:
            yield self._part(self._choice(index, self.piece_fields(piece, number), tokens=piece.logprobs or None))
        if piece.finish_reason is not None:
            last = self._choice(index, self.piece_fields(Piece(), number), piece.finish_reason)
            yield self._part(last | _replay(piece.usage))

    def ending(self, usages: Sequence[Usage]) -> Iterator[Event]:
        if self.with_usage:
            yield self._part() | {"usage": self._usage(usages)}
        yield None

    def _usage(self, usages: Sequence[Usage]) -> dict[str, Any]:
        return usage(usages, self.n) | ({} if self.tells_cached else {"prompt_tokens_details": None})

    def _part(self, *choices: dict[str, Any]) -> dict[str, Any]:
        part = self._object(self.part_kind, choices)
        return part | {"usage": None} if self.with_usage else part

    def _object(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            **({"system_fingerprint": self.fingerprint} if self.fingerprint else {}),
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


def _replay(usage: Usage | None) -> dict[str, str]:
    """The field with the digest of an answer that can be replayed."""
    return {"replay_digest": usage.replay_digest} if usage is not None and usage.replay_digest else {}


def prompt_progress(progress: Progress, start_time: float) -> dict[str, Any]:
    """The progress of a prompt in llama-server's shape. start_time: when it came, by `time.monotonic`."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(1000 * (time.monotonic() - start_time)),
    }


def usage(usages: Sequence[Usage], n: int) -> dict[str, Any]:
    """The usage of `n` answers to each prompt, which counts once. A token counts as cached if every answer found it;
    "cached_from" has the tokens from each place if a tier gave some, "reread" the largest part that was read again."""
    prompts = [usages[first : first + n] for first in range(0, len(usages), n)]
    prompt = sum(answers[0].prompt_tokens for answers in prompts)
    least = [min(answers, key=lambda answer: answer.cached_tokens) for answers in prompts]
    cached_tokens = sum(answer.cached_tokens for answer in least)
    details: dict[str, Any] = {"cached_tokens": cached_tokens}
    if any(answer.from_tiers for answer in least):
        places = sorted({place for answer in least for place in answer.cached_from})
        details["cached_from"] = {place: sum(answer.cached_from.get(place, 0) for answer in least) for place in places}
    if rereads := [answer.reread for answer in least if answer.reread is not None]:
        details["reread"] = max(rereads, key=lambda one: one.tokens)._asdict()
    completion = sum(answer.completion_tokens for answer in usages)
    fields = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
    counts: dict[str, int] = {}
    if reasoning_tokens := sum(answer.reasoning_tokens for answer in usages):
        counts["reasoning_tokens"] = reasoning_tokens
    if drafted_tokens := sum(answer.drafted_tokens for answer in usages):
        accepted_tokens = sum(answer.accepted_tokens for answer in usages)
        counts["accepted_prediction_tokens"] = accepted_tokens
        counts["rejected_prediction_tokens"] = drafted_tokens - accepted_tokens
    return fields | ({"completion_tokens_details": counts} if counts else {})

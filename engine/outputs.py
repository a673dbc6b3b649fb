"""What the engine hands out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Usage:
    """What one request took. Seconds are time spent computing, without time in the queue."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt: already in the KV store, not prefilled again
    completion_tokens: int
    prefill_seconds: float  # up to the logits of the first token
    generation_seconds: float  # steps after it that gave a token

    @property
    def prompt_rate(self) -> float:
        """Prefilled tokens a second."""
        return (self.prompt_tokens - self.cached_tokens) / max(self.prefill_seconds, 1e-9)

    @property
    def generation_rate(self) -> float:
        """Steps a second; the first token comes out of the prefill."""
        return max(0, self.completion_tokens - 1) / max(self.generation_seconds, 1e-9)


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a generated token was, in nats, and what else could have come in its place.

    The distribution is the model's own: log-softmax of its logits over the vocabulary, before bias, penalties,
    temperature and any cut, whatever the token was then drawn from. Computed in float64; every value is finite.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (id, logprob) of the most likely tokens, best first, equal ones by id


@dataclass(frozen=True)
class Chunk:
    """A piece of an answer. `text` holds whole characters only and may be empty."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # on the last chunk: "stop", "length" or "cancelled"
    usage: Usage | None = None  # on the last chunk
    prefilled: int = 0  # progress of a prompt: tokens done, of prompt_tokens
    prompt_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()  # of each of token_ids, where `SamplingParams.logprobs` asks for them


class Outbox(Protocol):
    """Where chunks go."""

    def append(self, item: Chunk | Exception, /) -> None:
        """Take a chunk, or an error in place of a last one. May not wait for anything."""


@dataclass(frozen=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()  # as in the chunks


def fold(chunks: Iterable[Chunk]) -> Completion:
    """The completion that a stream amounts to."""
    pieces = list(chunks)
    last = pieces[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    ids = tuple(i for piece in pieces for i in piece.token_ids)
    logprobs = tuple(token for piece in pieces for token in piece.logprobs)
    return Completion("".join(piece.text for piece in pieces), ids, last.finish_reason, last.usage, logprobs)


@dataclass(frozen=True)
class Score:
    """Teacher-forced results for ids (T,)."""

    logprobs: np.ndarray  # (T − 1,) float32: log p(ids[t + 1] | ids[: t + 1])
    logits: np.ndarray  # (T, V) float32 where they were asked for, else (0, V)


@dataclass(frozen=True)
class Threads:
    """How many CPU threads a step takes, and why so many, in a few words."""

    number: int
    why: str


@dataclass(frozen=True)
class Status:
    """How busy an engine is. Blocks are quantized blocks of the groups of layers, together; each is used, kept or
    free."""

    running: int  # requests that take part in steps
    waiting: int  # requests that do not yet
    blocks: int
    blocks_used: int  # held by requests
    blocks_kept: int  # held by none: a next turn can find what is in them, until they are needed for something else
    blocks_free: int  # with nothing in them that anybody could find
    threads: Threads | None  # None on a GPU


@dataclass(frozen=True)
class CacheStats:
    """What the cache of the most recent sequence takes."""

    tokens: int
    bytes: int  # blocks and full-precision slots it holds
    bits_per_value: float  # of a complete encoded block
    f16_bytes: int  # the same tokens in half precision
    context: int  # tokens that fit

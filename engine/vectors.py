"""Embeddings of several texts, whose requests wait in the engine's queue together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polarlm.engine.config import PromptOptions, SamplingParams
from polarlm.engine.errors import EngineError
from polarlm.engine.outputs import Chunk, Embedding, Outbox, embedding
from polarlm.engine.requests.prompts import Prompt
from polarlm.engine.requests.request import Ticket
from polarlm.model_loaders import Model


class Vectors(ABC):
    """The methods of an engine that give texts vectors."""

    model: Model

    @abstractmethod
    def submit(self, prompt: Prompt, params: Any = None, options: Any = None, *, into: Outbox) -> Ticket:
        """See `Engine.submit`."""

    @abstractmethod
    def work(self) -> bool:
        """See `Engine.work`."""

    def embed(self, prompt: Prompt, pooling: str | None = None, options: PromptOptions | None = None) -> Embedding:
        """The embedding of `prompt`, a vector of the model's hidden size.

        pooling: see `PromptOptions.pooling`; None: as the model's files say, and "mean" if they say nothing.
        """
        return self.embed_each([prompt], pooling, options)[0]

    def embed_each(
        self, prompts: Sequence[Prompt], pooling: str | None = None, options: PromptOptions | None = None
    ) -> list[Embedding]:
        """The embedding of each prompt, as `embed`. An encoder computes several together."""
        options = self.embedding_options(pooling, options)
        jobs = [(prompt, SamplingParams(max_tokens=0), options) for prompt in prompts]
        found = [embedding(chunks) for chunks in _answers(self, jobs)]
        embeddings = [one for one in found if one is not None]
        if len(embeddings) < len(found):
            raise EngineError("The request for an embedding was cancelled", "closed")
        return embeddings

    def embedding_options(self, pooling: str | None, options: PromptOptions | None = None) -> PromptOptions:
        """`options` of a request for an embedding: with `pooling`, or with that of the model."""
        return replace(options or PromptOptions(), pooling=pooling or self.model.pooling or "mean")


def _answers(engine: Vectors, jobs: Sequence[tuple[Prompt, SamplingParams, PromptOptions]]) -> list[list[Chunk]]:
    """Return the chunks of each request. All of them wait together, and this thread runs units of work meanwhile.

    An error of one of them ends the others. Raises EngineError.
    """
    outboxes: list[deque[Chunk | Exception]] = [deque() for _ in jobs]
    tickets: list[Ticket] = []
    try:
        for job, outbox in zip(jobs, outboxes, strict=True):
            tickets.append(engine.submit(*job, into=outbox))
        while unfinished := [outbox for outbox in outboxes if not _is_finished(outbox)]:
            if not engine.work() and not any(map(_is_finished, unfinished)):
                raise EngineError("The request was cancelled", "closed")
        return [_chunks(outbox) for outbox in outboxes]
    finally:
        for ticket in tickets:
            ticket.cancel()


def _is_finished(outbox: Sequence[Chunk | Exception]) -> bool:
    """Whether the last chunk has come, or an error. Raises EngineError for an error."""
    last = outbox[-1] if outbox else None
    if isinstance(last, Exception):
        raise last
    return last is not None and last.finish_reason is not None


def _chunks(outbox: Sequence[Chunk | Exception]) -> list[Chunk]:
    return [chunk for chunk in outbox if isinstance(chunk, Chunk)]

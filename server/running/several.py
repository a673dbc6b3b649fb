"""Requests of clients that are several requests of the engine: texts to embed, documents to rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from polarlm.engine import Chunk, Embedding, Engine, PromptOptions, SamplingParams
from polarlm.engine.outputs import embedding
from polarlm.engine.requests.prompts import Prompt
from polarlm.server.running import refused
from polarlm.server.running.counters import Totals
from polarlm.server.running.job import Job

T = TypeVar("T")
_TOGETHER = 256  # most requests of a job that wait in the engine's queue together


class _Place:
    """The outbox of one of several requests of a job: its chunks come to the job with its number."""

    def __init__(self, job: Job, number: int) -> None:
        self._job, self._number = job, number

    def append(self, item: Chunk | Exception) -> None:
        self._job.append(item if isinstance(item, Exception) else (self._number, item))


class Several(ABC):
    """The methods of a driver for such requests."""

    engine: Engine
    _totals: Totals
    _answers: Any
    _pool: Any

    @abstractmethod
    def _job(self, queue: Any) -> AbstractContextManager[Any]: ...

    @abstractmethod
    async def _submitted(self, entry: Any, job: Job, prompt: Prompt, start: Any, into: Any = None) -> Any: ...

    @abstractmethod
    async def _next(self, job: Job) -> Any: ...

    @abstractmethod
    async def _aside(self, function: Callable[[], T], pool: Any) -> T: ...

    async def embed(
        self, prompts: Sequence[Prompt], options: PromptOptions, write: Callable[[Embedding], T]
    ) -> list[T]:
        """What `write`, called in a thread, returns for each prompt's embedding. Some wait in the queue together.

        Raises Refused or EngineError. Cancelling the task that waits for it cancels the request.
        """
        jobs = [(prompt, SamplingParams(max_tokens=0), options) for prompt in prompts]

        def write_vector(chunks: Sequence[Chunk]) -> T:
            vector = embedding(chunks)
            if vector is None:
                raise refused.closing()
            return write(vector)

        return await self.each(jobs, write_vector, "embedded")

    async def each(
        self,
        jobs: Sequence[tuple[Prompt, SamplingParams, PromptOptions]],
        write: Callable[[Sequence[Chunk]], T],
        outcome: str,
    ) -> list[T]:
        """What `write`, called in a thread, returns for the chunks of each job, which are parts of one request.

        Raises and ends as `embed`. outcome: what the request counts as.
        """
        written: list[T] = []
        with self._job(self._answers) as (entry, job):
            # A decoder takes them one by one, between which the answers of others go on.
            together = _TOGETHER if self.engine.model.config.is_encoder else 1
            for first in range(0, len(jobs), together):
                part = jobs[first : first + together]
                places = [_Place(job, number) for number in range(len(part))]
                for (prompt, params, options), place in zip(part, places, strict=True):
                    start = partial(self.engine.submit, prompt, params, options)
                    await self._submitted(entry, job, prompt, start, place)
                chunks: list[list[Chunk]] = [[] for _ in part]
                while not all(own and own[-1].finish_reason is not None for own in chunks):
                    number, chunk = await self._next(job)
                    self._totals.count(chunk, job)
                    chunks[number].append(chunk)
                written += await self._aside(lambda: [write(own) for own in chunks], self._pool)  # noqa: B023
            job.outcome = outcome
        return written

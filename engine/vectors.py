"""Requests that wait in the engine's queue together, and embeddings of texts by them."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from polarlm.engine.errors import EngineError
from polarlm.engine.limits import RANK
from polarlm.engine.outputs import Chunk, Embedding
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.preparation.holes import PromptHoles
from polarlm.engine.requests.prompts import Prompt, first_ids, naming, one_prompt, pair_ids, yes_and_no
from polarlm.engine.requests.request import Ticket

Job = tuple[Prompt, SamplingParams, PromptOptions]

# The messages that Qwen3-Reranker was trained with.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class Vectors(PromptHoles):
    """The methods of an engine that give texts vectors."""

    submit: Callable[..., Ticket]

    def embed(self, prompt: Prompt, pooling: str | None = None, options: PromptOptions | None = None) -> Embedding:
        """The embedding of `prompt`, a vector of the model's size.

        pooling: see `PromptOptions.pooling`; None: as the model's files say, and "mean" if they say nothing.
        """
        return self.embed_each([one_prompt(prompt, "embed_each")], pooling, options)[0]

    def embed_each(
        self, prompts: Sequence[Prompt], pooling: str | None = None, options: PromptOptions | None = None
    ) -> list[Embedding]:
        """The embedding of each prompt, as `embed`. An encoder computes several together."""
        params, options = SamplingParams(max_tokens=0), self.embedding_options(pooling, options)
        return list(map(embedding, compute_each(self, [(prompt, params, options) for prompt in prompts])))

    def rerank(self, query: str, documents: Sequence[str], instruction: str | None = None) -> list[Embedding]:
        """How relevant each document is for `query`: vectors of one number from 0 to 1.

        A cross-encoder (BERT or XLM-R with one label) reads query and document as a pair; the number is σ of its
        logit. A generative model is asked whether a document is relevant; the number is the probability of yes beside
        no (Qwen3-Reranker, 2506.05176, section 2). instruction: what makes a document relevant, for a generative model.
        A generative model that does not call itself a reranker gives a Python warning, too. Raises EngineError.
        """
        if (note := self.ranking_note()) is not None:
            warnings.warn(note, stacklevel=2)
        return list(map(embedding, compute_each(self, self.rank_jobs(query, documents, instruction))))

    def ranking_note(self) -> str | None:
        """A sentence about scores of a generative model that does not call itself a reranker; None for others."""
        if self.model.config.scores_pairs or "rerank" in self.model.name.lower():
            return None
        return (
            f"{self.model.name} is no reranker by its name, and its scores may mean nothing: load a model such as "
            "bge-reranker or Qwen3-Reranker"
        )

    def rank_jobs(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None = None,
        *,
        truncate: bool = False,
        most: int | None = None,
        most_of_document: int | None = None,
        warn: Callable[[int, str], None] = lambda index, sentence: None,
    ) -> list[Job]:
        """The requests of `rerank`, for servers. truncate: the beginning is read of a document that is too long for
        the context. most: tokens of a request. most_of_document: of a document. warn: called with the number of each
        document that is cut, and a sentence. Raises EngineError for a model that cannot rank."""
        params, context = SamplingParams(max_tokens=0), self.context
        if most is not None:
            truncate, context = True, min(most, context)
        if self.model.config.scores_pairs:
            if instruction is not None:
                raise EngineError(f"{self.model.name} reads no instruction, only query and document: leave it out")
            options = PromptOptions(pooling=RANK)
            join = partial(pair_ids, query, model=self.model, context=context, truncate=truncate, most=most_of_document)
            pairs = (join(document, warn=partial(warn, index)) for index, document in enumerate(documents))
            return [(ids, params, options) for ids in pairs]
        if self.model.config.is_encoder:
            raise EngineError(
                f"{self.model.name} is an embedding model, which cannot rank documents: load a model such as "
                "bge-reranker or Qwen3-Reranker, or compare the vectors of query and documents"
            )
        yes_and_no(self.model.tokenizer)
        options = PromptOptions(pooling=RANK, template_variables={"enable_thinking": False})
        instruct = f"<Instruct>: {instruction or _INSTRUCTION}\n<Query>: {query}\n<Document>: "

        def prompt(document: str) -> Prompt:
            return [{"role": "system", "content": _JUDGE}, {"role": "user", "content": instruct + document}]

        def over(document: str) -> int:
            """How many tokens too long its prompt is, which an answer of one token follows."""
            return len(self.prompt_ids(prompt(document), options)) - (context - 1) if truncate else 0

        if truncate or most_of_document is not None:
            room = max(0, -over("")) if truncate else self.context
            room = room if most_of_document is None else min(room, most_of_document)
            documents = [self._beginning(one, room, over, partial(warn, at)) for at, one in enumerate(documents)]
        return [(prompt(document), params, options) for document in documents]

    def _beginning(self, text: str, most: int, over: Callable[[str], int], warn: Callable[[str], None]) -> str:
        """The beginning of a text that has at most `most` tokens, or fewer: until it is not `over` a limit. warn: see
        `within`."""
        if len(text.encode("utf-8", "replace")) <= most:  # a token has a byte or more
            return text
        ids = self.model.tokenizer.tokenize(text, continued=True)
        if len(ids) <= most and over(text) <= 0:
            return text
        beginning = ""
        while most > 0:  # tokens at the ends of a text may be others between what stands around it
            beginning = self.detokenize(ids[:most]).rstrip("\ufffd")  # half of a character
            if (excess := over(beginning)) <= 0:
                break
            most -= excess
        first_ids(ids, max(0, most), warn)
        return beginning if most > 0 else ""

    def embedding_options(self, pooling: str | None, options: PromptOptions | None = None) -> PromptOptions:
        """`options` of a request for an embedding, with `pooling`, or else the model's pooling."""
        return replace(options or PromptOptions(), pooling=pooling or self.model.pooling or "mean")


def embedding(chunks: Sequence[Chunk]) -> Embedding:
    """The embedding in one of `chunks`. Raises EngineError if the request was cancelled first."""
    last, vector = chunks[-1], next((one.embedding for one in chunks if one.embedding is not None), None)
    if vector is None:
        raise EngineError("The request for an embedding was cancelled", "closed")
    assert last.usage is not None
    return Embedding(vector, last.usage, last.warnings)


def compute_each(
    engine: Vectors, jobs: Sequence[tuple[Prompt, SamplingParams | None, PromptOptions | None]], **settings: Any
) -> list[list[Chunk]]:
    """The chunks of each request. All wait together, and this thread runs units of work meanwhile. An error in one ends
    the others. settings: as of `Engine.stream`. Raises EngineError, before any is computed if a prompt is refused."""
    outboxes: list[deque[Chunk | Exception]] = [deque() for _ in jobs]
    tickets: list[Ticket] = []
    try:
        for index, (job, outbox) in enumerate(zip(jobs, outboxes, strict=True)):
            with naming(index, len(jobs)):
                tickets.append(engine.submit(*job, into=outbox, **settings))
        while unfinished := [outbox for outbox in outboxes if not _is_finished(outbox)]:
            if not engine.work() and not any(map(_is_finished, unfinished)):
                raise EngineError("The request was cancelled", "closed")
        return [[chunk for chunk in outbox if isinstance(chunk, Chunk)] for outbox in outboxes]
    finally:
        for ticket in tickets:
            ticket.cancel()


def _is_finished(outbox: Sequence[Chunk | Exception]) -> bool:
    """Whether the last chunk has come, or an error. Raises EngineError for an error."""
    last = outbox[-1] if outbox else None
    if isinstance(last, Exception):
        raise last
    return last is not None and last.finish_reason is not None

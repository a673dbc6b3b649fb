"""One request on its way through the engine: its tokens, its text, its place in the store, its output."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard, cast

import numpy as np

import model_loaders
from engine.config import PromptOptions, SamplingParams
from engine.errors import EngineError, shown
from engine.kv.store import SequenceKV, Span
from engine.limits import check_roles
from engine.outputs import Chunk, Outbox, TokenLogprob, Usage
from engine.requests.answers import Answers
from engine.requests.scheduler import TokenSequence
from engine.sampling.constraints import Constraint, checked_mask
from engine.sampling.detokenizer import Detokenizer, StopFilter
from engine.sampling.dry import Dry
from engine.sampling.sample import Draw, Sampled, Sampling, resolve
from model_loaders.prompt import chat_ids
from model_loaders.tokenizers import Tokenizer

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]

_NOTHING = Chunk("", ())
_MOST_CHARACTERS = 16  # for each token of the context: a text with no more is tokenized at once


def prompt_ids(
    prompt: Prompt,
    model: model_loaders.Model,
    answers: Answers | None = None,
    options: PromptOptions = PromptOptions(),  # noqa: B008 - frozen
    *,
    context: int | None = None,
) -> list[int]:
    """Ids of text with BOS where the model wants one, of messages, or ids as they are, not yet looked at.

    Of messages, those of `answers` have the ids that they were generated as.

    Raises EngineError for anything else, and for text that cannot fit into `context`, before it is tokenized.
    """
    tokenizer = model.tokenizer
    check = partial(_must_be_able_to_fit, model, context)
    if isinstance(prompt, str):
        check(prompt)
        ids = tokenizer.tokenize(prompt, control=options.parse_special)
        return ids if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id, *ids]
    if is_chat(prompt):
        check_roles(prompt)
        try:
            known = answers.recalled(prompt, options.cache_salt) if answers else prompt
            return chat_ids(known, model.template, tokenizer, check)
        except ValueError as error:
            raise EngineError(str(error)) from None
    if not isinstance(prompt, (Sequence, np.ndarray)) or isinstance(prompt, bytes):
        raise EngineError(f"A prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    return list(cast(Sequence[int], prompt))


def _must_be_able_to_fit(model: model_loaders.Model, context: int | None, text: str) -> None:
    """Raises EngineError for a long text that has more tokens than `context`, however it is cut."""
    if context is None or len(text) <= _MOST_CHARACTERS * context:
        return
    least = model.tokenizer.least_tokens(text)
    if least > context:
        told = f"The prompt, of {least} tokens or more, exceeds the available context size of {context} tokens"
        raise _too_long(told, least, model, context)


def _too_long(told: str, tokens: int, model: model_loaders.Model, context: int) -> EngineError:
    whole = context >= model.config.max_context
    advice = "; the model was not trained on more" if whole else ", or raise ctx_size or kv_memory"
    return EngineError(
        f"{told}: shorten it{advice}",
        "context_length_exceeded",
        () if whole else ("ctx_size", "kv_memory"),
        n_prompt_tokens=tokens,
        n_ctx=context,
    )


def is_chat(prompt: Prompt) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def checked_ids(ids: Sequence[int], model: model_loaders.Model, context: int, room: int) -> list[int]:
    """`ids` as ints. Raises EngineError where there are none, unknown ones, or no `room` behind them in `context`."""
    known = model.vocabulary
    if len(ids) == 0:
        raise EngineError("The prompt is empty: give at least one token")
    for i in ids:
        if not isinstance(i, (int, np.integer)) or isinstance(i, bool) or i not in known:
            raise EngineError(f"The prompt holds {shown(i)}, which is not a token id below {known.stop}")
    if len(ids) > context - room:
        told = f"The prompt of {len(ids)} tokens exceeds the available context size of {context} tokens"
        told += f", {room} of them for the answer" if room else ""
        raise _too_long(told, len(ids), model, context)
    return [int(i) for i in ids]


def _token_text(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token; a control token's are its name."""
    return tokenizer.token_bytes(token) or tokenizer.token_name(token).encode()


@dataclass(frozen=True)
class Ticket:
    """A request in the queue, for whoever put it there."""

    prompt_tokens: int
    cancel: Callable[[], None]  # may be called at any time, from any thread, more than once
    cached_tokens: Callable[[], int] = lambda: 0  # of the prompt, as far as is known: found in the store


@dataclass
class Prefill:
    """A prefill under way."""

    span: Span
    units: Generator[int, None, Any]
    rows: int = 0  # rows done, summed over layers


@dataclass
class Clock:
    """Seconds of computing, by phase."""

    prefill: float = 0.0
    generation: float = 0.0

    def begin(self, prefilling: bool) -> None:
        """Start with a unit of work."""
        self._prefilling, self._since = prefilling, time.perf_counter()

    def lap(self) -> None:
        """Add the seconds since the unit began, or since the last lap."""
        now = time.perf_counter()
        if self._prefilling:
            self.prefill += now - self._since
        else:
            self.generation += now - self._since
        self._since = now


@dataclass(eq=False)
class Request:
    """A sequence and what turns its logits into chunks; `sampling` is `params` with defaults filled in."""

    sequence: TokenSequence
    params: SamplingParams
    sampling: Sampling
    tokenizer: Tokenizer
    detokenizer: Detokenizer
    vocabulary: range
    outbox: Outbox
    options: PromptOptions = PromptOptions()  # noqa: RUF009 - frozen
    wants_progress: bool = False
    keep: Callable[[Sequence[int]], None] | None = None  # remembers the answer's ids
    constraint: Constraint | None = None
    kv: SequenceKV | None = None
    prefill: Prefill | None = None
    cached: int | None = None  # prompt tokens found in the store; None before anyone has looked
    clock: Clock = field(default_factory=Clock)
    damaged: bool = False  # whether it ended because its numbers were not finite

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        params: SamplingParams,
        options: PromptOptions,
        model: model_loaders.Model,
        context: int,
        *,
        answers: Answers,
        outbox: Outbox,
        wants_progress: bool,
        constraint: Constraint | None = None,
    ) -> Request:
        """A request for what follows `prompt`. Raises EngineError where that cannot be served."""
        sampling = resolve(params, model.generation, model.vocabulary.stop)
        ids = checked_ids(prompt_ids(prompt, model, answers, options, context=context), model, context, room=1)
        keep = None
        if is_chat(prompt):
            params = replace(params, stop=(*params.stop, *model.template.stops))
            question = answers.question(prompt, options.cache_salt)
            keep = None if question is None else partial(answers.keep, question)
        room = context - len(ids)
        most = room if params.max_tokens < 0 else min(params.max_tokens, room)
        return cls(
            TokenSequence(tuple(ids), most),
            params,
            sampling,
            model.tokenizer,
            Detokenizer(model.tokenizer, at_start=is_chat(prompt)),
            model.vocabulary,
            outbox,
            options,
            wants_progress,
            keep,
            constraint,
        )

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(None if self.params.seed < 0 else self.params.seed)
        self._stop = StopFilter(self.params.stop)
        self._ends = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._ends |= self.tokenizer.eos_ids
        bans = {token: -math.inf for token in self._ends if token in self.vocabulary}
        self._going_on = replace(self.sampling, logit_bias={**self.sampling.logit_bias, **bans})
        self._dry: Dry | None = None
        if self.sampling.is_dry:
            self._dry = Dry(self.sampling, partial(_token_text, self.tokenizer), len(self.sequence.prompt))
            self._dry.read(self.sequence.ids)  # here, where nobody waits for the engine meanwhile

    def record_prefix_hit(self, length: int) -> None:
        """So many tokens were in the store when the request came to be computed; its first token settles it."""
        if self.sequence.generated == 0:
            self.cached = length

    def reproduces(self, length: int) -> bool:
        """Whether the rest is computed as it was, or for the first time, where so many tokens are in the store.

        A prompt sees itself exact and what was found as codes: once it has been computed, no more of it may be found.
        """
        return self.sequence.generated == 0 or not (self.cached or 0) < length < len(self.sequence.prompt)

    def span_end(self, start: int, block_size: int) -> int:
        """Where the tokens end that go into the store together, of those from `start` on.

        The prompt behind what was found. A request that gave way computes everything again as it was: what had been
        found, the rest of the prompt, and then blocks of its own tokens, which see what the steps saw.
        """
        cached, prompt = self.cached or 0, len(self.sequence.prompt)
        if start < prompt:
            return cached if start < cached else prompt
        return min((start // block_size + 1) * block_size, self.sequence.computable)

    def draw(self) -> Draw:
        """How the next token is to be drawn. Raises whatever the constraint does."""
        recent = self.sequence.ids[max(0, len(self.sequence.ids) - self.params.repeat_last_n) :]
        dry = None if self._dry is None else self._dry.penalties(self.sequence.ids)
        may_end = self.sequence.generated >= self.params.min_tokens
        sampling = self.sampling if may_end else self._going_on
        vocabulary = self.vocabulary.stop
        mask = None if self.constraint is None else self.constraint.allowed()
        allowed = None if mask is None else checked_mask(mask, vocabulary)
        return Draw(sampling, recent, self._rng.random(), vocabulary, self.params.logprobs, dry, allowed)

    def take(self, sampled: Sampled) -> None:
        """Put out what the next token adds to the text, or why there is none."""
        if isinstance(sampled, EngineError):
            self.fail(sampled)
            return
        sequence = self.sequence
        token, logprobs = (sampled.id, (sampled,)) if isinstance(sampled, TokenLogprob) else (sampled, ())
        if token in self._ends:
            self.finish("stop")
            return
        self.clock.lap()  # the usage counts tokens, and so the time of steps that give one
        sequence.ids.append(token)
        complete = False
        if self.constraint is not None:
            try:
                self.constraint.accept(token)
                complete = self.constraint.finished
            except Exception as error:
                self.fail(error)  # alone: the step was right for all others
                return
        chunk = Chunk(self._stop.push(self.detokenizer.push([token])), (token,), logprobs=logprobs)
        if self._stop.stopped or complete:
            self.finish("stop", chunk)
        elif sequence.generated == sequence.max_tokens:
            self.finish("length", chunk)
        else:
            self.outbox.append(chunk)

    def finish(self, reason: str, last: Chunk = _NOTHING) -> None:
        """End the answer: its last chunk carries what was held back, the reason and the usage as well."""
        text = last.text
        if not self._stop.stopped:
            text += self._stop.push(self.detokenizer.finish()) + self._stop.finish()
        if self.keep is not None and not self._stop.stopped:  # cut off, the text is not that of all ids
            with suppress(MemoryError):  # no answer is to fail for that
                self.keep(self.sequence.ids[len(self.sequence.prompt) :])
        self.sequence.finish_reason = reason
        self.outbox.append(replace(last, text=text, finish_reason=reason, usage=self.usage()))

    def fail(self, error: Exception) -> None:
        """End the request with an error for whoever reads its stream."""
        if isinstance(error, MemoryError):
            error = EngineError("There is not enough memory to go on with this request", "out_of_memory")
        self.damaged = isinstance(error, EngineError) and error.code == "model_damaged"
        self.sequence.finish_reason = "error"
        self.outbox.append(error)

    def report_progress(self, layers: int) -> None:
        """Put out how far the prefill is; nothing where a request that gave way is computed again behind its text."""
        assert self.prefill is not None
        if self.wants_progress and self.sequence.generated == 0:
            done = (self.cached or 0) + self.prefill.rows // layers
            self.outbox.append(Chunk("", (), prefilled=done, prompt_tokens=len(self.sequence.prompt)))

    def usage(self) -> Usage:
        sequence = self.sequence
        return Usage(
            prompt_tokens=len(sequence.prompt),
            cached_tokens=self.cached or 0,
            completion_tokens=sequence.generated,
            prefill_seconds=self.clock.prefill,
            generation_seconds=self.clock.generation,
        )

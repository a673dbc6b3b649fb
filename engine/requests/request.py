"""A request: its prompt, sampling, K/V, progress and output."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

from polarlm.engine.errors import EngineError
from polarlm.engine.limits import RANK
from polarlm.engine.model.prompt_readers import Pooling, PromptLogprobs, PromptReader, Ranking
from polarlm.engine.model.vision_encoders import PlacedImage
from polarlm.engine.outputs import Chunk, Outbox, TokenLogprob, Usage
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.requests.answers import Conversation
from polarlm.engine.requests.drafts import Drafts
from polarlm.engine.requests.prompts import Prompt, yes_and_no
from polarlm.engine.requests.sampler import Sampler
from polarlm.engine.requests.scheduler import Scheduler, TokenSequence, Unit
from polarlm.engine.sampling.constraints import Constraint
from polarlm.engine.sampling.detokenizer import AnswerStops, Detokenizer
from polarlm.engine.sampling.sample import Sampled, Sampling, resolve
from polarlm.engine.state.image_positions import ImagePositions
from polarlm.engine.state.store import RowAdapter, SequenceKV
from polarlm.engine.storage.copies import Snapshot
from polarlm.engine.storage.holes import Holes
from polarlm.engine.storage.tiers.search import TierHit, count_sources
from polarlm.model_loaders import Model
from polarlm.model_loaders.tokenizers import Tokenizer

_EMPTY = Chunk("", ())


WARNINGS = logging.getLogger(f"{__name__}.warnings")
"""What is not done as a request asks, for programs that call the engine; a server tells its clients."""


@lru_cache(512)
def _log_once(sentence: str) -> None:
    """Log a sentence the first time that it comes: a conversation repeats it at each turn."""
    WARNINGS.warning("%s", sentence)


@dataclass(frozen=True)
class Ticket:
    """The submitter's handle of a queued request."""

    prompt_tokens: int
    cancel: Callable[[], None]  # may be called at any time, from any thread, more than once
    cached_tokens: Callable[[], int] = lambda: 0  # prompt tokens found in the store; 0 before the prefix is matched
    conversation: Conversation | None = None  # the one that the answer ends; None if the answer's ids are not kept
    warnings: tuple[str, ...] = ()  # sentences about what is not done as the request asks
    ids: Sequence[int] = ()  # of the prompt


@dataclass
class Clock:
    """The compute time of each phase, in seconds. queue: None until the first unit."""

    prefill: float = 0.0
    generation: float = 0.0
    queue: float | None = None
    _made: float = field(default_factory=lambda: time.perf_counter())

    def begin(self, prefilling: bool) -> None:
        self._prefilling, self.since = prefilling, time.perf_counter()
        if self.queue is None:
            self.queue = self.since - self._made

    def lap(self) -> None:
        """Add the seconds since the unit began, or since the last lap."""
        now = time.perf_counter()
        if self._prefilling:
            self.prefill += now - self.since
        else:
            self.generation += now - self.since
        self.since = now


class Plan(NamedTuple):
    """What the store lacks of a waiting request, and how that is computed; `plan.py` says which plan it gets.

    rows: of tokens that the store lacks, or of the next part of these. as_steps: whether they read and keep K/V as rows
    of steps do; see `KVStore.open`.
    """

    how: Literal["wait", "step", "join", "alone"]
    rows: int = 0
    as_steps: bool = False


@dataclass(kw_only=True, eq=False)
class Submission:
    """What a caller submits, on its way to a request: preparations fill in what follows `warnings`, and return another
    one each."""

    prompt: Prompt
    params: SamplingParams
    options: PromptOptions
    outbox: Outbox
    wants_progress: bool = False
    constraint: Constraint | None = None
    gone: Callable[[], bool] | None = None  # returns True once nobody waits for the request
    in_background: bool = False  # whether it computes only where no other waits
    warnings: tuple[str, ...] = ()  # see `Ticket`
    ids: Sequence[int] = ()  # of the prompt
    is_whole: bool = False  # whether the whole prompt is computed, so that no part of it can come from the cache
    conversation: Conversation | None = None  # the one that the answer ends; None if the answer's ids are not kept
    image_positions: ImagePositions | None = None  # None: it has neither images nor holes
    holes: Holes | None = None  # what of the prompt is left out, which `ids` lack
    images: Sequence[PlacedImage] = ()
    stops: AnswerStops | None = None  # None without stop strings
    salt: str = ""  # what keeps its K/V apart; see `engine.state.prefix`
    fingerprint: str = ""  # of an engine whose answers can be replayed
    drafting: Callable[[Callable[[], SequenceKV | None]], Drafts | None] | None = None  # its K/V → its drafts
    hit: TierHit | None = None  # the part of the prompt that tiers have and the store lacked


Preparation = Callable[[Submission], Submission]
"""What a feature makes of a submission, its warnings included. Raises EngineError if it cannot be served."""


@dataclass(kw_only=True, eq=False)
class Request(Submission):
    """A sequence with its sampling, text and output. `sampling` is `params` with the model's defaults filled in."""

    sequence: TokenSequence
    sampling: Sampling
    tokenizer: Tokenizer
    vocabulary: range
    drafts: Drafts | None = None  # never with a constraint or DRY
    kv: SequenceKV | None = None
    plan: Plan = Plan("wait")  # noqa: RUF009 - immutable
    cached: int | None = None  # prompt tokens found in the store; None before that, fixed once the first token exists
    saved: Snapshot | None = None  # what the store held when the request was preempted
    clock: Clock = field(default_factory=Clock)
    adapter: RowAdapter | None = None  # LoRA adapter of this request
    damaged: bool = False  # whether it failed because its K/V or logits were not finite

    @classmethod
    def create(cls, submission: Submission, model: Model, context: int) -> Request:
        """Return the request that a prepared submission becomes, and log its warnings. Raises EngineError."""
        for sentence in submission.warnings:
            _log_once(sentence)
        positions, options, room = submission.image_positions, submission.options, context - len(submission.ids)
        room -= submission.holes.removed if submission.holes else 0
        sampling = resolve(submission.params, model.generation, model.vocabulary.stop)
        sequence = TokenSequence(
            tuple(submission.ids),
            room if sampling.max_tokens < 0 else min(sampling.max_tokens, room),
            text_from=positions.images[-1].stop if positions and positions.images else 0,
            priority=options.priority,
            in_background=submission.in_background,
        )
        request = cls(
            **vars(submission),
            sequence=sequence,
            sampling=sampling,
            tokenizer=model.tokenizer,
            vocabulary=model.vocabulary,
        )
        if submission.drafting is not None and request.sampler.reach_ahead:
            request.drafts = submission.drafting(lambda: request.kv)
        return request

    def __post_init__(self) -> None:
        is_new = self.conversation is not None  # text, and not the end of one that the prompt has
        self.detokenizer = Detokenizer(self.tokenizer, at_start=is_new, shown_tokens=self.params.shown_tokens)
        self._end_ids = frozenset(self.params.stop_token_ids)
        if not self.params.ignore_eos:
            self._end_ids |= self.tokenizer.eos_ids
        limits = self._end_ids, self.tokenizer, self.vocabulary, self.constraint
        self.sampler = Sampler(self.sequence, self.sampling, *limits)
        self.reads_prompt = self.options.pooling is not None or self.params.prompt_logprobs is not None
        """Whether the hidden states of the whole prompt are needed."""
        self.begins_ahead = self.params.logprobs is None
        """Whether the next step may start before this token is known: not with logprobs, whose logits it overwrites."""
        self._last_length = len(self.sequence.prompt) + self.sequence.max_tokens  # of the ids
        self._logprobs: list[TokenLogprob] = []  # of the answer's tokens, if it can be replayed

    def span_end(self, start: int, block_size: int) -> int:
        """Return the end of the next span, which starts at `start`: of the prompt after its prefix hit.

        A preempted request recomputes its earlier spans: the prefix hit, the rest of the prompt, then generated tokens
        block by block, so that they attend to the codes that its steps attended to.
        """
        cached, prompt = self.cached or 0, len(self.sequence.prompt)
        if start < prompt:
            images = () if self.image_positions is None else self.image_positions.images
            cached = next((image.start for image in images if cached in image), cached)  # whose rows may see each other
            return cached if start < cached else prompt
        return min((start // block_size + 1) * block_size, self.sequence.computable)

    def reader(self) -> PromptReader | None:
        """Return a reader of the prompt's hidden states; None if none is needed, or after the first token."""
        if not self.reads_prompt or self.sequence.generated:
            return None
        if self.options.pooling == RANK:
            return Ranking(*yes_and_no(self.tokenizer))
        if self.options.pooling is not None:
            return Pooling(self.options.pooling, self.options.dimensions)
        assert self.params.prompt_logprobs is not None
        return PromptLogprobs(self.sequence.prompt, self.params.prompt_logprobs, self.vocabulary.stop)

    @property
    def _stopped_by(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self.stops is None else self.stops.stopped_by

    @property
    def _may_stop(self) -> bool:
        """Whether a stop string that the newest token completes ends the answer."""
        return self.sequence.generated >= self.params.min_tokens

    @property
    def expects_more(self) -> bool:
        """Whether more tokens may follow the next one."""
        return self.sequence.finish_reason is None and len(self.sequence.ids) + 1 < self._last_length

    def take(self, sampled: Sampled) -> None:
        """Append the sampled token and emit its text, finish the request, or fail it with a sampling error.

        Tokens that the constraint forces next are taken without a step, unless log-probabilities need one: the next
        step computes their K/V together.
        """
        if isinstance(sampled, int):
            self._take(sampled)
        elif isinstance(sampled, EngineError):
            self.fail(sampled)
        else:
            self._take(sampled.id, (sampled,))
        if self.constraint is None:
            return
        try:
            while not self.sequence.finished and (token := self.sampler.only_token()) is not None:
                self._take(token)
        except Exception as error:  # raised by the constraint; the other requests of the step continue
            self.fail(error)

    def take_verified(self, drafted: Sequence[int], sampled: Iterable[Sampled]) -> int:
        """Take sampled tokens, after the newest one and after each drafted one, up to the first that was not drafted.
        Return how many drafted ones keep their K/V: the last token taken has none yet."""
        assert self.drafts is not None
        right = 0
        for token, guess in zip_longest(sampled, drafted):
            self.take(token)
            if self.sequence.finished or self.sequence.ids[-1] != guess:
                break
            right += 1
        self.drafts.record(self.sequence.ids, len(drafted), right)
        return right

    def _take(self, token: int, logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        sequence = self.sequence
        if token in self._end_ids:
            self.finish("stop")
            return
        sequence.ids.append(token)
        self._logprobs += logprobs if self.fingerprint else ()
        self.sampler.advance()
        complete = False
        if self.constraint is not None:
            try:
                self.constraint.accept(token)
                complete = self.constraint.finished
            except Exception as error:
                self.fail(error)  # the other requests of the step continue
                return
        text = self.detokenizer.push([token])
        if self.stops is not None:
            text = self.stops.push(text, token, counts=self._may_stop)
            complete = complete or self.stops.stopped_by is not None
        chunk = Chunk(text, (token,), logprobs=logprobs)
        if complete or len(sequence.ids) == self._last_length:
            self.clock.lap()  # usage counts the time of the last step only if the step gives a token
            self.finish("stop" if complete else "length", chunk)
        else:
            self.outbox.append(chunk)

    def finish(self, reason: str, last: Chunk = _EMPTY) -> None:
        """Emit the last chunk: `last` with the held-back text, the finish reason and the usage."""
        text = last.text
        if self._stopped_by is None:
            rest = self.detokenizer.finish()
            if self.stops is not None:
                rest = self.stops.push(rest, counts=self._may_stop) + self.stops.finish(cut=reason != "stop")
            text += rest
            reason = reason if self._stopped_by is None else "stop"
        if self.conversation and self._stopped_by is None:  # the ids have text that a stop string has cut off
            with suppress(MemoryError):  # an answer must not fail because it cannot be remembered
                self.conversation.keep(self.sequence.ids[len(self.sequence.prompt) :])
        self.sequence.finish_reason = reason
        ended = replace(last, finish_reason=reason, usage=self.usage(), warnings=self.warnings)
        self.outbox.append(replace(ended, text=text, stopped_by=self._stopped_by))

    def fail(self, error: Exception) -> None:
        """Fail the request: its outbox gets the exception instead of a last chunk."""
        if isinstance(error, MemoryError):
            error = EngineError("There is not enough memory to continue this request", "out_of_memory")
        self.damaged = isinstance(error, EngineError) and error.code == "model_damaged"
        self.sequence.finish_reason = "error"
        self.outbox.append(error)

    def damage(self, error: EngineError | None) -> None:
        """Fail the request if its stored K/V are damaged; a finished answer stays valid, but its K/V are discarded."""
        if error is not None and self.sequence.finished:
            self.damaged = True
        elif error is not None:
            self.fail(error)

    def report_progress(self, done: int) -> None:
        """Emit how many tokens of the prompt are done, unless the request was preempted after its first token."""
        if self.sequence.generated == 0:
            prompt, cached = len(self.sequence.prompt), self.cached or 0
            self.outbox.append(Chunk("", (), prefilled=done, prompt_tokens=prompt, cached_tokens=cached))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.sequence.prompt),
            cached_tokens=self.cached or 0,
            completion_tokens=self.sequence.generated,
            prefill_seconds=self.clock.prefill,
            generation_seconds=self.clock.generation,
            queue_seconds=self.clock.queue or 0.0,
            drafted_tokens=0 if self.drafts is None else self.drafts.drafted,
            accepted_tokens=0 if self.drafts is None else self.drafts.accepted,
            cached_from=count_sources(self.hit, self.cached or 0),
            replay_digest=self._replay_digest() if self.fingerprint else "",
        )

    def _replay_digest(self) -> str:
        """Return a digest of who answers, the prompt's ids, and the answer's ids, log-probabilities and end."""
        sequence, count = self.sequence, len(self.sequence.prompt)
        ids = [int(token) for token in sequence.ids]
        logprobs = [(float(one.logprob), [(int(i), float(value)) for i, value in one.top]) for one in self._logprobs]
        answer = self.fingerprint, ids[:count], ids[count:], logprobs, sequence.finish_reason
        return hashlib.sha256(json.dumps(answer).encode()).hexdigest()


class UnitTimer:
    """Times a unit of work for the scheduler, and for the requests that take part in it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.requests: list[Request] = []  # which take part
        self.launched: list[Request] = []  # for each chunk of a prompt that a GPU may still compute, its request

    def begin(self) -> None:
        self.requests, self._began = [], time.perf_counter()

    def add(self, *requests: Request) -> None:
        """These requests take part from now on."""
        self.requests += requests
        for request in requests:
            request.clock.begin(prefilling=not request.sequence.generated)

    def tokens_arrived(self, prompts: Sequence[Request]) -> float:
        """Tokens of the unit have arrived, the first ones of `prompts`. What it took beyond a usual step, a GPU spent
        on prompts before it. Return when it began without that."""
        launched, self.launched = self.launched, []
        if launched and (usual := self._scheduler.usual_step) is not None:
            late = max(0.0, time.perf_counter() - self._began - usual)
            self._began += late
            for request in self.requests:
                request.clock.since += late
            for request in launched:
                request.clock.prefill += late / len(launched)
                self._scheduler.record_time(Unit(True, (request.sequence,)), late / len(launched))
        for request in prompts:
            request.clock.lap()
        return self._began

    def end(self, unit: Unit) -> None:
        self._scheduler.record_time(unit, time.perf_counter() - self._began)
        for request in self.requests:
            request.clock.lap()

"""The embeddable engine: load a model, stream text. Everything else folds `Engine.stream`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

from engine import assembly, sessions
from engine.config import EngineConfig, PromptOptions, SamplingParams
from engine.errors import EngineError
from engine.kv.blocks import OutOfBlocks
from engine.kv.prefix import PrefixCache
from engine.model import score
from engine.outputs import CacheStats, Chunk, Completion, Score, Status, fold
from engine.requests.answers import Answers
from engine.requests.fair_lock import FairLock
from engine.requests.request import Outbox, Prompt, Request, Ticket, checked_ids, is_chat, prompt_ids
from engine.requests.runner import Runner
from engine.requests.scheduler import Scheduler, TokenSequence
from engine.sampling.constraints import Constraint
from engine.sampling.detokenizer import text_of
from engine.sessions import Place, Progress, Session

Chunks = Generator[Chunk, None, None]
Params = SamplingParams | None  # None: the usual ones
Options = PromptOptions | None


class Engine:
    """A loaded model with its KV store. May be shared by threads; requests are served in the order they come."""

    def __init__(self, parts: assembly.Parts):
        self.config = parts.config
        self.model = parts.source
        self.context = parts.plan.tokens
        self.cache_shape = parts.plan.shape
        self._parts = parts
        self._fit_line = assembly.fit_line(parts)
        self._model = parts.model
        self._store = parts.model.store
        self._identity = sessions.settings(parts.model, parts.source.name)
        keeps = parts.config.kept_sequences > 0
        self._prefixes = PrefixCache(self._store, json.dumps(self._identity).encode(), enabled=keeps)
        self._scheduler = Scheduler(parts.config.parallel, parts.config.prefill_share, parts.plan.shape.block_size)
        self._runner = Runner(parts.model, self._prefixes, self._scheduler)
        self._lock = FairLock(forkable=parts.model.ops.forkable)
        self._answers = Answers(parts.source, enabled=keeps)
        self._closed = False

    @classmethod
    def load(
        cls,
        path: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        verbose: Callable[[str], None] | None = None,
        **settings: Any,
    ) -> Engine:
        """Load a folder of safetensors, a .gguf file, or, for None, the demonstration model.

        `settings` are fields of EngineConfig and override `config`; `verbose` is told what happens, in sentences.
        Raises EngineError with a sentence for the user: "model_unavailable" for a model that is missing or cannot be
        used, "device_unavailable", "out_of_memory", "invalid_request" for a setting.
        """
        return cls(assembly.assemble(assembly.settle(path, config, settings), verbose))

    # -- generating --------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        options: Options = None,
        *,
        progress: bool = False,
        constraint: Constraint | None = None,
    ) -> Chunks:
        """Generate behind `prompt`, chunk by chunk; the last chunk has a finish_reason and the usage.

        prompt: text for raw completion, messages for the chat template, or token ids as they are; `options` say how it
        is read, and which stored tokens may stand for its own. With `progress`, chunks without text report how far a
        prompt is. `constraint` says which tokens may come; it is for this request alone. Closing the iterator cancels
        the request. Raises EngineError for a prompt that cannot be served ("context_length_exceeded",
        "invalid_request").
        """
        outbox: deque[Chunk | Exception] = deque()
        made = self._request(prompt, params, options, outbox=outbox, wants_progress=progress, constraint=constraint)
        return self._drain(made, outbox)

    def generate(self, prompt: Prompt, params: Params = None, options: Options = None) -> Completion:
        """The whole answer at once."""
        return fold(self.stream(prompt, params, options))

    def chat(self, messages: Sequence[Mapping[str, Any]], params: Params = None, options: Options = None) -> Completion:
        """The answer to a conversation: messages with "role" and "content".

        An assistant message may carry the "token_ids" it was generated as. The next turn finds them in the cache, and
        those of a recent answer that comes back as text alone.
        """
        return fold(self.stream(messages, params, options))

    def score(self, ids: Sequence[int], every_token_coded: bool = False, *, logits: bool = False) -> Score:
        """Teacher-forced log-probabilities of `ids` (T ≥ 2) through the cache as steps see it; waits for its turn.

        With `every_token_coded`, all tokens behind the first block are read as codes, the current block's too: the
        figure to compare with engines that have no full-precision tail. With `logits`, all of them are given, too:
        4·T·V bytes, where everything else takes what a prompt of T tokens does.
        """
        ids = checked_ids(ids, self.model, self.context, room=0)
        if len(ids) < 2:
            raise EngineError(f"score needs at least 2 token ids, not {len(ids)}")
        with self._exclusive():
            before = set(self._runner.requests)
        while True:
            with self._exclusive():
                if before.isdisjoint(self._runner.requests):
                    return self._score(ids, every_token_coded, logits)
                self._runner.step()

    def _score(self, ids: list[int], every_token_coded: bool, logits: bool) -> Score:
        kv = self._store.new_sequence()
        try:
            return score.score(self._model, kv, ids, every_token_coded=every_token_coded, logits=logits)
        except MemoryError:
            advice = "score fewer tokens" + (", or without their logits" if logits else "")
            raise EngineError(
                f"There is not enough memory to score {len(ids)} tokens: {advice}", "out_of_memory"
            ) from None
        except OutOfBlocks:
            raise EngineError("The KV store is in use by other requests; score again later", "out_of_memory") from None
        finally:
            self._store.release(kv)

    def tokenize(self, text: str, *, control: bool = False) -> list[int]:
        """Ids of `text`, nothing added; with `control`, names of control tokens in it become those tokens."""
        return self.model.tokenizer.tokenize(text, control=control)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Text of `ids` from the start of a sequence."""
        try:
            return text_of(self.model.tokenizer, ids)
        except ValueError as error:
            raise EngineError(str(error)) from None

    # -- sessions ----------------------------------------------------------------------------------------------

    def save_session(
        self,
        path: Place,
        *,
        prompt: Prompt | None = None,
        options: Options = None,
        note: Any = None,
        progress: Progress | None = None,
    ) -> int:
        """Write the K/V of the most recent sequence, or of as much of `prompt` as is in the store; returns its tokens.

        prompt, options: as `stream` takes them; of messages, the ids of known answers are written too. note: anything
        that JSON can say. progress: told bytes written and bytes in all. Raises EngineError with the code "session",
        or "storage" where the place for it is at fault.
        """
        options = options or PromptOptions()
        asked: Sequence[int] | None = None
        answers = self._answers.known(prompt, options.cache_salt) if prompt is not None and is_chat(prompt) else ()
        if prompt is not None:
            found = prompt_ids(prompt, self.model, self._answers, options, context=self.context)
            asked = checked_ids(found, self.model, self.context, room=0)
        with self._exclusive():
            sessions.check_types(self._store.shape)
            if asked is not None:
                ids, salt = asked, options.cache_salt
            else:
                ids, salt = self._runner.newest.ids, self._runner.newest.salt
            saved = sessions.take_out(self._store, self._prefixes, ids, salt)
        session = Session(tuple(ids[: saved.length]), note, answers)
        sessions.write(path, self._identity, session, saved, progress)
        return saved.length

    def load_session(self, path: Place, *, cache_salt: str = "", progress: Progress | None = None) -> Session:
        """Put a saved session back, so that the next prompt that begins with its ids finds them in the store.

        cache_salt: that of the prompts that are to find them. progress: told bytes read and bytes in all. Raises
        EngineError with the code "session", or "storage" where the file cannot be read.
        """
        if self.config.kept_sequences == 0:
            raise EngineError("This engine keeps no sequences (kept_sequences is 0), so none can be loaded", "session")
        with self._exclusive():
            sessions.check_types(self._store.shape)
        session, saved = sessions.read(
            path, self._identity, self.cache_shape, self.model.vocabulary, self.context, progress
        )
        with self._exclusive():
            kv = sessions.put_back(self._store, saved, path)
            self._runner.release(session.token_ids, self._prefixes.salted(kv, cache_salt), cache_salt)
        self._answers.restore(session.answers)
        return session

    # -- for servers -------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: Params = None,
        options: Options = None,
        *,
        into: Outbox,
        progress: bool = False,
        constraint: Constraint | None = None,
    ) -> Ticket:
        """Queue a request whose chunks are appended to `into` as they come, by whichever thread does the work.

        An exception instead of a last chunk says what went wrong. Somebody has to call `work`, best a thread of its
        own. Raises EngineError like `stream`.
        """
        request = self._request(prompt, params, options, outbox=into, wants_progress=progress, constraint=constraint)
        with self._exclusive():
            self._runner.submit(request)
        tokens = len(request.sequence.prompt)
        return Ticket(tokens, lambda: self._cancel(request.sequence), lambda: request.cached or 0)

    def work(self) -> bool:
        """Do one unit of the work at hand, a part of a prompt or a step of all that run; False when there is none."""
        with self._exclusive():
            if not self._runner.requests:
                return False
            self._runner.step()
            return True

    def status(self) -> Status:
        """How busy the engine is."""
        with self._exclusive():
            return self._runner.status()

    # -- requests and threads ----------------------------------------------------------------------------------

    def _request(self, prompt: Prompt, params: Params, options: Options, **more: Any) -> Request:
        """more: what `Request.of` takes beside these, by name."""
        self._check_open()
        params, options = params or SamplingParams(), options or PromptOptions()
        return Request.of(prompt, params, options, self.model, self.context, answers=self._answers, **more)

    def _drain(self, request: Request, outbox: deque[Chunk | Exception]) -> Chunks:
        """Submit, then yield chunks as they come; whoever waits for one does the engine's next unit of work."""
        try:
            with self._exclusive():
                self._runner.submit(request)
            finished = False
            while not finished:
                with self._exclusive(unless=outbox) as alone:
                    if alone:
                        self._runner.step()
                while outbox:
                    chunk = outbox.popleft()
                    if isinstance(chunk, Exception):
                        raise chunk
                    finished = chunk.finish_reason is not None
                    yield chunk
        finally:
            self._cancel(request.sequence)

    def _cancel(self, sequence: TokenSequence) -> None:
        """End a request that nobody reads any more, if it has not ended by itself.

        Never waits for a step to end: a generator in a reference cycle is closed by whichever thread collects the
        garbage, and that may be the one in the step. Whoever has the engine next takes the request out then.
        """
        sequence.finish_reason = sequence.finish_reason or "cancelled"
        self._lock.if_free(self._sweep)

    @contextmanager
    def _exclusive(self, unless: Any = (), *, even_closed: bool = False) -> Iterator[bool]:
        """The engine's state for one thread at a time; False, and no exclusion, once `unless` has become true."""
        with self._lock.take(unless) as alone:
            if alone and not even_closed:
                self._check_open()
            if alone:
                self._sweep()
            yield alone

    def _sweep(self) -> None:
        """Take out what was cancelled while a step was under way."""
        if not self._closed and not self._lock.lost:
            self._runner.sweep()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("The engine is closed", "closed")
        self._lock.check()

    # -- what it takes -----------------------------------------------------------------------------------------

    def fit_line(self) -> str:
        """One line for people: model, weights, KV store, and how many tokens fit."""
        return self._fit_line

    def cache_stats(self) -> CacheStats:
        """The cache of the most recent sequence."""
        with self._exclusive():
            newest, shape = self._runner.newest, self._store.shape
            return CacheStats(
                tokens=len(newest.ids),
                bytes=newest.bytes,
                bits_per_value=shape.bits_per_value,
                f16_bytes=len(newest.ids) * shape.f16_bytes_per_token,
                context=self.context,
            )

    def close(self) -> None:
        """Let go of weights and store; requests under way and later calls raise EngineError. Closing twice is fine."""
        with self._exclusive(even_closed=True):
            if self._closed or self._lock.lost:
                return
            self._closed = True
            for request in self._runner.requests.values():
                request.fail(EngineError("The engine was closed before this request was done", "closed"))
            self._runner.sweep()
            self._parts.close()
            del self._parts, self._model, self._store, self._prefixes, self._runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

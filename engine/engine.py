"""The embeddable engine: load a model, stream text. `generate`, `chat` and the terminal fold `Engine.stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, cast

from polarlm.engine import replay
from polarlm.engine.completions import Completions
from polarlm.engine.config import EngineConfig
from polarlm.engine.errors import EngineError
from polarlm.engine.loading import assembly, checks
from polarlm.engine.model import score
from polarlm.engine.model.encoder import Encoder
from polarlm.engine.outputs import CacheStats, Chunk, Score, Status
from polarlm.engine.params import PromptOptions, SamplingParams
from polarlm.engine.parsing.tool_answer import stops_of
from polarlm.engine.requests.adapters import AdapterLoading
from polarlm.engine.requests.answers import Answers
from polarlm.engine.requests.drafts import Drafting
from polarlm.engine.requests.encoding import EncoderRunner
from polarlm.engine.requests.fair_lock import FairLock
from polarlm.engine.requests.prompts import (
    Prompt,
    checked_ids,
    constrain_after_reasoning,
    limit_reasoning,
    one_prompt,
    prompt_ids,
    read_until,
)
from polarlm.engine.requests.request import Outbox, Request, Ticket
from polarlm.engine.requests.runner import Runner
from polarlm.engine.requests.scheduler import Scheduler, TokenSequence
from polarlm.engine.sampling.constraints import Constraint
from polarlm.engine.sampling.detokenizer import text_of
from polarlm.engine.sampling.grammars import Grammars
from polarlm.engine.state.cache_types import name_types
from polarlm.engine.state.prefix import PrefixCache
from polarlm.engine.storage import identity, packs, sessions
from polarlm.engine.storage.packs import Pack
from polarlm.engine.storage.sessions import KnownAnswers, Progress, Session, SessionPath
from polarlm.engine.storage.tiers.patience import Patience
from polarlm.engine.storage.tiers.stored_blocks import StoreAccess
from polarlm.engine.storage.tiers.tiers import Tiers

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from polarlm.engine.keywords import EngineKeywords, SamplingKeywords

Chunks = Generator[Chunk, None, None]
Params = SamplingParams | None  # None: the defaults
Options = PromptOptions | None


class Engine(Completions, AdapterLoading):
    """A loaded model with its KV store. May be shared by threads; requests are served by priority, then by arrival."""

    def __init__(
        self,
        model: str | PathLike[str] | assembly.Parts | None = None,
        *,
        config: EngineConfig | None = None,
        verbose: Callable[[str], None] | None = None,
        **settings: Unpack[EngineKeywords],
    ) -> None:
        """As `load`, or from the parts of an engine."""
        if not isinstance(model, assembly.Parts):
            model = assembly.assemble(checks.settle(model, config, settings), verbose)
        parts = model
        self.config, self.model = parts.config, parts.source
        self.context, self.cache_shape = parts.plan.tokens, parts.plan.shape
        self.reads_images = parts.source.vision_encoder is not None  # whether messages may have images
        self._parts, self.expert_plan = parts, parts.experts
        self._start_line, self._fit_line = assembly.start_line(parts), assembly.fit_line(parts)
        self._model, self._store = parts.model, parts.model.store
        self._identity = identity.settings(parts.model, parts.source.name, replayable=parts.config.replayable)
        keeps = parts.config.kept_sequences > 0
        bits, types = parts.model.ops.input_bits, name_types(parts.config)
        self.fingerprint = replay.fingerprint(self._identity, types, bits) if parts.config.replayable else ""
        changed_bits = {} if bits == "16" else {"input_bits": bits}
        self._prefixes = PrefixCache(
            self._store,
            identity.hash_root(self._identity, changed_bits),
            enabled=keeps,
            control_ids=parts.source.tokenizer.control_tokens().values(),
        )
        self._scheduler = Scheduler(parts.config.parallel, parts.plan.shape.block_size)
        self._drafting = Drafting(parts.config, parts.source.vocabulary.stop, parts.draft_model, parts.model.mtp)
        self._lock = FairLock(forkable=parts.model.ops.forkable)
        tiers, files = parts.tiers, sorted(parts.source.weights.files())
        access, patience = StoreAccess.to(self._store, self._prefixes), Patience()
        self._tiers = Tiers(access, tiers, files, self._lock, patience) if tiers else None
        kind = EncoderRunner if isinstance(self._model, Encoder) else Runner
        self._runner = kind(
            self._model, self._prefixes, self._scheduler, self._drafting, patience, self._tiers, parts.config.replayable
        )
        self.adapters = parts.adapters  # requests choose among them
        self._answers = Answers(
            parts.source, self.context, enabled=keeps and not parts.config.replayable, tiers=self._tiers
        )
        self.grammars = Grammars(parts.source.tokenizer, parts.source.vocabulary.stop)
        self.packs = packs.open_packs(parts.config, self._identity, parts.source.vocabulary, self.context)
        self._is_closed = False

    @classmethod
    def load(
        cls,
        path: str | PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        verbose: Callable[[str], None] | None = None,
        **settings: Unpack[EngineKeywords],
    ) -> Engine:
        """Load a folder of safetensors, a .gguf file, "hf:user/repo" of the hub, or, for None, a demonstration.

        `settings` are fields of EngineConfig and override `config`; `verbose` is called with sentences about progress.
        Raises EngineError with a sentence for the user: "model_unavailable" for a model that is missing or cannot be
        used, "device_unavailable", "out_of_memory", "invalid_request" for a setting.
        """
        return cls(path, config=config, verbose=verbose, **settings)

    # -- generating --------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: Params = None,
        options: Options = None,
        *,
        progress: bool = False,
        constraint: Constraint | None = None,
        **settings: Unpack[SamplingKeywords],
    ) -> Chunks:
        """Yield the continuation of `prompt` in chunks; the last chunk has a finish_reason and the usage.

        prompt: text for raw completion, messages for the chat template, or token ids, which are used unchanged.
        options: how the prompt is tokenized, and which cached tokens it may reuse. progress: also yield chunks without
        text that report how much of the prompt is computed. constraint: restricts the tokens of this request in a way
        that `params` cannot; never share one between requests. settings: fields of SamplingParams, which override
        `params`. Closing the iterator cancels the request. Raises EngineError for a prompt that cannot be served
        ("context_length_exceeded", "invalid_request").
        """
        outbox: deque[Chunk | Exception] = deque()
        request = self._request(
            one_prompt(prompt), params, options, settings, outbox=outbox, progress=progress, constraint=constraint
        )
        return self._drain(request, outbox)

    def score(self, ids: Sequence[int], every_token_coded: bool = False, *, logits: bool = False) -> Score:
        """Teacher-forced log-probabilities of `ids` (T ≥ 2). Attention reads the cache as it does in steps.

        Earlier requests finish first. With `every_token_coded`, attention reads all tokens after the first block as
        codes, as engines do that keep no recent tokens. With `logits`, the score has all logits, 4·T·V bytes.
        """
        if self.model.config.is_encoder:
            raise EngineError(f"{self.model.name} is an embedding model: it has no probabilities of tokens")
        ids = checked_ids(ids, self.model, self.context, room=0)
        if len(ids) < 2:
            raise EngineError(f"score needs at least 2 token ids, not {len(ids)}")
        with self._exclusive():
            earlier_requests = set(self._runner.requests)
        while True:
            with self._exclusive():
                if earlier_requests.isdisjoint(self._runner.requests):
                    return score.score(self._model, ids, every_token_coded=every_token_coded, logits=logits)
                self._runner.run_unit()

    def tokenize(self, text: str, *, control: bool = False) -> list[int]:
        """The ids of `text`, without BOS; with `control`, names of control tokens in it become those tokens."""
        return self.model.tokenizer.tokenize(text, control=control)

    def prompt_ids(
        self, prompt: Prompt, options: Options = None, warn: Callable[[str], None] = lambda sentence: None
    ) -> list[int]:
        """The token ids of a prompt as `stream` tokenizes it, without a limit of length. warn: called with a sentence
        for each part of a message that is left out or changed. Raises EngineError."""
        options = options or PromptOptions()
        prompt = self.begin_with_pack(prompt, options)
        conversation = self._answers.conversation(prompt, options.cache_salt, warn)
        return prompt_ids(conversation.prompt, self.model, options, warn=warn, cut=conversation.read.cut)

    def detokenize(self, ids: Sequence[int], *, control: bool = False) -> str:
        """The text of `ids`, which start a sequence; `control` includes control tokens' names. Raises EngineError."""
        try:
            return text_of(self.model.tokenizer, ids, control=control)
        except ValueError as error:
            raise EngineError(str(error)) from None

    # -- sessions ----------------------------------------------------------------------------------------------

    def save_session(
        self,
        path: SessionPath,
        *,
        prompt: Prompt | None = None,
        options: Options = None,
        note: Any = None,
        progress: Progress | None = None,
    ) -> int:
        """Save the K/V of the newest sequence, or of the longest stored prefix of `prompt`, and return its token count.

        prompt, options: as for `stream`; with messages, the ids of known answers are saved too. note: any JSON value.
        progress: called with the bytes written and the bytes in all. Raises EngineError: "storage" if the file cannot
        be written, "session" for anything else.
        """
        options = options or PromptOptions()
        salt = self.adapters.salt(options)
        ids_to_save: Sequence[int] | None = None
        answers: KnownAnswers = ()
        if prompt is not None:
            prompt = self.begin_with_pack(prompt, options)
            conversation = self._answers.conversation(prompt, options.cache_salt)
            read, answers = conversation.read, conversation.known_answers()
            unchecked = prompt_ids(conversation.prompt, self.model, options, context=self.context, cut=read.cut)
            ids_to_save = checked_ids(unchecked, self.model, self.context, room=0, rows=read.ids)
        with self._exclusive():
            newest = self._runner.newest
            ids, salt = (newest.ids, newest.salt) if ids_to_save is None else (ids_to_save, salt)
            contents = sessions.take_snapshot(self._store, self._prefixes, ids, salt)
        session = Session(tuple(ids[: contents.length]), note, answers)
        sessions.write(path, self._identity, session, contents, salt, identity.scale_arrays(self._store), progress)
        return contents.length

    def load_session(self, path: SessionPath, *, cache_salt: str = "", progress: Progress | None = None) -> Session:
        """Load a saved session into the prefix cache, so that prompts that begin with its ids reuse its K/V.

        cache_salt: the salt that it was saved with, which prompts need to reuse it. progress: called with the bytes
        read and the bytes in all. Raises EngineError: "storage" if the file cannot be read, else "session".
        """
        if self.config.kept_sequences == 0:
            raise EngineError("This engine keeps no sequences (kept_sequences is 0), so none can be loaded", "session")
        allowed = self.model.vocabulary, self.context, cache_salt, self.adapters.knows
        session, contents = sessions.read(path, self._identity, self.cache_shape, *allowed, progress)
        with self._exclusive():
            kv = sessions.restore_snapshot(self._store, contents, path)
            self._runner.release(session.token_ids, self._prefixes.set_salt(kv, session.salt), session.salt)
        self._answers.restore(session.answers)
        return session

    # -- packs -------------------------------------------------------------------------------------------------

    def begin_with_pack(self, prompt: Prompt, options: Options) -> Prompt:
        """Return the prompt after the pack that options name; the prompt itself if they name none."""
        if options is None or not options.pack:
            return prompt
        return cast(Prompt, packs.choose(self.packs, options.pack, options).begin(prompt))

    def load_pack(self, name: str) -> Pack:
        """Read the K/V of a pack into the store, unless they are there, and return it. Raises EngineError."""
        pack = packs.choose(self.packs, name, PromptOptions())
        with self._exclusive():
            kv = self._prefixes.match_prefix(pack.token_ids, "")
            length = kv.length
            self._prefixes.release(kv, pack.token_ids[:length])
        if length < len(pack.token_ids):  # also where its last block alone is gone: codes would be read in its place
            packs.check_unchanged(pack)
            self.load_session(pack.path)
        return pack

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
        gone: Callable[[], bool] | None = None,
        in_background: bool = False,
        **settings: Unpack[SamplingKeywords],
    ) -> Ticket:
        """Queue a request. Threads that call `work` append its chunks to `into`, or an exception if it fails.

        gone: returns True once nobody waits for the request. in_background: whether it gives way to all requests that
        are not. Raises EngineError as `stream` does, and "busy".
        """
        with read_until(gone):
            request = self._request(
                prompt, params, options, settings, outbox=into, progress=progress, constraint=constraint, gone=gone
            )
            self._find(request)
        request.sequence.in_background = in_background
        with self._exclusive():
            self._submit(request)
        cancel, cached = lambda: self._cancel(request.sequence), lambda: request.cached or 0
        return Ticket(len(request.sequence.prompt), cancel, cached, request.conversation, request.warnings)

    def work(self) -> bool:
        """Run one unit of work, a part of a prefill or a step of all running requests; False if there is no request."""
        with self._exclusive():
            is_busy = bool(self._runner.requests)
            self._runner.run_unit()
            return is_busy

    def warm_up(self) -> bool:
        """Record a part of what requests will compute, unless there are any; False once nothing is left to record."""
        with self._exclusive():
            return self._runner.warm_up(is_compiled=self._parts.is_compiled)

    def status(self) -> Status:
        """Counts of requests, blocks and threads."""
        with self._exclusive():
            return self._runner.status()

    # -- requests and threads ----------------------------------------------------------------------------------

    def _request(
        self,
        prompt: Prompt,
        params: Params,
        options: Options,
        settings: Mapping[str, Any],
        *,
        outbox: Outbox,
        progress: bool,
        constraint: Constraint | None,
        gone: Callable[[], bool] | None = None,
    ) -> Request:
        """A request that is not queued yet; see `submit` for the arguments."""
        self._check_open()
        params, options = params or SamplingParams(), options or PromptOptions()
        if not (isinstance(params, SamplingParams) and isinstance(options, PromptOptions)):
            raise EngineError(f"params are SamplingParams and options PromptOptions, not {params!r} and {options!r}")
        params = replace(params, **settings)
        params = replay.with_seed(params, options, is_replayable=self.config.replayable)
        warnings: list[str] = []
        prompt = self.begin_with_pack(prompt, options)
        params, close_tag = constrain_after_reasoning(prompt, params, options, self.model)
        constraint = self.grammars.constraint(params, constraint, gone, close_tag, warnings)
        request = Request.create(
            prompt,
            params,
            options,
            self.model,
            self.context,
            answers=self._answers,
            drafting=self._drafting,
            adapters=self.adapters,
            outbox=outbox,
            stops=stops_of(prompt, params, options, self.model),
            wants_progress=progress,
            constraint=limit_reasoning(prompt, params, options, self.model, constraint, warnings.append),
            warnings=warnings,
        )
        if self.config.replayable:
            replay.prepare(request, self.adapters, self.fingerprint)
        if options.pack:
            pack = self.load_pack(options.pack) if options.cache_prompt else self.packs[options.pack]
            packs.check_prefix(pack, request.sequence.prompt, self.cache_shape.block_size, warnings.append)
        return request

    def _find(self, request: Request) -> None:
        """Read what tiers have of a request's prompt. Raises EngineError if the engine has been closed."""
        self._check_open()
        if self._tiers is not None and request.options.cache_prompt and not request.needs_whole_prompt:
            request.hit = self._tiers.find(request.sequence.prompt[:-1], request.salt)

    def _drain(self, request: Request, outbox: deque[Chunk | Exception]) -> Chunks:
        """Submit `request`, then yield its chunks. Until the next one exists, this thread runs units of work."""
        try:
            self._find(request)
            with self._exclusive():
                self._submit(request)
            finished = False
            while not finished:
                with self._lock.hold_unless(outbox) as lock_held:
                    if lock_held:
                        self._enter()
                        self._runner.run_unit()
                while outbox:
                    chunk = outbox.popleft()
                    if isinstance(chunk, Exception):
                        raise chunk
                    finished = chunk.finish_reason is not None
                    yield chunk
        finally:
            self._cancel(request.sequence)

    def _cancel(self, sequence: TokenSequence) -> None:
        """Mark a request as cancelled unless it has finished. The next holder of the lock removes it, this thread if
        the lock is free: a generator in a reference cycle may be closed in the thread that holds the lock."""
        sequence.finish_reason = sequence.finish_reason or "cancelled"
        self._lock.if_free(self._sweep)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock.hold():
            self._enter()
            yield

    def _enter(self) -> None:
        """What every holder of the lock does first: check the engine, and remove cancelled requests."""
        self._check_open()
        self._runner.sweep()
        self._drop_unused_adapters()

    def _sweep(self) -> None:
        if not self._is_closed and not self._lock.lost:
            self._runner.sweep()

    def _check_open(self) -> None:
        """Raises EngineError: "closed" after `close`, "forked" in a child process that cannot use it; DeviceLost."""
        if self._is_closed:
            raise EngineError("The engine is closed", "closed")
        self._lock.check()
        self._runner.check()

    # -- memory ------------------------------------------------------------------------------------------------

    def start_line(self) -> str:
        """One short line for users: model, size, context, and what the cache saves at full context."""
        return self._start_line

    def fit_line(self) -> str:
        """One line for users: model, weights, KV store, and how many tokens fit."""
        return self._fit_line

    def __repr__(self) -> str:
        return f"<Engine {self._start_line}{', closed' if self._is_closed else ''}>"

    def cache_stats(self) -> CacheStats:
        """Memory of the newest sequence in the KV store."""
        with self._exclusive():
            return self._runner.cache_stats()

    def close(self) -> None:
        """Free weights and KV store; unfinished requests and later calls raise EngineError. Closing twice is fine."""
        self.grammars.close()
        self._answers.close()
        with self._lock.hold():
            if self._is_closed or self._lock.lost:
                return
            self._is_closed = True
            self._runner.fail_all(EngineError("The engine was closed before this request finished", "closed"))
        if self._tiers is not None:
            self._tiers.close()
        with self._lock.hold():
            self._parts.close()
            del self._parts, self._model, self._store, self._prefixes, self._runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

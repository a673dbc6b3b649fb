"""The bridge between the event loop and the engine, which computes in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from polarlm.engine import Chunk, Embedding, Engine, EngineError, PromptOptions, SamplingParams
from polarlm.engine.async_engine import EngineThread
from polarlm.engine.errors import DeviceLost
from polarlm.engine.outputs import Outbox, Status
from polarlm.engine.requests.prompts import Prompt, is_chat, naming, read_until
from polarlm.engine.requests.request import Ticket
from polarlm.engine.storage.tiers.opening import disk_folder
from polarlm.engine.vectors import embedding
from polarlm.model_loaders.recent import Recent
from polarlm.server.config import ServerConfig
from polarlm.server.reading.prompts import ModelInfo, adapter_name, read_adapter
from polarlm.server.running import journal, refusals, tracing
from polarlm.server.running.counters import Totals
from polarlm.server.running.job import Job, Worker
from polarlm.server.running.quotas import Quotas
from polarlm.server.running.readers import Readers, has_images
from polarlm.server.running.recent_prompts import RecentPrompts
from polarlm.server.running.refusals import Refusal, for_clients
from polarlm.server.running.sessions import SessionFolder
from polarlm.server.running.stored_responses import StoredResponses

T = TypeVar("T")
Submit = Callable[..., Ticket]
_LOG = logging.getLogger(__name__)
_MOST_SLOTS = 64  # of all keys
ANY_SLOT = -1
_TEXTS = 4  # texts that are counted at a time
_BATCH = 256  # most requests of a job that wait in the engine's queue together
_LAST_SECONDS = 5.0  # time for a session that is being saved when the server ends


@dataclass
class _Queue:
    room: int
    jobs: set[Job] = field(default_factory=set)


class _JobOutbox:
    """The outbox of one of several requests of a job: its chunks come to the job with its number."""

    def __init__(self, job: Job, number: int) -> None:
        self._job, self._number = job, number

    def append(self, item: Chunk | Exception) -> None:
        self._job.append(item if isinstance(item, Exception) else (self._number, item))


class Driver:
    """Lets coroutines of one event loop stream from an engine, which `stop` leaves open."""

    def __init__(self, engine: Engine, config: ServerConfig, sessions: SessionFolder | None = None) -> None:
        self.engine = engine
        self.config = config
        model, special, tells_cached = engine.model, config.parse_special, not config.hide_cached_tokens
        self.model_info = ModelInfo(
            model, model.name, special, tells_cached, engine.context, engine.reads_images, engine.fingerprint
        )
        self._sessions = sessions
        self._totals, self._quotas = Totals(), Quotas(config.keys.limits_of)
        self.recent_prompts = RecentPrompts(model)
        disk = None if engine.config.cache_disk is None else disk_folder(engine.config)
        self.stored_responses = None if disk is None else StoredResponses(disk)
        # (key, slot) → what was computed there last, for llama-server's clients: a conversation, or ids of a text.
        self.slots: Recent[tuple[str, int], tuple[Prompt, PromptOptions]] = Recent(_MOST_SLOTS)
        self.room = engine.config.parallel + config.max_queue  # answers that may wait or be computed at the same time
        self._answers = _Queue(self.room)
        self._background = _Queue(self.room)  # apart: they refuse no others
        self._transfers = _Queue(1 + config.max_queue)  # apart: a disk that hangs delays only sessions
        self._texts = _Queue(_TEXTS + config.max_queue)  # apart: texts generate nothing
        self._queues = (self._answers, self._background, self._transfers, self._texts)
        self.is_closing = False  # whether new requests are refused because the server is closing
        self.device_lost: DeviceLost | None = None  # why the engine works no more
        self._readers = Readers(sum(queue.room for queue in self._queues))
        self._disk = Worker("sessions")

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.end_event = asyncio.Event()  # set when the server is to end
        self._idle = asyncio.Event()
        self._idle.set()
        tracing.tracer()  # what is missing is said now
        self._thread = EngineThread(self.engine, self._on_failure)

    async def drain(self, seconds: float) -> None:
        """Accept no more requests, wait for the current ones, and end the requests that are left after `seconds`."""
        self.is_closing = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            self._end_all(refusals.server_closing())

    async def stop(self) -> None:
        """End all requests; return when the engine's thread has ended, even if a disk or a collector of spans hangs."""
        self.is_closing = True
        self._end_all(refusals.server_closing())
        await self._loop.run_in_executor(None, self._thread.stop)
        self._readers.stop()
        if not await self._loop.run_in_executor(None, self._disk.stop, _LAST_SECONDS):
            _LOG.warning(
                "a session was being saved or loaded when the server ended, and the disk did not finish in time"
            )
        await self._loop.run_in_executor(None, tracing.close)

    def _on_failure(self, error: Exception) -> None:
        """End all requests with an error of the engine, and the server if the engine works no more. Called in the
        engine's thread."""
        if not isinstance(error, DeviceLost):
            self._loop.call_soon_threadsafe(self._end_all, error)
        elif self.device_lost is None:
            self.device_lost, self.is_closing = error, True
            self._loop.call_soon_threadsafe(self.end_event.set)
            self._loop.call_soon_threadsafe(self._end_all, error)

    def _end_all(self, reason: Exception) -> None:
        for job in [job for queue in self._queues for job in queue.jobs]:
            job.end(reason)
        self._thread.wake()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: PromptOptions | None = None,
        *,
        progress: bool = False,
        submit: Submit | None = None,
        compiles: bool = False,
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answer to `prompt` in chunks. The first one has the number of the prompt's tokens and the ticket's
        warnings alone: the engine has accepted the request. The last one has a finish_reason and the usage.

        progress: also yield chunks without text while the prompt is computed. submit: called in a thread in place of
        `Engine.submit`. compiles: whether `submit` adds a constraint.

        Closing the generator, or cancelling the task that waits for it, cancels the request: read it inside
        `contextlib.aclosing`. Raises Refusal or EngineError, before the first chunk or in place of a later one.
        """
        with self._job(self._answers) as job:
            job.entry.adapter = options.lora if options and options.lora else None
            start = partial(
                submit or self.engine.submit,
                prompt,
                self._with_limits(params),
                self._with_priority_of_key(job, options),
                progress=progress,
            )
            entry, tracer = job.entry, tracing.tracer()
            if tracer is not None and entry.span is None:
                model = entry.adapter or self.model_info.name
                entry.span = tracing.RequestSpan(tracer, entry.trace_headers, model, is_chat=is_chat(prompt))
            ticket = await self._submit(job, prompt, start, compiles=compiles or params.is_constrained)
            queued, first = time.monotonic(), None
            is_last, answer_ids, options = False, list[int](), options or PromptOptions()
            if options.cache_prompt and params.prompt_logprobs is None:
                earlier = entry.key or "", entry.previous_response
                compare = partial(self.recent_prompts.compare, prompt, options, ticket.ids, *earlier)
                entry.comparison = await self._in_thread(compare, None)
            comparison = entry.comparison
            try:
                yield Chunk("", (), prompt_tokens=ticket.prompt_tokens, warnings=ticket.warnings)
                while not is_last:
                    item = await self._next(job)
                    self._count(item, job)
                    job.entry.count(item)
                    first = first or job.last_token_time
                    if item.usage is not None and entry.span is not None:
                        entry.span.add_answer(queued, first, item.usage, item.finish_reason or "")
                    is_last = item.finish_reason is not None
                    job.outcome = item.finish_reason or job.outcome
                    answer_ids += item.token_ids
                    if item.usage is not None and comparison is not None:
                        found = item.usage.cached_tokens
                        add = partial(self.recent_prompts.add, comparison, found, answer_ids, entry.response)
                        entry.reread = await self._in_thread(add, None)
                        item = replace(item, usage=replace(item.usage, reread=entry.reread))
                    if is_last:
                        content = prompt if is_chat(prompt) else [*ticket.ids, *answer_ids]
                        for slot in {entry.slot, ANY_SLOT}:
                            self.slots.put((entry.key or "", slot), (content, options))
                    yield item
            finally:
                if not is_last:  # no chunk had the usage
                    job.entry.cached_tokens += ticket.cached_tokens()

    async def embed_all(
        self,
        jobs: Sequence[tuple[Prompt, SamplingParams, PromptOptions]],
        write: Callable[[Embedding], T],
        outcome: str,
        field: str = "prompts",
    ) -> list[T]:
        """What `write`, called in a thread, returns for the embedding of each job, which are parts of one request.
        outcome: what it counts as. field: the array of the request that has the jobs' prompts. Raises Refusal, or
        EngineError, which says where in `field` the prompt is. Cancelling the task that waits cancels the request."""

        def write_all(each: list[list[Chunk]]) -> list[T]:
            return [write(embedding(chunks)) for chunks in each]

        results: list[T] = []
        with self._job(self._answers) as job:
            # A decoder takes one at a time, so that answers of other requests go on in between.
            batch = _BATCH if self.engine.model.config.is_encoder else 1
            for first in range(0, len(jobs), batch):
                part = jobs[first : first + batch]
                for number, (prompt, params, options) in enumerate(part):
                    start = partial(self.engine.submit, prompt, params, self._with_priority_of_key(job, options))
                    with naming(first + number, len(jobs), field):
                        await self._submit(job, prompt, start, _JobOutbox(job, number))
                chunks: list[list[Chunk]] = [[] for _ in part]
                while not all(each and each[-1].finish_reason is not None for each in chunks):
                    number, chunk = await self._next(job)
                    self._count(chunk, job)
                    chunks[number].append(chunk)
                results += await self._in_thread(partial(write_all, chunks), self._readers.pool_for(""))
            job.outcome = outcome
        return results

    async def _next(self, job: Job) -> Any:
        """The next item that a thread appends to a job. Raises Refusal or EngineError in place of one."""
        try:
            return await job.next()
        except Exception as error:
            raise for_clients(error) from None

    def _count(self, chunk: Chunk, job: Job) -> None:
        self._totals.count(chunk, job)
        self._quotas.charge(job.entry.key, len(chunk.token_ids))

    @contextmanager
    def _job(self, queue: _Queue) -> Iterator[Job]:
        """Yields a job in `queue`, which ends after --request-seconds; in the background it may wait longer for others.
        Raises Refusal."""
        job, limit = Job(self._loop, journal.current()), self.config.request_seconds
        queue = self._background if job.entry.in_background and queue is self._answers else queue
        try:
            if self.is_closing:
                raise refusals.server_closing()
            if len(queue.jobs) >= queue.room:
                raise refusals.busy("The server is busy", self._totals.usual_seconds())
            self._quotas.begin(job.entry.key)
        except Refusal as refusal:
            job.entry.outcome = refusal.code
            self._totals.requests[refusal.code] += 1
            raise
        queue.jobs.add(job)
        self._idle.clear()
        timeout = Refusal("timeout", f"The request took longer than {limit} seconds, the limit of this server")
        timer = self._loop.call_later(limit, job.end, timeout)
        if job.entry.in_background:
            timer.cancel()
        try:
            yield job
        except (Refusal, EngineError) as error:
            job.outcome = error.code if isinstance(error, Refusal) else "error"
            raise
        finally:
            timer.cancel()
            job.entry.outcome = job.outcome
            job.close()
            self._thread.wake()  # so that the engine drops the request
            queue.jobs.discard(job)
            answer = queue is self._answers and job.outcome != "error"  # most errors precede any computation
            self._totals.count_end(job, answer=answer)
            if not any(queue.jobs for queue in self._queues):
                self._idle.set()

    def _with_limits(self, params: SamplingParams) -> SamplingParams:
        if params.reasoning_budget < 0:
            params = replace(params, reasoning_budget=self.config.reasoning_budget)
        limit = self.config.max_tokens
        if limit is None or (params.max_tokens is not None and 0 <= params.max_tokens <= limit):
            return params
        return replace(params, max_tokens=limit)

    def _with_priority_of_key(self, job: Job, options: PromptOptions | None) -> PromptOptions:
        """Return options with the priority of the request's key, unless its own is larger: it is served later then."""
        options, limits = options or PromptOptions(), self.config.keys.limits_of(job.entry.key or "")
        least = limits.get("priority", job.entry.priority)
        return options if least is None else replace(options, priority=max(least, options.priority))

    async def _submit(
        self, job: Job, prompt: Prompt, start: Submit, outbox: Outbox | None = None, *, compiles: bool = False
    ) -> Ticket:
        """Submit a request with `start`, in a thread of a pool. outbox: gets its chunks, in place of the job."""

        def submit() -> Ticket:
            with read_until(lambda: job.closed):
                in_background = bool(job.entry.in_background)
                ticket = start(into=outbox or job, gone=lambda: job.closed, in_background=in_background)
            job.keep(ticket)
            self._thread.wake()
            return ticket

        job.entry.prompt = prompt if self.config.log_prompts else None
        try:
            pool = self._readers.waiting_pool if compiles else self._readers.pool_for(prompt)
            ticket = await self._in_thread(submit, pool)
        except EngineError:
            if job.closed:  # ended while its constraint was compiled: raises the reason for that
                await self._next(job)
            raise
        self._totals.prompt_tokens += ticket.prompt_tokens
        self._quotas.charge(job.entry.key, ticket.prompt_tokens)
        job.entry.prompt_tokens += ticket.prompt_tokens
        return ticket

    async def save_session(self, name: str, prompt: Prompt, options: PromptOptions | None = None) -> int:
        """Save the stored part of `prompt`; return its number of tokens. Raises Refusal or EngineError."""
        folder = self.session_folder

        def save() -> int:
            file, limit = folder.file(name), folder.limit(name)
            return self.engine.save_session(file, prompt=prompt, options=options, progress=limit)

        # Other sessions do not wait until its images are decoded, which the engine remembers.
        preparation = partial(self.engine.prompt_ids, prompt, options) if has_images(prompt) else None
        return await self.run_on_disk("saved", save, preparation)

    async def load_session(self, name: str, cache_salt: str = "") -> int:
        """Load a session into the store; return its number of tokens. Raises Refusal or EngineError."""
        file = self.session_folder.file(name)

        def load() -> int:
            if not os.path.lexists(file):
                raise refusals.unknown_session(name)
            return len(self.engine.load_session(file, cache_salt=cache_salt).token_ids)

        return await self.run_on_disk("loaded", load)

    async def unload_adapter(self, name: str) -> None:
        """Call `Engine.unload_adapter`. Raises Refusal or EngineError."""
        await self.run_on_disk("removed", partial(self.engine.unload_adapter, name))

    def info_for(self, body: Mapping[str, Any]) -> ModelInfo:
        """The model, with the adapter that a body names, if it does. Raises BadRequest or Refusal."""
        adapters, info = self.engine.adapters, self.model_info
        if (name := adapter_name(body)) in adapters.unloaded:
            raise Refusal("model_not_found", f"The adapter {name} was unloaded; /v1/models lists what there is")
        name, scale = read_adapter(body, adapters.scales, adapters.numbers)
        own_name = name if body.get("model") == name else f"{info.name}:{name}"  # which chooses it again
        return replace(info, name=own_name, lora=name, lora_scale=scale) if name else info

    async def run_on_disk(self, outcome: str, work: Callable[[], T], preparation: Callable[[], Any] | None = None) -> T:
        """The result of `work`, run in the thread for sessions, one at a time, to its end even if nobody waits, and
        counted as `outcome`. preparation: see `_run_counted`. Raises Refusal or EngineError."""
        return await self._run_counted(self._transfers, self._disk.submit, outcome, work, preparation)

    @property
    def session_folder(self) -> SessionFolder:
        """The folder of --sessions. Raises Refusal without one."""
        if self._sessions is None:
            raise Refusal("sessions_off", "This server keeps no sessions: start it with --sessions FOLDER")
        return self._sessions

    def snapshot(self) -> Totals:
        return replace(deepcopy(self._totals), active=sum(len(queue.jobs) for queue in self._queues))

    async def status(self) -> Status:
        return await self._in_thread(self.engine.status, None)  # slow templates may hold all threads of a pool

    async def run_counted(self, outcome: str, work: Callable[[], T], prompt: Prompt = "") -> T:
        """The result of `work`, run in a thread and counted as `outcome`. prompt: what it reads. Raises Refusal or
        EngineError. Cancelling the task that waits cancels the request."""
        return await self._run_counted(self._texts, self._readers.pool_for(prompt, "counts").submit, outcome, work)

    async def _run_counted(
        self,
        queue: _Queue,
        submit: Callable[[Any], Any],
        outcome: str,
        work: Callable[[], T],
        preparation: Callable[[], Any] | None = None,
    ) -> T:
        """preparation: what is called first, in a thread that may wait."""
        with self._job(queue) as job:
            if preparation is not None:
                self._readers.waiting_pool.submit(partial(job.do, preparation))
                await self._next(job)
            submit(partial(job.do, work))
            result: T = await self._next(job)
            job.outcome = outcome
            return result

    async def _in_thread(self, function: Callable[[], T], pool: ThreadPoolExecutor | None) -> T:
        """The result of `function`, run in a thread of the pool or of the event loop. Raises EngineError or Refusal."""
        try:
            return await self._loop.run_in_executor(pool, function)
        except Exception as error:
            raise for_clients(error) from None
